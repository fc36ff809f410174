#include "cuda/head_logits/launch.h"

namespace ullage::lossk::cuda {
namespace {

Status absent() {
  return {kCudaUnavailable, "this build has no CUDA kernels; configure with ULLAGE_ENABLE_CUDA=ON"};
}

}  // namespace

Status launch_rows(const HeadParams&, const RowLaunch&, CUstream_st*) { return absent(); }
Status launch_head(const HeadParams&, std::span<const RowPass>, CUstream_st*) { return absent(); }
Status read_census(const Census*, Census&, CUstream_st*) { return absent(); }

}  // namespace ullage::lossk::cuda
