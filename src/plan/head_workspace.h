// The workspace of a run: its parts, and every byte of them by purpose.
#pragma once

#include <cstdint>

#include "plan/head_plan.h"

namespace ullage::lossk {

// What a product of the type is computed in.
constexpr DType product_type(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// Columns at a time, and with them what a thread's scratch rows hold.
void set_strip(HeadLayout& layout, int64_t strip);

// Lays out the workspace for `chunk` rows and layout.strip columns at a time: slots, bookings and
// their sum, which is kTooMany (saturating.h) where it passes 2^63.
void carve(HeadLayout& layout, int64_t chunk);

}  // namespace ullage::lossk
