// What a decoder layer does besides products and attention, one row at a time, in float32.
#pragma once

#include <cstdint>
#include <span>

namespace ullage::session {

// dst[i] = src[i] * weight[i] / sqrt(mean(src^2) + eps) over `width` elements; dst may be src. The
// mean is taken in float64. https://arxiv.org/abs/1910.07467
void rms_norm(const float* src, const float* weight, int64_t width, double eps, float* dst);

// table[position][inverse_frequencies.size()][2] = cos and sin of position * frequency, computed in
// float64, for positions [0, n_positions). https://arxiv.org/abs/2104.09864
void fill_rope_table(std::span<const double> inverse_frequencies, int64_t n_positions,
                     float* table);

// Rotates one head of d_head elements by one position's [d_head / 2][2] table row. Pairs are
// (2i, 2i + 1) where `pairs_adjacent`, else (i, i + d_head / 2).
void rotate(const float* table_row, int64_t d_head, bool pairs_adjacent, float* head);

// gate[i] = silu(gate[i]) * up[i], silu(x) = x / (1 + exp(-x)). https://arxiv.org/abs/2002.05202
void swiglu(const float* up, int64_t width, float* gate);

}  // namespace ullage::session
