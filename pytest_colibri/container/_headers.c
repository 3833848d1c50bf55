/* Adds up the tensors of safetensors headers without making a Python object for each.

   safetensors.py says what a header must be; this is a short cut for the many that are plain. What it
   accepts, Python accepts too, with the same sums. It knows no more than that: whatever is wrong or merely
   unusual (an escape in a name, tensors in another order than their bytes) ends in "don't know", and Python
   reads the headers again. So this file needs no error messages, and whenever in doubt it may give up. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_RANK = 16,       /* as in safetensors.py */
    MAX_DIGITS = 6,      /* of a layer or an expert, as in families.py */
    MAX_NAMES = 1 << 20, /* more than Python allows */
    MAX_PROBES = 256,    /* a crowd in the hash table is chance or malice */
    MAX_METADATA = 16,   /* every key is compared with all before it */
    MAX_PATTERNS = 8,
    MAX_DTYPES = 32,
};
#define MAX_COUNT ((uint64_t)1 << 63) /* counts are below it, as in safetensors.py */
#define MAX_TOTAL ((uint64_t)1 << 60) /* of payload bytes: neither sums nor bits overflow */

/* ---- text: every access lies between at and end ---- */

typedef struct {
    const unsigned char *at, *end;
} Text;

static size_t length_of(Text text) { return (size_t)(text.end - text.at); }

static bool equal(Text one, Text other) {
    return length_of(one) == length_of(other) && memcmp(one.at, other.at, length_of(one)) == 0;
}

static bool is(Text text, const char *word) {
    return length_of(text) == strlen(word) && memcmp(text.at, word, length_of(text)) == 0;
}

static bool is_digit(unsigned char c) { return c >= '0' && c <= '9'; }

/* ---- JSON, the part of it that plain headers use ---- */

