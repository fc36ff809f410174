// What `run` on a GPU refuses before it launches anything: shapes, types and missing inputs. Values
// lie on the device and are checked there.
#pragma once

#include "ullage/lossk/head.h"

namespace ullage::lossk::cuda {

Status check_device_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                           const Inputs& inputs, const Outputs& outputs);

}  // namespace ullage::lossk::cuda
