// Products of quantised weight rows with the rows of a batch.
//
// A workgroup computes OUTPUTS outputs of the matrix, LANES lanes for each, for up to TILE rows of the batch,
// so that a weight is decoded once for all of them. Every weight row starts on a whole 32-bit word. One of
// WEIGHTS_F32, WEIGHTS_INT8 and WEIGHTS_INT4 is defined at compile time.

const uint LANES = 8;
const uint OUTPUTS = 8;
const uint TILE = 4;

layout(local_size_x = LANES * OUTPUTS) in;

layout(std430, set = 0, binding = 0) readonly buffer Weights { uint words[]; };
layout(std430, set = 0, binding = 1) readonly buffer Inputs { float inputs[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };

shared float partial[OUTPUTS][LANES][TILE];

#if defined(WEIGHTS_F32)
const uint WEIGHTS_PER_WORD = 1;
float decode(uint word, uint place) { return uintBitsToFloat(word); }
#elif defined(WEIGHTS_INT8)
const uint WEIGHTS_PER_WORD = 4;
float decode(uint word, uint place) { return float(bitfieldExtract(int(word), int(8 * place), 8)); }
#elif defined(WEIGHTS_INT4)
const uint WEIGHTS_PER_WORD = 8;
float decode(uint word, uint place) { return float(bitfieldExtract(word, int(4 * place), 4)) - 8.0; }
#endif

// A group never splits a word: it is a multiple of 8 weights, or the whole row.
float scale_of(uint scales, uint output_index, uint column, uint width, uint group) {
#if defined(WEIGHTS_F32)
    return 1.0;
#else
    uint groups = (width + group - 1) / group;
    return uintBitsToFloat(words[scales + output_index * groups + column / group]);
#endif
}

uint lane() { return gl_LocalInvocationID.x % LANES; }
uint place_in_group() { return gl_LocalInvocationID.x / LANES; }
uint output_id() { return gl_WorkGroupID.x * OUTPUTS + place_in_group(); }

// The sums of all lanes of an output; valid in lane 0.
float[TILE] sum_over_lanes(float sums[TILE]) {
    partial[place_in_group()][lane()] = sums;
    barrier();
    for (uint other = 1; other < LANES && lane() == 0; ++other) {
        for (uint row = 0; row < TILE; ++row) {
            sums[row] += partial[place_in_group()][other][row];
        }
    }
    barrier();
    return sums;
}

// The products of one weight row with `count` batch rows from `first_row` on; valid in lane 0.
// All invocations of a workgroup must call it: those without an output pass a count of 0.
float[TILE] row_products(uint matrix, uint scales, uint width, uint group, uint first_row, uint count) {
    uint row_words = (width + WEIGHTS_PER_WORD - 1) / WEIGHTS_PER_WORD;
    float sums[TILE] = float[TILE](0.0, 0.0, 0.0, 0.0);
    for (uint index = lane(); index < row_words && count > 0; index += LANES) {
        uint word = words[matrix + output_id() * row_words + index];
        uint column = index * WEIGHTS_PER_WORD;
        float scale = scale_of(scales, output_id(), column, width, group);
        for (uint place = 0; place < WEIGHTS_PER_WORD && column + place < width; ++place) {
            float weight = scale * decode(word, place);
            for (uint row = 0; row < count; ++row) {
                sums[row] += weight * inputs[(first_row + row) * width + column + place];
            }
        }
    }
    return sum_over_lanes(sums);
}
