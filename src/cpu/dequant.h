// Widening a stored row to float32, element by element.
#pragma once

#include <cstdint>

#include "cpu/element.h"

namespace ullage::cpu {

// dst[i] = element k0 + i of the row at `row`, for i < count. bf16 and f16 widen exactly; Q8_0 and
// Q4_0 are exact products (a 11-bit scale times an 8-bit integer); Q4_1 is that product plus the
// minimum, rounded once. `type` is not kF64. k0 and count need not be whole blocks.
void decode_row(ElementType type, const void* row, int64_t k0, int64_t count, float* dst);

}  // namespace ullage::cpu
