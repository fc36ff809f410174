#include "runtime/device_presence.h"

#include <dlfcn.h>

namespace ullage::runtime {
namespace {

// CUDA driver API: CUresult cuInit(unsigned int), CUresult cuDeviceGetCount(int*); CUDA_SUCCESS is
// 0.
int64_t ask_driver() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned int)>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  const bool answered = init != nullptr && get_count != nullptr && init(0) == 0 &&
                        get_count(&count) == 0 && count > 0;
  // The driver stays loaded: it keeps threads and thread-local state that unloading would orphan.
  return answered ? count : 0;
}

}  // namespace

int64_t cuda_device_count() {
  static const int64_t count = ask_driver();
  return count;
}

}  // namespace ullage::runtime
