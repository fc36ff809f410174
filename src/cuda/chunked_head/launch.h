// From a plan and filled parameters to products and kernels on a stream. Without CUDA in the build
// every function answers 621.
#pragma once

#include <array>
#include <map>
#include <mutex>

#include "cuda/chunked_head/params.h"
#include "cuda/head_logits/launch.h"

namespace ullage::lossk::cuda {

// The algorithms of a plan's products on each device that it ran on.
class ChunkedAlgorithms {
 public:
  using Set = std::array<std::array<ullage::cuda::ProductAlgorithm, kVocabParts>, kProducts>;
  // Chosen on the first call for a device. `blas` and `set`: the current device's.
  Status choose(const ChunkedLayout& layout, const ullage::cuda::Cublas*& blas, const Set*& set);

 private:
  std::mutex mutex_;
  std::map<int, Set> sets_;
};

// `rows` and `passes`: the terms and the vectors; the matrices they lack are filled in here, a
// chunk at a time.
Status launch_chunked_head(const HeadParams& rows, std::span<const RowPass> passes,
                           const ChunkedParams& chunked, ChunkedAlgorithms& algorithms,
                           CUstream_st* stream);

}  // namespace ullage::lossk::cuda
