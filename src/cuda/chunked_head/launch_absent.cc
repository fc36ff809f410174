#include "cuda/chunked_head/launch.h"

namespace ullage::lossk::cuda {
namespace {

Status absent() {
  return {kCudaUnavailable, "this build has no CUDA kernels; configure with ULLAGE_ENABLE_CUDA=ON"};
}

}  // namespace

Status ChunkedAlgorithms::choose(const ChunkedLayout&, const ullage::cuda::Cublas*&, const Set*&) {
  return absent();
}
Status launch_chunked_head(const HeadParams&, std::span<const RowPass>, const ChunkedParams&,
                           ChunkedAlgorithms&, CUstream_st*) {
  return absent();
}

}  // namespace ullage::lossk::cuda