static void skip_space(Text *json) {
    while (json->at < json->end &&
           (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
        json->at++;
}

static bool take(Text *json, char c) {
    skip_space(json);
    if (json->at == json->end || *json->at != c) return false;
    json->at++;
    return true;
}

/* A string of ASCII without escapes: its bytes are its characters. */
static bool take_string(Text *json, Text *string) {
    if (!take(json, '"')) return false;
    const unsigned char *at = json->at;
    while (at < json->end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\') at++;
    *string = (Text){json->at, at};
    json->at = at;
    return at < json->end && *json->at++ == '"';
}

static bool take_count(Text *json, uint64_t *count) {
    skip_space(json);
    const unsigned char *first = json->at;
    uint64_t value = 0;
    for (; json->at < json->end && is_digit(*json->at); json->at++) {
        /* Below that, another digit cannot pass MAX_COUNT. */
        if (value >= MAX_COUNT / 10 - 1) return false;
        value = 10 * value + (uint64_t)(*json->at - '0');
    }
    *count = value;
    ptrdiff_t digits = json->at - first;
    return digits == 1 || (digits > 1 && *first != '0');
}

static bool take_counts(Text *json, uint64_t *counts, size_t room, size_t *used) {
    *used = 0;
    if (!take(json, '[')) return false;
    if (take(json, ']')) return true;
    do {
        if (*used == room || !take_count(json, &counts[(*used)++])) return false;
    } while (take(json, ','));
    return take(json, ']');
}

/* ---- the names seen so far, as hashes: two names that share one are taken for a repetition ---- */

typedef struct {
    uint64_t *slots; /* 0 is free */
    size_t size;     /* a power of two */
    size_t used;
} Names;

static uint64_t hash_of(Text name) {
    uint64_t hash = length_of(name);
    while (name.at < name.end) {
        uint64_t piece = 0;
        size_t bytes = length_of(name) < sizeof piece ? length_of(name) : sizeof piece;
        memcpy(&piece, name.at, bytes);
        name.at += bytes;
        hash = (hash ^ piece) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash ? hash : 1;
}

/* False where the hash is there already, or its neighbourhood is crowded. */
static bool insert(Names *names, uint64_t hash) {
    for (size_t probe = 0; probe < MAX_PROBES; probe++) {
        uint64_t *slot = &names->slots[(hash + probe) & (names->size - 1)];
        if (*slot == hash) return false;
        if (*slot == 0) {
            *slot = hash;
            names->used++;
            return true;
        }
    }
    return false;
}

static bool grow(Names *names) {
    Names larger = {NULL, names->size ? 4 * names->size : 1024, 0};
    larger.slots = calloc(larger.size, sizeof *larger.slots);
    if (!larger.slots) return false;
    bool kept = true;
    for (size_t i = 0; i < names->size && kept; i++)
        if (names->slots[i]) kept = insert(&larger, names->slots[i]);
    free(names->slots);
    *names = larger;
    return kept;
}

static bool is_new(Names *names, Text name) {
    if (names->used == MAX_NAMES) return false;
    if (2 * names->used >= names->size && !grow(names)) return false;
    return insert(names, hash_of(name));
}

/* ---- tensors, added up in groups: those in a row that match one pattern with the same numbers ---- */

typedef struct {
    Text name;
    uint64_t bits; /* of one element */
} Dtype;

typedef struct {
    int pattern; /* -1 for names that match none */
    unsigned numbers[2];
    uint64_t bytes;
} Group;

typedef struct {
    Text patterns[MAX_PATTERNS];
    Dtype dtypes[MAX_DTYPES];
    size_t pattern_count, dtype_count;
    Names names;
    uint64_t total_bytes;
    Group group; /* the one that the last tensor belongs to */
    PyObject *groups;
} Scan;

typedef struct {
    uint64_t bits, shape[MAX_RANK], place[2];
    size_t rank;
} Tensor;

static bool take_number(Text *name, unsigned *number) {
    const unsigned char *first = name->at;
    *number = 0;
    while (name->at < name->end && is_digit(*name->at) && name->at - first < MAX_DIGITS)
        *number = 10 * *number + (unsigned)(*name->at++ - '0');
    ptrdiff_t digits = name->at - first;
    return digits == 1 || (digits > 1 && *first != '0');
}

/* Whether a name matches a pattern of families.py: {...} is a number, * at the end is a rest. */
static bool matches(Text pattern, Text name, unsigned numbers[2]) {
    size_t found = 0;
    for (; pattern.at < pattern.end; pattern.at++) {
        if (*pattern.at == '*') return name.at < name.end;
        if (*pattern.at == '{') {
            if (found == 2 || !take_number(&name, &numbers[found++])) return false;
            while (pattern.at < pattern.end - 1 && *pattern.at != '}') pattern.at++;
        } else if (name.at == name.end || *name.at++ != *pattern.at) {
            return false;
        }
    }
    return name.at == name.end;
}

static Group group_of(const Scan *scan, Text name) {
    for (size_t i = 0; i < scan->pattern_count; i++) {
        Group group = {(int)i, {0, 0}, 0};
        if (matches(scan->patterns[i], name, group.numbers)) return group;
    }
    return (Group){-1, {0, 0}, 0};
}

/* Hands the open group over to Python; -1 with an exception where that fails. */
static int close_group(Scan *scan) {
    const Group *group = &scan->group;
    PyObject *item = Py_BuildValue("(iIIK)", group->pattern, group->numbers[0], group->numbers[1],
                                   (unsigned long long)group->bytes);
    int done = item ? PyList_Append(scan->groups, item) : -1;
    Py_XDECREF(item);
    return done;
}

static bool add(Scan *scan, Text name, uint64_t bytes) {
    Group next = group_of(scan, name), *open = &scan->group;
    bool same = next.pattern == open->pattern && next.numbers[0] == open->numbers[0] &&
                next.numbers[1] == open->numbers[1];
    if (!same) {
        if (close_group(scan) < 0) return false;
        *open = next;
    }
    open->bytes += bytes;
    return true;
}

/* ---- headers ---- */

static bool take_dtype(const Scan *scan, Text *json, uint64_t *bits) {
    Text name;
    if (!take_string(json, &name)) return false;
    for (size_t i = 0; i < scan->dtype_count; i++)
        if (equal(scan->dtypes[i].name, name)) {
            *bits = scan->dtypes[i].bits;
            return true;
        }
    return false;
}

/* Three members with three different keys are all of them, once each. */
static bool take_tensor(const Scan *scan, Text *json, Tensor *tensor) {
    bool dtype = false, shape = false, offsets = false;
    size_t used;
    if (!take(json, '{')) return false;
    do {
        Text key;
        if (!take_string(json, &key) || !take(json, ':')) return false;
        if (!dtype && is(key, "dtype"))
            dtype = take_dtype(scan, json, &tensor->bits);
        else if (!shape && is(key, "shape"))
            shape = take_counts(json, tensor->shape, MAX_RANK, &tensor->rank);
        else if (!offsets && is(key, "data_offsets"))
            offsets = take_counts(json, tensor->place, 2, &used) && used == 2;
        else
            return false;
    } while (take(json, ','));
    return dtype && shape && offsets && take(json, '}');
}

/* Whether elements of this shape take exactly these bytes. */
static bool takes(const Tensor *tensor, uint64_t bytes) {
    uint64_t bits = tensor->bits;
    for (size_t i = 0; i < tensor->rank; i++)
        if (tensor->shape[i] == 0) return bytes == 0;
    for (size_t i = 0; i < tensor->rank; i++) {
        if (bits > UINT64_MAX / tensor->shape[i]) return false;
        bits *= tensor->shape[i];
    }
    return bits % 8 == 0 && bits / 8 == bytes;
}

static bool take_metadata(Text *json) {
    Text keys[MAX_METADATA], value;
    if (!take(json, '{')) return false;
    if (take(json, '}')) return true;
    size_t used = 0;
    do {
        if (used == MAX_METADATA || !take_string(json, &keys[used])) return false;
        for (size_t i = 0; i < used; i++)
            if (equal(keys[i], keys[used])) return false;
        used++;
        if (!take(json, ':') || !take_string(json, &value)) return false;
    } while (take(json, ','));
    return take(json, '}');
}

static bool take_entry(Scan *scan, Text *json, bool *metadata, uint64_t *position) {
    Text name;
    if (!take_string(json, &name) || !take(json, ':')) return false;
    if (is(name, "__metadata__")) {
        bool first = !*metadata;
        *metadata = true;
        return first && take_metadata(json);
    }
    Tensor tensor;
    if (!take_tensor(scan, json, &tensor)) return false;
    /* Each begins where the one before ended: no hole, no overlap. */
    if (tensor.place[0] != *position || tensor.place[1] < *position) return false;
    uint64_t bytes = tensor.place[1] - *position;
    *position = tensor.place[1];
    return takes(&tensor, bytes) && is_new(&scan->names, name) && add(scan, name, bytes);
}

static bool take_header(Scan *scan, Text json, uint64_t payload_bytes) {
    bool metadata = false;
    uint64_t position = 0;
    if (payload_bytes > MAX_TOTAL - scan->total_bytes) return false;
    scan->total_bytes += payload_bytes;
    if (!take(&json, '{')) return false;
    if (!take(&json, '}')) {
        do {
            if (!take_entry(scan, &json, &metadata, &position)) return false;
        } while (take(&json, ','));
        if (!take(&json, '}')) return false;
    }
    skip_space(&json);
    return json.at == json.end && position == payload_bytes;
}

/* ---- Python: what fails here has set an exception ---- */

static bool is_tuple(PyObject *object) {
    if (!PyTuple_Check(object)) PyErr_SetString(PyExc_TypeError, "a tuple is needed");
    return PyTuple_Check(object);
}

/* False with an exception, or for "don't know" without. */
static bool take_shard(Scan *scan, PyObject *shard) {
    const char *header;
    Py_ssize_t length;
    long long payload_bytes;
    if (!is_tuple(shard) || !PyArg_ParseTuple(shard, "y#L", &header, &length, &payload_bytes)) return false;
    const unsigned char *first = (const unsigned char *)header;
    return payload_bytes >= 0 && take_header(scan, (Text){first, first + length}, (uint64_t)payload_bytes);
}

static PyObject *add_up_shards(Scan *scan, PyObject *shards) {
    PyObject *shard;
    while ((shard = PyIter_Next(shards))) {
        bool known = take_shard(scan, shard);
        Py_DECREF(shard);
        if (PyErr_Occurred()) return NULL;
        if (!known) Py_RETURN_NONE;
    }
    if (PyErr_Occurred() || close_group(scan) < 0) return NULL;
    return Py_BuildValue("(nO)", (Py_ssize_t)scan->names.used, scan->groups);
}

static bool read_patterns(Scan *scan, PyObject *patterns) {
    Py_ssize_t count = PyTuple_Size(patterns);
    for (Py_ssize_t i = 0; i < count && i < MAX_PATTERNS; i++) {
        char *text;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(patterns, i), &text, &length) < 0) return false;
        const unsigned char *first = (const unsigned char *)text;
        scan->patterns[scan->pattern_count++] = (Text){first, first + length};
    }
    if (count > MAX_PATTERNS) PyErr_SetString(PyExc_ValueError, "too many patterns");
    return count <= MAX_PATTERNS;
}

static bool read_dtypes(Scan *scan, PyObject *dtypes) {
    Py_ssize_t count = PyTuple_Size(dtypes);
    for (Py_ssize_t i = 0; i < count && i < MAX_DTYPES; i++) {
        const char *text;
        Py_ssize_t length;
        unsigned bits;
        PyObject *dtype = PyTuple_GetItem(dtypes, i);
        if (!is_tuple(dtype) || !PyArg_ParseTuple(dtype, "y#I", &text, &length, &bits)) return false;
        const unsigned char *first = (const unsigned char *)text;
        scan->dtypes[scan->dtype_count++] = (Dtype){{first, first + length}, bits};
    }
    if (count > MAX_DTYPES) PyErr_SetString(PyExc_ValueError, "too many dtypes");
    return count <= MAX_DTYPES;
}

static PyObject *add_up(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *shards, *patterns, *dtypes, *answer = NULL;
    Scan scan = {.group = {.pattern = -1}};
    if (!PyArg_ParseTuple(arguments, "OO!O!:add_up", &shards, &PyTuple_Type, &patterns, &PyTuple_Type, &dtypes))
        return NULL;
    PyObject *iterator = PyObject_GetIter(shards);
    scan.groups = PyList_New(0);
    if (iterator && scan.groups && read_patterns(&scan, patterns) && read_dtypes(&scan, dtypes))
        answer = add_up_shards(&scan, iterator);
    free(scan.names.slots);
    Py_XDECREF(scan.groups);
    Py_XDECREF(iterator);
    return answer;
}

static PyMethodDef methods[] = {
    {"add_up", add_up, METH_VARARGS, NULL}, /* described in _headers.pyi */
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_headers", .m_methods = methods,
};

PyMODINIT_FUNC PyInit__headers(void) { return PyModuleDef_Init(&definition); }
