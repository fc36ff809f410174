#include "cuda/head_logits/held_rows.cuh"
#include "cuda/head_logits/row_kernels.h"

namespace ullage::lossk::cuda {

const void* held_rows_f32(Family family, bool softcap) {
  return kernel_of<HeldRowsKernel, float>(family, softcap);
}

}  // namespace ullage::lossk::cuda
