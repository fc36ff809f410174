#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/cuda_status.h"
#include "cuda/head_logits/launch.h"
#include "cuda/linear_head/column_kernels.cuh"
#include "cuda/linear_head/launch.h"

namespace ullage::lossk::cuda {

// inst/*.cu
template <class T>
Status launch_order(HeadParams p, const LinearParams& r, cudaStream_t stream);
extern template Status launch_order<__nv_bfloat16>(HeadParams, const LinearParams&, cudaStream_t);
extern template Status launch_order<__half>(HeadParams, const LinearParams&, cudaStream_t);

Status launch_linear_head(const HeadParams& p, const LinearParams& r, CUstream_st* stream) {
  ULLAGE_RETURN_IF_REFUSED(launch_census(p, stream));
  if (r.label_slots != nullptr) {
    ULLAGE_RETURN_IF_CUDA_FAILS(
        "linear_head label slots",
        cudaMemsetAsync(r.label_slots, 0xff, static_cast<size_t>(r.vocab) * sizeof(int), stream));
  }
  if (r.n_tok > 0) {
    linear_columns<<<static_cast<unsigned>(divide_up(r.n_tok, 256)), 256, 0, stream>>>(p, r);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head columns", cudaGetLastError());
  }
  if (r.n_tok > 0 && r.next_row != nullptr) {
    linear_chains<<<static_cast<unsigned>(divide_up(r.n_tok, kChainWarps)), 32 * kChainWarps, 0,
                    stream>>>(r);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head chains", cudaGetLastError());
  }
  ULLAGE_RETURN_IF_REFUSED(r.dtype == DType::kF16 ? launch_order<__half>(p, r, stream)
                                                  : launch_order<__nv_bfloat16>(p, r, stream));
  return launch_scalars(p, stream);
}

}  // namespace ullage::lossk::cuda
