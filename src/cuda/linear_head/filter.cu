#include <vector>

#include "cuda/cuda_status.h"
#include "cuda/linear_head/filter.h"
#include "cuda/linear_head/filter_kernels.cuh"
#include "cuda/linear_head/launch.h"

namespace ullage::lossk::cuda {

Status start_filter(const LinearParams& r, const Part& part, CUstream_st* stream) {
  const auto groups = static_cast<unsigned>(divide_up(part.rows, kChunkRows));
  linear_mark_tiles<<<dim3(static_cast<unsigned>(divide_up(r.layout.n_tiles, 128)), groups), 128, 0,
                      stream>>>(r, part.first, part.rows, part.group_row);
  linear_skipped_mass<<<static_cast<unsigned>(divide_up(part.rows, 8)), 256, 0, stream>>>(
      r, part.first, part.rows, part.group_row);
  linear_list_tiles<<<groups, 32, 0, stream>>>(r, part.first, part.group_row);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head filter", cudaGetLastError());
  return kCudaOk;
}

Status start_group_lists(const LinearParams& r, int m_tiles, int groups, CUstream_st* stream) {
  linear_list_groups<<<static_cast<unsigned>(m_tiles), 32, 0, stream>>>(r, groups);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head lists of rows", cudaGetLastError());
  return kCudaOk;
}

Status read_filter(const LinearParams& r, std::vector<SkippedMass>& rows, std::vector<int>& counts,
                   CUstream_st* stream) {
  rows.resize(static_cast<size_t>(r.n_tok));
  counts.resize(static_cast<size_t>(divide_up(r.n_tok, kChunkRows)));
  ULLAGE_RETURN_IF_CUDA_FAILS(
      "reading the filter's rows",
      cudaMemcpyAsync(rows.data(), r.filter.skipped, rows.size() * sizeof(SkippedMass),
                      cudaMemcpyDeviceToHost, stream));
  ULLAGE_RETURN_IF_CUDA_FAILS(
      "reading the filter's tiles",
      cudaMemcpyAsync(counts.data(), r.filter.tile_counts, counts.size() * sizeof(int),
                      cudaMemcpyDeviceToHost, stream));
  ULLAGE_RETURN_IF_CUDA_FAILS("waiting for the stream", cudaStreamSynchronize(stream));
  return kCudaOk;
}

}  // namespace ullage::lossk::cuda
