// From matrices to a launched product: tensor maps, the walk over tiles, the cluster launch.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/cuda_status.h"
#include "cuda/product/product_sm90.cuh"
#include "cuda/product/tensor_map.h"

namespace ullage::cuda {

// [rows][cols] of a 16-bit type in memory.
struct MatrixOperand {
  const void* data;
  int64_t rows, cols, row_stride;
};

inline Status map_refused(int64_t rows, int64_t cols) {
  return {kCudaUnsupportedDevice, "the driver refused a tensor map of " + std::to_string(rows) +
                                      " x " + std::to_string(cols)};
}

inline Status map_operand(CUtensorMap& map, const MatrixOperand& x, int box_cols, int box_rows) {
  if (encode_map(&map, x.data, x.rows, x.cols, x.row_stride, box_cols, box_rows)) return kCudaOk;
  return map_refused(x.rows, x.cols);
}

// A of rows: boxes of 64 rows.
inline Status map_rows(ProductOperands& operands, const MatrixOperand& a) {
  return map_operand(operands.a, a, 64, 64);
}

// A blocked A whose row 0 of this call is its row `first_row`.
inline Status map_blocked(ProductOperands& operands, const BlockedMatrix& a, int64_t first_row) {
  operands.blocks = a;
  operands.first_row = static_cast<int>(first_row);
  const int last_blocks = a.n_blocks - (a.n_ranges - 1) * a.range_blocks;
  if (!encode_block_map(&operands.a_last, a.last, 1, last_blocks, a.rows, 0))
    return map_refused(a.rows, int64_t{last_blocks} * kBlockColumns);
  if (a.n_ranges == 1 || encode_block_map(&operands.a, a.first, a.n_ranges - 1, a.range_blocks,
                                          a.rows, a.range_stride)) {
    return kCudaOk;
  }
  return map_refused(a.rows, int64_t{a.range_blocks} * kBlockColumns);
}

// Where such an A with m contiguous lies from k = `from` on.
inline Status map_more(ProductOperands& operands, const BlockedMatrix& more, int64_t from) {
  operands.more_from = static_cast<int>(from);
  if (encode_block_map(&operands.a_more, more.last, 1, more.n_blocks, more.rows, 0)) return kCudaOk;
  return map_refused(more.rows, int64_t{more.n_blocks} * kBlockColumns);
}

// B's tile is brought in shares by the CTAs of a column.
template <class Tile, Major kB>
Status map_b(ProductOperands& operands, const MatrixOperand& b) {
  constexpr int kShare = kB == Major::kK ? Tile::kN / Tile::kClusterM : 64 / Tile::kClusterM;
  return map_operand(operands.b, b, 64, kShare);
}

inline Status map_sums(CUtensorMap& map, float* data, int64_t slices, int64_t rows, int64_t cols,
                       int64_t row_stride) {
  if (encode_sum_map(&map, data, slices, rows, cols, row_stride)) return kCudaOk;
  return map_refused(rows, cols);
}

template <class Tile>
ProductGrid grid_of(int64_t m, int64_t n, int64_t k, int slices, int64_t m_group) {
  ProductGrid grid;
  grid.m_tiles = static_cast<int>(divide_up(m, Tile::kM * Tile::kClusterM));
  grid.n_tiles = static_cast<int>(divide_up(n, Tile::kN * Tile::kClusterN));
  grid.m_group = static_cast<int>(std::min<int64_t>(m_group, grid.m_tiles));
  grid.k_blocks = static_cast<int>(divide_up(k, Tile::kK));
  grid.k_slices = slices;
  grid.slice_blocks = static_cast<int>(divide_up(grid.k_blocks, slices));
  return grid;
}

template <class Tile, Form kFormA, Major kA, Major kB, class Epilogue, bool kListed = false>
Status start_product(const char* what, const ProductOperands& operands, const ProductGrid& grid,
                     const typename Epilogue::Params& params, cudaStream_t stream,
                     const BlockLists& lists = {}) {
  const auto kernel = sm90::product_kernel<Tile, kFormA, kA, kB, Epilogue, kListed>;
  ULLAGE_RETURN_IF_CUDA_FAILS(
      what, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Tile::kSharedBytes));
  int64_t clusters = std::min<int64_t>(grid.tiles(), kResidentClusters);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {Tile::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(clusters * Tile::kCluster);
  config.blockDim = Tile::kThreads;
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  if (operands.tiles_read != nullptr) {
    // Blocks wait for each other: all of them run at once, or none.
    int resident = 0;
    ULLAGE_RETURN_IF_CUDA_FAILS(what, cudaOccupancyMaxActiveClusters(&resident, kernel, &config));
    clusters = std::min<int64_t>(clusters, std::max(resident, 1));
    config.gridDim = static_cast<unsigned>(clusters * Tile::kCluster);
    config.numAttrs = 2;
  }
  ULLAGE_RETURN_IF_CUDA_FAILS(what,
                              cudaLaunchKernelEx(&config, kernel, operands, grid, lists, params));
  return kCudaOk;
}

}  // namespace ullage::cuda
