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
    uint group;
    uint first_row;
    uint rows;
};

void main() {
    uint tile_row = gl_WorkGroupID.y * TILE;
    uint count = min(TILE, rows - tile_row);
    float gate[TILE] = row_products(gate_words, gate_scales, width, group, first_row + tile_row, count);
    float up[TILE] = row_products(up_words, up_scales, width, group, first_row + tile_row, count);
    if (gl_LocalInvocationID.x != 0) {
        return;
    }
    for (uint row = 0; row < count; ++row) {
        float activated = gate[row] / (1.0 + exp(-gate[row]));
        outputs[(first_row + tile_row + row) * gl_NumWorkGroups.x + gl_WorkGroupID.x] = activated * up[row];
    }
}
