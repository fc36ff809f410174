// Is a CUDA device usable on this host? Asked of the driver at run time, so that nothing links
// against CUDA.
#pragma once

#include <cstdint>

namespace ullage::runtime {

// Devices the CUDA driver reports after it initialised; 0 where there is no driver or it refuses.
int64_t cuda_device_count();

}  // namespace ullage::runtime
