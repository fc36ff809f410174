#include "cuda/head_logits/row_kernels.h"
#include "cuda/head_logits/streamed_rows.cuh"

namespace ullage::lossk::cuda {

const void* streamed_rows_f32(Family family, bool softcap) {
  return kernel_of<StreamedRows, float>(family, softcap);
}

}  // namespace ullage::lossk::cuda
