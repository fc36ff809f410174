#include "cuda/linear_head/orders.cuh"

namespace ullage::lossk::cuda {

template Status launch_order<__half>(HeadParams, const LinearParams&, cudaStream_t);

}  // namespace ullage::lossk::cuda
