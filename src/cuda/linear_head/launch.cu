#include <algorithm>

#include "cuda/cuda_status.h"
#include "cuda/head_logits/launch.h"
#include "cuda/linear_head/launch.h"
#include "cuda/linear_head/row_kernels.cuh"
#include "cuda/product/tensor_map.h"

namespace ullage::lossk::cuda {
namespace {

namespace sm90 = ullage::cuda::sm90;
using product::Major;
using product::ProductGrid;

// [rows][cols] bf16 in memory; the operand's tile of `along` rows (K-major) or columns (MN-major)
// shared by `sharers` CTAs.
struct Operand {
  const void* data;
  int64_t rows, cols, row_stride;
};

Status map_operand(CUtensorMap& map, const Operand& x, int box_cols, int box_rows) {
  if (product::encode_bf16_map(&map, x.data, x.rows, x.cols, x.row_stride, box_cols, box_rows))
    return kCudaOk;
  return {kCudaUnsupportedDevice, "the driver refused a tensor map of " + std::to_string(x.rows) +
                                      " x " + std::to_string(x.cols) + " bf16"};
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

template <class Tile, Major kA, Major kB, class Epilogue>
Status start_product(const char* what, const Operand& a, const Operand& b, const ProductGrid& grid,
                     const typename Epilogue::Params& params, cudaStream_t stream) {
  CUtensorMap a_map, b_map;
  ULLAGE_RETURN_IF_REFUSED(map_operand(a_map, a, 64, 64));
  constexpr int kShare = kB == Major::kK ? Tile::kN / Tile::kClusterM : 64 / Tile::kClusterM;
  ULLAGE_RETURN_IF_REFUSED(map_operand(b_map, b, 64, kShare));
  const auto kernel = sm90::product_kernel<Tile, kA, kB, Epilogue>;
  ULLAGE_RETURN_IF_CUDA_FAILS(
      what, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Tile::kSharedBytes));
  const int64_t clusters = std::min<int64_t>(grid.tiles(), kResidentClusters);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Tile::kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(clusters * Tile::kCluster);
  config.blockDim = Tile::kThreads;
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  ULLAGE_RETURN_IF_CUDA_FAILS(what,
                              cudaLaunchKernelEx(&config, kernel, a_map, b_map, grid, params));
  return kCudaOk;
}

// A part of the [n_tok][vocab] logits: rows [first, first + rows), columns [first_column,
// first_column + columns).
struct Part {
  int64_t first, rows, first_column, columns;
};

const void* bf16_rows(const void* base, int64_t row, int64_t stride) {
  return static_cast<const __nv_bfloat16*>(base) + row * stride;
}

// The part's exponentials, where `store`, and its tiles' sums, `n_tiles` to a row.
Status start_logits(const HeadParams& p, const LinearParams& r, const Part& part, int n_tiles,
                    bool store, cudaStream_t stream) {
  using Epilogue = sm90::ScaledExponentials<LogitsTile>;
  Epilogue::Params params;
  params.e = store ? static_cast<__nv_bfloat16*>(r.exponentials) : nullptr;
  params.e_stride = r.layout.e_stride;
  params.columns = r.columns + part.first;
  params.partial = reinterpret_cast<float2*>(r.partial);
  params.label_logit = r.label_logit;
  params.rows = static_cast<int>(part.rows);
  params.vocab = static_cast<int>(part.columns);
  params.n_tiles = n_tiles;
  params.first_column = static_cast<int>(part.first_column);
  params.scale = p.scale;
  const Operand hidden{bf16_rows(r.hidden, part.first, r.hidden_stride), part.rows, r.d_model,
                       r.hidden_stride};
  const Operand weight{bf16_rows(r.weight, part.first_column, r.weight_stride), part.columns,
                       r.d_model, r.weight_stride};
  // All rows against a tile of the weight before the next: the weight is read once.
  const ProductGrid grid = grid_of<LogitsTile>(part.rows, part.columns, r.d_model, 1, part.rows);
  return start_product<LogitsTile, Major::kK, Major::kK, Epilogue>("linear_head logits", hidden,
                                                                   weight, grid, params, stream);
}

// slices (+)= E weight over the part's columns, cut into `n_slices`.
Status start_hidden_product(const LinearParams& r, const Part& part, int n_slices, bool keeps_old,
                            cudaStream_t stream) {
  using Epilogue = sm90::ChainF32<GradientTile>;
  const Epilogue::Params params{r.slices,
                                r.d_model,
                                part.rows * r.d_model,
                                static_cast<int>(part.rows),
                                static_cast<int>(r.d_model),
                                keeps_old};
  const Operand e{r.exponentials, part.rows, part.columns, r.layout.e_stride};
  const Operand weight{bf16_rows(r.weight, part.first_column, r.weight_stride), part.columns,
                       r.d_model, r.weight_stride};
  const ProductGrid grid =
      grid_of<GradientTile>(part.rows, r.d_model, part.columns, n_slices, part.rows);
  return start_product<GradientTile, Major::kK, Major::kMN, Epilogue>("linear_head d_hidden", e,
                                                                      weight, grid, params, stream);
}

Status start_hidden_gradient(const LinearParams& r, const Part& part, cudaStream_t stream) {
  linear_hidden_gradient<<<static_cast<unsigned>(part.rows), 256, 0, stream>>>(r, part.first,
                                                                               part.rows);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head d_hidden rows", cudaGetLastError());
  return kCudaOk;
}

// d_weight_sum (+)= E^T scaled_hidden over the part's rows; the sum starts at the part's first
// column.
Status start_weight_gradient(const LinearParams& r, const Part& part, bool keeps_old,
                             cudaStream_t stream) {
  using Epilogue = sm90::ChainF32<GradientTile>;
  const Epilogue::Params params{r.d_weight_sum,
                                r.d_weight_sum_stride,
                                0,
                                static_cast<int>(part.columns),
                                static_cast<int>(r.d_model),
                                keeps_old};
  const Operand e{r.exponentials, part.rows, part.columns, r.layout.e_stride};
  const Operand hidden{r.scaled_hidden, part.rows, r.d_model, r.d_model};
  const ProductGrid grid =
      grid_of<GradientTile>(part.columns, r.d_model, part.rows, 1, kWeightGroup);
  return start_product<GradientTile, Major::kMN, Major::kMN, Epilogue>(
      "linear_head d_weight", e, hidden, grid, params, stream);
}

// The labels' columns of d_weight, then the rounding where the caller's type is bf16.
Status finish_weight_gradient(const LinearParams& r, const Part& part, cudaStream_t stream) {
  if (r.n_tok > 0) {
    linear_label_gradient<<<static_cast<unsigned>(r.n_tok), 256, 0, stream>>>(r, part.first_column,
                                                                              part.columns);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head label rows of d_weight", cudaGetLastError());
  }
  if (r.d_weight_rounded != nullptr) {
    linear_round_weight<<<static_cast<unsigned>(part.columns), 256, 0, stream>>>(r,
                                                                                 part.first_column);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head rounding of d_weight", cudaGetLastError());
  }
  return kCudaOk;
}

Status start_rows(const HeadParams& p, const LinearParams& r, const Part& part, bool gradients,
                  cudaStream_t stream) {
  linear_rows<<<static_cast<unsigned>(part.rows), 128, 0, stream>>>(p, r, part.first, gradients);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head rows", cudaGetLastError());
  return kCudaOk;
}

Part rows_at(const LinearParams& r, int64_t first) {
  return {first, std::min(r.layout.chunk, r.n_tok - first), 0, r.vocab};
}

// Chunks of rows over the whole vocabulary.
Status launch_chunks(HeadParams p, const LinearParams& r, cudaStream_t stream) {
  const bool gradients = r.d_hidden != nullptr || r.d_weight_sum != nullptr;
  const bool sequences = p.n_sequence_terms > 0 && r.n_tok > 0;
  const bool one_chunk = r.layout.n_chunks == 1;
  const int n_tiles = r.layout.n_tiles;
  if (sequences) {
    // A sequence's slope needs the log-probabilities of all its rows.
    for (int64_t first = 0; first < r.n_tok; first += r.layout.chunk) {
      const Part part = rows_at(r, first);
      ULLAGE_RETURN_IF_REFUSED(start_logits(p, r, part, n_tiles, gradients && one_chunk, stream));
      ULLAGE_RETURN_IF_REFUSED(start_rows(p, r, part, false, stream));
    }
    ULLAGE_RETURN_IF_REFUSED(launch_sequences(p, stream));
    p.slopes_ready = true;
  }
  const bool keeps_old = r.accumulate && r.d_weight_rounded == nullptr;
  for (int64_t first = 0; first < r.n_tok && (gradients || !sequences); first += r.layout.chunk) {
    const Part part = rows_at(r, first);
    if (!(sequences && one_chunk))
      ULLAGE_RETURN_IF_REFUSED(start_logits(p, r, part, n_tiles, gradients, stream));
    ULLAGE_RETURN_IF_REFUSED(start_rows(p, r, part, gradients, stream));
    if (r.d_hidden != nullptr) {
      ULLAGE_RETURN_IF_REFUSED(start_hidden_product(r, part, r.layout.vocab_slices, false, stream));
      ULLAGE_RETURN_IF_REFUSED(start_hidden_gradient(r, part, stream));
    }
    if (r.d_weight_sum != nullptr) {
      ULLAGE_RETURN_IF_REFUSED(start_weight_gradient(r, part, keeps_old || first > 0, stream));
    }
  }
  if (r.d_weight_sum == nullptr) return kCudaOk;
  if (r.n_tok == 0 && !keeps_old) {
    ULLAGE_RETURN_IF_CUDA_FAILS(
        "linear_head d_weight of no rows",
        cudaMemset2DAsync(r.d_weight_sum, static_cast<size_t>(r.d_weight_sum_stride) * 4, 0,
                          static_cast<size_t>(r.d_model) * 4, static_cast<size_t>(r.vocab),
                          stream));
  }
  return finish_weight_gradient(r, {0, r.n_tok, 0, r.vocab}, stream);
}

// The rows' statistics first; then, strip by strip of the vocabulary, the logits of all rows again
// and both gradients. A row of d_weight is complete within its strip and is rounded there.
Status launch_strips(const HeadParams& p, const LinearParams& r, cudaStream_t stream) {
  for (int64_t first = 0; first < r.n_tok; first += r.layout.chunk) {
    const Part part = rows_at(r, first);
    ULLAGE_RETURN_IF_REFUSED(start_logits(p, r, part, r.layout.n_tiles, false, stream));
    ULLAGE_RETURN_IF_REFUSED(start_rows(p, r, part, true, stream));
  }
  for (int64_t column = 0; column < r.vocab; column += r.layout.strip) {
    const Part part{0, r.n_tok, column, std::min(r.layout.strip, r.vocab - column)};
    ULLAGE_RETURN_IF_REFUSED(start_logits(p, r, part, r.layout.strip_tiles, true, stream));
    linear_settle_strip<<<static_cast<unsigned>(divide_up(r.n_tok, 8)), 256, 0, stream>>>(
        r, part.columns);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head strip shifts", cudaGetLastError());
    if (r.d_hidden != nullptr) {
      ULLAGE_RETURN_IF_REFUSED(start_hidden_product(r, part, 1, column > 0, stream));
    }
    ULLAGE_RETURN_IF_REFUSED(start_weight_gradient(r, part, false, stream));
    ULLAGE_RETURN_IF_REFUSED(finish_weight_gradient(r, part, stream));
  }
  return r.d_hidden == nullptr ? Status(kCudaOk)
                               : start_hidden_gradient(r, {0, r.n_tok, 0, r.vocab}, stream);
}

}  // namespace

Status launch_linear_head(const HeadParams& p, const LinearParams& r, CUstream_st* stream) {
  ULLAGE_RETURN_IF_REFUSED(launch_census(p, stream));
  if (r.n_tok > 0) {
    linear_columns<<<static_cast<unsigned>(divide_up(r.n_tok, 256)), 256, 0, stream>>>(p, r);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head columns", cudaGetLastError());
  }
  ULLAGE_RETURN_IF_REFUSED(r.layout.strip == 0 ? launch_chunks(p, r, stream)
                                               : launch_strips(p, r, stream));
  return launch_scalars(p, stream);
}

}  // namespace ullage::lossk::cuda
