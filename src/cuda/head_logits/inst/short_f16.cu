#include "cuda/head_logits/row_kernels.h"
#include "cuda/head_logits/short_rows.cuh"

namespace ullage::lossk::cuda {

const void* short_rows_f16(Family family, bool softcap) {
  return kernel_of<ShortRowsKernel, __half>(family, softcap);
}

}  // namespace ullage::lossk::cuda
