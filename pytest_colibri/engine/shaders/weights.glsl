// Products of quantised weight rows with the rows of a batch.
//
// One workgroup computes one output of the matrix for up to TILE rows of the batch, so that a weight is
// decoded once for all of them. Every weight row starts on a whole 32-bit word. One of WEIGHTS_F32,
// WEIGHTS_INT8 and WEIGHTS_INT4 is defined at compile time.

layout(local_size_x = 64) in;

const uint LANES = 64;
const uint TILE = 4;

layout(std430, set = 0, binding = 0) readonly buffer Weights { uint words[]; };
layout(std430, set = 0, binding = 1) readonly buffer Inputs { float inputs[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };

shared float partial[LANES][TILE];

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

// The sums over a weight row for `count` batch rows from `first_row` on; valid in lane 0 only.
float[TILE] row_products(uint matrix, uint scales, uint width, uint group, uint first_row, uint count) {
    uint lane = gl_LocalInvocationID.x;
    uint output_index = gl_WorkGroupID.x;
    uint row_words = (width + WEIGHTS_PER_WORD - 1) / WEIGHTS_PER_WORD;
    float sums[TILE] = float[TILE](0.0, 0.0, 0.0, 0.0);
    for (uint index = lane; index < row_words; index += LANES) {
        uint word = words[matrix + output_index * row_words + index];
        uint column = index * WEIGHTS_PER_WORD;
        float scale = scale_of(scales, output_index, column, width, group);
        for (uint place = 0; place < WEIGHTS_PER_WORD && column + place < width; ++place) {
            float weight = scale * decode(word, place);
            for (uint row = 0; row < count; ++row) {
                sums[row] += weight * inputs[(first_row + row) * width + column + place];
            }
        }
    }
    partial[lane] = sums;
    for (uint half_lanes = LANES / 2; half_lanes > 0; half_lanes /= 2) {
        barrier();
        if (lane < half_lanes) {
            for (uint row = 0; row < TILE; ++row) {
                partial[lane][row] += partial[lane + half_lanes][row];
            }
        }
    }
    sums = partial[0];
    barrier();
    return sums;
}
