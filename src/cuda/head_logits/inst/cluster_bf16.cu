#include "cuda/head_logits/cluster_rows.cuh"
#include "cuda/head_logits/row_kernels.h"

namespace ullage::lossk::cuda {

const void* cluster_rows_bf16(Family family, bool softcap) {
  return kernel_of<ClusterRows, __nv_bfloat16>(family, softcap);
}

}  // namespace ullage::lossk::cuda
