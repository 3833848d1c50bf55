#version 450
#extension GL_GOOGLE_include_directive : require
#include "weights.glsl"

// The down projection of one expert, for all its rows of the batch.

layout(push_constant) uniform Constants {
    uint down_words;
    uint down_scales;
    uint width;
    uint outputs_count;
    uint group;
    uint first_row;
    uint rows;
};

void main() {
    uint tile_row = gl_WorkGroupID.y * TILE;
    uint count = output_id() < outputs_count ? min(TILE, rows - tile_row) : 0;
    float sums[TILE] = row_products(down_words, down_scales, width, group, first_row + tile_row, count);
    if (lane() != 0) {
        return;
    }
    for (uint row = 0; row < count; ++row) {
        outputs[(first_row + tile_row + row) * outputs_count + output_id()] = sums[row];
    }
}
