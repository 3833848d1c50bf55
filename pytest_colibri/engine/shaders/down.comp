#version 450
#extension GL_GOOGLE_include_directive : require
#include "weights.glsl"

// The down projection of one expert, for all its rows of the batch.

layout(push_constant) uniform Constants {
    uint down_words;
    uint down_scales;
    uint width;
    uint group;
    uint first_row;
    uint rows;
};

void main() {
    uint tile_row = gl_WorkGroupID.y * TILE;
    uint count = min(TILE, rows - tile_row);
    float sums[TILE] = row_products(down_words, down_scales, width, group, first_row + tile_row, count);
    if (gl_LocalInvocationID.x != 0) {
        return;
    }
    for (uint row = 0; row < count; ++row) {
        outputs[(first_row + tile_row + row) * gl_NumWorkGroups.x + gl_WorkGroupID.x] = sums[row];
    }
}
