#include "cuda/head_logits/row_kernels.h"
#include "cuda/head_logits/short_rows.cuh"

namespace ullage::lossk::cuda {

const void* short_rows_bf16(Family family, bool softcap) {
  return kernel_of<ShortRowsKernel, __nv_bfloat16>(family, softcap);
}

}  // namespace ullage::lossk::cuda
