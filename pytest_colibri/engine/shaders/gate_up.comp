#version 450
#extension GL_GOOGLE_include_directive : require
#include "weights.glsl"

// SiLU(gate * x) * (up * x) of one expert, for all its rows of the batch.

layout(push_constant) uniform Constants {
    uint gate_words;
    uint gate_scales;
    uint up_words;
    uint up_scales;
    uint width;
    uint outputs_count;
    uint group;
    uint first_row;
    uint rows;
};

void main() {
    uint tile_row = gl_WorkGroupID.y * TILE;
    uint count = output_id() < outputs_count ? min(TILE, rows - tile_row) : 0;
    float gate[TILE] = row_products(gate_words, gate_scales, width, group, first_row + tile_row, count);
    float up[TILE] = row_products(up_words, up_scales, width, group, first_row + tile_row, count);
    if (lane() != 0) {
        return;
    }
    for (uint row = 0; row < count; ++row) {
        float activated = gate[row] / (1.0 + exp(-gate[row]));
        outputs[(first_row + tile_row + row) * outputs_count + output_id()] = activated * up[row];
    }
}
