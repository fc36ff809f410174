// Device memory for tests, and whether there is a device.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace ullage::test {

// Why no CUDA test can run here, or "".
inline std::string no_device() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return std::string("no CUDA device: ") + cudaGetErrorString(error);
  return devices > 0 ? "" : "no CUDA device";
}

#define ULLAGE_SKIP_WITHOUT_DEVICE() \
  if (const std::string reason = no_device(); !reason.empty()) GTEST_SKIP() << reason

inline void expect_cuda(cudaError_t error) {
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// A block of device memory, filled with 0xff bytes (NaN in every type) unless given values.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    expect_cuda(cudaMalloc(&data_, bytes));
    expect_cuda(cudaMemset(data_, 0xff, bytes));
  }
  template <class T>
  explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(values.size() * sizeof(T)) {
    if (bytes_ > 0) expect_cuda(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory() { cudaFree(data_); }

  template <class T = void>
  T* data() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    if (!values.empty()) {
      expect_cuda(
          cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    }
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// float32, widened.
inline std::vector<double> doubles_of(const DeviceMemory& memory) {
  const std::vector<float> values = memory.read<float>();
  return {values.begin(), values.end()};
}

}  // namespace ullage::test
