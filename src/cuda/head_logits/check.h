// What `run` on a GPU refuses before it launches anything: shapes, types and missing inputs. Values
// lie on the device and are checked there.
#pragma once

#include <cstdint>
#include <string_view>

#include "ullage/lossk/head.h"

namespace ullage::lossk::cuda {

// A matrix of the type and shape that the plan has.
Status check_matrix(std::string_view field, const MatrixView& view, DType dtype, int64_t rows,
                    int64_t cols);

// What both doors share: vectors, ids, the terms' needs and the outputs of rows.
Status check_row_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                        const Inputs& inputs, const Outputs& outputs);

// The logits door.
Status check_device_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                           const Inputs& inputs, const Outputs& outputs);

}  // namespace ullage::lossk::cuda
