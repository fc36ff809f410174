// What a plan needs to know of the device that is current on this thread.
#pragma once

#include "ullage/lossk/cuda_head.h"
#include "ullage/status.h"

namespace ullage::cuda {

// Errors: 621 in a build without CUDA, or where there is no device.
Result<lossk::CudaDevice> current_device();

}  // namespace ullage::cuda
