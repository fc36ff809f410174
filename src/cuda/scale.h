// Values times one factor, in place: for gradients whose upstream factor became known after them.
#pragma once

#include <cstdint>

#include "ullage/dtype.h"
#include "ullage/status.h"

struct CUstream_st;

namespace ullage::cuda {

// data [n]; factor: one value; both of the device. Where the factor is 1
// nothing is read or written; else each product is formed in f32, or f64 for f64, and rounded once.
// Errors: 621 to 623 of the device.
Status scale(void* data, int64_t n, DType dtype, const double* factor, CUstream_st* stream);

}  // namespace ullage::cuda
