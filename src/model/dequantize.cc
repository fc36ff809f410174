// Stored elements to float32, as ggml's quantised formats define them (ggml-quants.c, and the gguf
// Python package that the tests hold this to). A block is x = d * q (+ m), in float32, with d and m
// stored as float16.
#include <cstring>

#include "model/weight.h"
#include "ullage/dtype.h"

namespace ullage::model {
namespace {

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

int byte_at(const std::byte* bytes, int i) { return static_cast<int>(bytes[i]); }
int signed_byte_at(const std::byte* bytes, int i) { return static_cast<int8_t>(bytes[i]); }
float half_at(const std::byte* at) { return F16{load<uint16_t>(at)}.to_float(); }

// The simple formats: 32 elements; nibble j holds elements j (low half) and j + 16 (high half).
constexpr int kSimple = 32;

int nibble(const std::byte* nibbles, int i) {
  return i < 16 ? byte_at(nibbles, i) & 15 : byte_at(nibbles, i - 16) >> 4;
}

void q4_0(const std::byte* block, float* dst) {  // f16 d; 16 bytes of nibbles
  const float d = half_at(block);
  for (int i = 0; i < kSimple; ++i) dst[i] = d * static_cast<float>(nibble(block + 2, i) - 8);
}

void q4_1(const std::byte* block, float* dst) {  // f16 d, m; 16 bytes of nibbles
  const float d = half_at(block);
  const float m = half_at(block + 2);
  for (int i = 0; i < kSimple; ++i) dst[i] = d * static_cast<float>(nibble(block + 4, i)) + m;
}

int fifth_bit(uint32_t high, int i) { return static_cast<int>((high >> i) & 1u) << 4; }

void q5_0(const std::byte* block, float* dst) {  // f16 d; u32 of fifth bits; 16 bytes of nibbles
  const float d = half_at(block);
  const auto high = load<uint32_t>(block + 2);
  for (int i = 0; i < kSimple; ++i) {
    dst[i] = d * static_cast<float>((nibble(block + 6, i) | fifth_bit(high, i)) - 16);
  }
}

void q5_1(const std::byte* block, float* dst) {  // f16 d, m; u32 of fifth bits; nibbles
  const float d = half_at(block);
  const float m = half_at(block + 2);
  const auto high = load<uint32_t>(block + 4);
  for (int i = 0; i < kSimple; ++i) {
    dst[i] = d * static_cast<float>(nibble(block + 8, i) | fifth_bit(high, i)) + m;
  }
}

void q8_0(const std::byte* block, float* dst) {  // f16 d; 32 signed bytes
  const float d = half_at(block);
  for (int i = 0; i < kSimple; ++i) dst[i] = d * static_cast<float>(signed_byte_at(block + 2, i));
}

// The K formats: 256 elements, in groups of 16 or 32 with a scale (and a minimum) of their own.
constexpr int kSuper = 256;

// Two bits of element i: 32 bytes hold 128 elements, 2 bits each, 32 elements a bit pair.
int bit_pair(const std::byte* pairs, int i) {
  return (byte_at(pairs, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2)) & 3;
}

void q2_k(const std::byte* block, float* dst) {  // 16 bytes of scale | min << 4; 64; f16 d, dmin
  const std::byte* pairs = block + 16;
  const float d = half_at(block + 80);
  const float d_min = half_at(block + 82);
  for (int i = 0; i < kSuper; ++i) {
    const int packed = byte_at(block, i / 16);
    dst[i] = d * static_cast<float>(packed & 15) * static_cast<float>(bit_pair(pairs, i)) -
             d_min * static_cast<float>(packed >> 4);
  }
}

void q3_k(const std::byte* block, float* dst) {  // 32 of third bits; 64; 12 of scales; f16 d
  const std::byte* pairs = block + 32;
  const std::byte* scales = block + 96;  // 6 bits each: low nibbles in 8 bytes, high pairs in 4
  const float d = half_at(block + 108);
  for (int i = 0; i < kSuper; ++i) {
    const int group = i / 16;
    const int low = group < 8 ? byte_at(scales, group) & 15 : byte_at(scales, group - 8) >> 4;
    const int high = (byte_at(scales, 8 + group % 4) >> (group / 4 * 2)) & 3;
    // A set third bit means nothing to subtract.
    const int third = (byte_at(block, i % 32) >> (i / 32)) & 1;
    dst[i] = d * static_cast<float>((low | high << 4) - 32) *
             static_cast<float>(bit_pair(pairs, i) - (third ^ 1) * 4);
  }
}

struct ScaleMin {
  float scale;
  float min;
};

// Of group 0 to 7 of Q4_K and Q5_K: 6 bits each in 12 bytes. Bytes 0-3 and 4-7 hold the first four
// scales and minima; their upper bit pairs, with the nibbles of bytes 8-11, the last four.
ScaleMin scale_min(const std::byte* packed, int group) {
  if (group < 4) {
    return {static_cast<float>(byte_at(packed, group) & 63),
            static_cast<float>(byte_at(packed, group + 4) & 63)};
  }
  const int nibbles = byte_at(packed, group + 4);
  return {static_cast<float>((nibbles & 15) | (byte_at(packed, group - 4) >> 6) << 4),
          static_cast<float>((nibbles >> 4) | (byte_at(packed, group) >> 6) << 4)};
}

// Four bits of element i: 32 bytes hold 64 elements.
int nibble_of_64(const std::byte* nibbles, int i) {
  return (byte_at(nibbles, i / 64 * 32 + i % 32) >> (i % 64 / 32 * 4)) & 15;
}

void q4_k(const std::byte* block, float* dst) {  // f16 d, dmin; 12 of scales; 128 of nibbles
  const float d = half_at(block);
  const float d_min = half_at(block + 2);
  for (int i = 0; i < kSuper; ++i) {
    const auto [scale, min] = scale_min(block + 4, i / 32);
    dst[i] = d * scale * static_cast<float>(nibble_of_64(block + 16, i)) - d_min * min;
  }
}

void q5_k(const std::byte* block, float* dst) {  // f16 d, dmin; 12; 32 of fifth bits; 128
  const float d = half_at(block);
  const float d_min = half_at(block + 2);
  for (int i = 0; i < kSuper; ++i) {
    const auto [scale, min] = scale_min(block + 4, i / 32);
    const int fifth = (byte_at(block + 16, i % 32) >> (i / 32)) & 1;
    dst[i] = d * scale * static_cast<float>(nibble_of_64(block + 48, i) | fifth << 4) - d_min * min;
  }
}

void q6_k(const std::byte* block, float* dst) {  // 128 of nibbles; 64 of bit pairs; 16 of i8; f16 d
  const float d = half_at(block + 208);
  for (int i = 0; i < kSuper; ++i) {
    const int low = (byte_at(block, i / 128 * 64 + i % 64) >> (i % 128 / 64 * 4)) & 15;
    const int high = bit_pair(block + 128, i);
    dst[i] = d * static_cast<float>(signed_byte_at(block + 192, i / 16)) *
             static_cast<float>((low | high << 4) - 32);
  }
}

void q8_k(const std::byte* block, float* dst) {  // f32 d; 256 signed bytes; 32 of sums, not needed
  const auto d = load<float>(block);
  for (int i = 0; i < kSuper; ++i) dst[i] = d * static_cast<float>(signed_byte_at(block + 4, i));
}

template <auto block_to_float>
void widen(const std::byte* src, int64_t n_blocks, int64_t elements, int64_t bytes, float* dst) {
  for (int64_t b = 0; b < n_blocks; ++b) block_to_float(src + b * bytes, dst + b * elements);
}

void f64(const std::byte* src, float* dst) { *dst = static_cast<float>(load<double>(src)); }
void f32(const std::byte* src, float* dst) { *dst = load<float>(src); }
void f16(const std::byte* src, float* dst) { *dst = half_at(src); }
void bf16(const std::byte* src, float* dst) { *dst = BF16{load<uint16_t>(src)}.to_float(); }

auto widener(ElementType type) {
  switch (type) {
    case ElementType::kF64:
      return widen<f64>;
    case ElementType::kF32:
      return widen<f32>;
    case ElementType::kF16:
      return widen<f16>;
    case ElementType::kBF16:
      return widen<bf16>;
    case ElementType::kQ4_0:
      return widen<q4_0>;
    case ElementType::kQ4_1:
      return widen<q4_1>;
    case ElementType::kQ5_0:
      return widen<q5_0>;
    case ElementType::kQ5_1:
      return widen<q5_1>;
    case ElementType::kQ8_0:
      return widen<q8_0>;
    case ElementType::kQ2_K:
      return widen<q2_k>;
    case ElementType::kQ3_K:
      return widen<q3_k>;
    case ElementType::kQ4_K:
      return widen<q4_k>;
    case ElementType::kQ5_K:
      return widen<q5_k>;
    case ElementType::kQ6_K:
      return widen<q6_k>;
    case ElementType::kQ8_K:
      return widen<q8_k>;
  }
  return widen<f32>;
}

}  // namespace

void dequantize(const Weight& weight, int64_t row, int64_t first, int64_t count, float* dst) {
  const int64_t elements = block_elements(weight.type);
  const int64_t bytes = block_bytes(weight.type);
  const std::byte* src = weight.data + row * weight.row_bytes + first / elements * bytes;
  widener(weight.type)(src, count / elements, elements, bytes, dst);
}

}  // namespace ullage::model
