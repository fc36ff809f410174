#include "session/layer_math.h"

#include <cmath>

namespace ullage::session {

void rms_norm(const float* src, const float* weight, int64_t width, double eps, float* dst) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += static_cast<double>(src[i]) * src[i];
  const auto scale = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(width) + eps));
  for (int64_t i = 0; i < width; ++i) dst[i] = src[i] * scale * weight[i];
}

void fill_rope_table(std::span<const double> inverse_frequencies, int64_t n_positions,
                     float* table) {
  for (int64_t position = 0; position < n_positions; ++position) {
    for (const double frequency : inverse_frequencies) {
      const double angle = static_cast<double>(position) * frequency;
      *table++ = static_cast<float>(std::cos(angle));
      *table++ = static_cast<float>(std::sin(angle));
    }
  }
}

void rotate(const float* table_row, int64_t d_head, bool pairs_adjacent, float* head) {
  const int64_t half = d_head / 2;
  for (int64_t i = 0; i < half; ++i) {
    float& first = head[pairs_adjacent ? 2 * i : i];
    float& second = head[pairs_adjacent ? 2 * i + 1 : i + half];
    const float cos = table_row[2 * i];
    const float sin = table_row[2 * i + 1];
    const float rotated = first * cos - second * sin;
    second = second * cos + first * sin;
    first = rotated;
  }
}

void swiglu(const float* up, int64_t width, float* gate) {
  for (int64_t i = 0; i < width; ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}

}  // namespace ullage::session
