#include <algorithm>

#include "cuda/cuda_status.h"
#include "cuda/head_logits/launch.h"
#include "cuda/linear_head/launch.h"
#include "cuda/linear_head/row_kernels.cuh"
#include "cuda/product/tensor_map.h"

namespace ullage::lossk::cuda {
namespace {

namespace sm90 = ullage::cuda::sm90;
using product::BlockedMatrix;
using product::BlockLists;
using product::Form;
using product::Major;
using product::ProductGrid;
using product::ProductOperands;

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

Status map_refused(int64_t rows, int64_t cols) {
  return {kCudaUnsupportedDevice, "the driver refused a tensor map of " + std::to_string(rows) +
                                      " x " + std::to_string(cols)};
}

Status map_sums(CUtensorMap& map, float* data, int64_t slices, int64_t rows, int64_t cols,
                int64_t row_stride) {
  if (product::encode_f32_store_map(&map, data, slices, rows, cols, row_stride)) return kCudaOk;
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

Status map_blocks(CUtensorMap& map, const void* data, int64_t ranges, int64_t blocks, int64_t rows,
                  int64_t range_stride) {
  if (product::encode_bf16_block_map(&map, data, ranges, blocks, rows, range_stride))
    return kCudaOk;
  return {kCudaUnsupportedDevice, "the driver refused a tensor map of " + std::to_string(blocks) +
                                      " blocks of " + std::to_string(rows) + " rows"};
}

// A blocked A whose row 0 of this call is its row `first_row`.
Status map_blocked(ProductOperands& operands, const BlockedMatrix& a, int64_t first_row) {
  operands.blocks = a;
  operands.first_row = static_cast<int>(first_row);
  const int last_blocks = a.n_blocks + a.missing_blocks - (a.n_ranges - 1) * a.range_blocks;
  ULLAGE_RETURN_IF_REFUSED(map_blocks(operands.a_last, a.last, 1, last_blocks, a.rows, 0));
  if (a.n_ranges == 1) return kCudaOk;
  return map_blocks(operands.a, a.first, a.n_ranges - 1, a.range_blocks, a.rows, a.range_stride);
}

template <class Tile, Major kB>
Status map_b(ProductOperands& operands, const Operand& b) {
  constexpr int kShare = kB == Major::kK ? Tile::kN / Tile::kClusterM : 64 / Tile::kClusterM;
  return map_operand(operands.b, b, 64, kShare);
}

template <class Tile, Form kFormA, Major kA, Major kB, class Epilogue, bool kListed = false>
Status start_product(const char* what, const ProductOperands& operands, const ProductGrid& grid,
                     const typename Epilogue::Params& params, cudaStream_t stream,
                     const BlockLists& lists = {}) {
  const auto kernel = sm90::product_kernel<Tile, kFormA, kA, kB, Epilogue, kListed>;
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
                              cudaLaunchKernelEx(&config, kernel, operands, grid, lists, params));
  return kCudaOk;
}

// A part of the [n_tok][vocab] logits: rows [first, first + rows), columns [first_column,
// first_column + columns); its exponentials are the rows of `e` from e_row on.
struct Part {
  int64_t first, rows, first_column, columns;
  BlockedMatrix e;
  int64_t e_row;
};

const void* bf16_rows(const void* base, int64_t row, int64_t stride) {
  return static_cast<const __nv_bfloat16*>(base) + row * stride;
}

// The part's exponentials, where `store`, and its tiles' sums, `n_tiles` to a row.
Status start_logits(const HeadParams& p, const LinearParams& r, const Part& part, int n_tiles,
                    bool store, cudaStream_t stream) {
  using Epilogue = sm90::ScaledExponentials<LogitsTile>;
  Epilogue::Params params;
  params.e = part.e;
  params.store_e = store;
  params.e_row = static_cast<int>(part.e_row);
  params.columns = r.columns + part.first;
  params.partial = reinterpret_cast<float2*>(r.partial);
  params.label_logit = r.label_logit;
  params.rows = static_cast<int>(part.rows);
  params.vocab = static_cast<int>(part.columns);
  params.n_tiles = n_tiles;
  params.first_column = static_cast<int>(part.first_column);
  params.scale = p.scale;
  ProductOperands operands = {};
  ULLAGE_RETURN_IF_REFUSED(map_operand(
      operands.a,
      {bf16_rows(r.hidden, part.first, r.hidden_stride), part.rows, r.d_model, r.hidden_stride}, 64,
      64));
  ULLAGE_RETURN_IF_REFUSED((map_b<LogitsTile, Major::kK>(
      operands, {bf16_rows(r.weight, part.first_column, r.weight_stride), part.columns, r.d_model,
                 r.weight_stride})));
  // All rows against a tile of the weight before the next: the weight is read once.
  const ProductGrid grid = grid_of<LogitsTile>(part.rows, part.columns, r.d_model, 1, part.rows);
  return start_product<LogitsTile, Form::kRows, Major::kK, Major::kK, Epilogue>(
      "linear_head logits", operands, grid, params, stream);
}

// slices (+)= E weight over the part's columns, cut into `n_slices`.
Status start_hidden_product(const LinearParams& r, const Part& part, int n_slices, bool keeps_old,
                            cudaStream_t stream) {
  using Epilogue = sm90::ChainF32<GradientTile>;
  Epilogue::Params params{{},
                          r.slices,
                          r.d_model,
                          part.rows * r.d_model,
                          static_cast<int>(part.rows),
                          static_cast<int>(r.d_model),
                          keeps_old};
  ULLAGE_RETURN_IF_REFUSED(
      map_sums(params.c_map, r.slices, n_slices, part.rows, r.d_model, r.d_model));
  ProductOperands operands = {};
  ULLAGE_RETURN_IF_REFUSED(map_blocked(operands, part.e, part.e_row));
  ULLAGE_RETURN_IF_REFUSED((map_b<GradientTile, Major::kMN>(
      operands, {bf16_rows(r.weight, part.first_column, r.weight_stride), part.columns, r.d_model,
                 r.weight_stride})));
  const ProductGrid grid =
      grid_of<GradientTile>(part.rows, r.d_model, part.columns, n_slices, part.rows);
  if (r.filter.threshold > 0) {
    const BlockLists lists{r.filter.tile_counts + part.first / kChunkRows, r.filter.tile_entries,
                           r.layout.n_tiles, LogitsTile::kN / product::kBlockColumns};
    return start_product<GradientTile, Form::kBlocks, Major::kK, Major::kMN, Epilogue, true>(
        "linear_head filtered d_hidden", operands, grid, params, stream, lists);
  }
  return start_product<GradientTile, Form::kBlocks, Major::kK, Major::kMN, Epilogue>(
      "linear_head d_hidden", operands, grid, params, stream);
}

Status start_hidden_gradient(const LinearParams& r, const Part& part, cudaStream_t stream) {
  linear_hidden_gradient<<<static_cast<unsigned>(part.rows), 256, 0, stream>>>(r, part.first,
                                                                               part.rows);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head d_hidden rows", cudaGetLastError());
  return kCudaOk;
}

// A product of E^T scaled_hidden over all of E's rows, for the `columns` columns that E's last
// range holds, the vocabulary's from first_column on.
template <class Epilogue>
Status start_weight_product(const LinearParams& r, const BlockedMatrix& e, int64_t first_column,
                            int64_t columns, const typename Epilogue::Params& params,
                            cudaStream_t stream) {
  ProductOperands operands = {};
  ULLAGE_RETURN_IF_REFUSED(map_blocked(operands, e, 0));
  ULLAGE_RETURN_IF_REFUSED(
      (map_b<GradientTile, Major::kMN>(operands, {r.scaled_hidden, e.rows, r.d_model, r.d_model})));
  const ProductGrid grid = grid_of<GradientTile>(columns, r.d_model, e.rows, 1, kWeightGroup);
  if (r.filter.threshold > 0) {
    const int groups = static_cast<int>(divide_up(e.rows, kChunkRows));
    linear_list_groups<<<static_cast<unsigned>(grid.m_tiles), 32, 0, stream>>>(r, first_column,
                                                                               groups);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head lists of rows", cudaGetLastError());
    const BlockLists lists{r.filter.group_counts, r.filter.group_entries, groups,
                           static_cast<int>(kChunkRows) / GradientTile::kK};
    return start_product<GradientTile, Form::kBlocks, Major::kMN, Major::kMN, Epilogue, true>(
        "linear_head filtered d_weight", operands, grid, params, stream, lists);
  }
  return start_product<GradientTile, Form::kBlocks, Major::kMN, Major::kMN, Epilogue>(
      "linear_head d_weight", operands, grid, params, stream);
}

// Into the float32 sum, which starts at E's first column, or rounded into d_weight.
Status start_weight_range(const LinearParams& r, const BlockedMatrix& e, int64_t first_column,
                          int64_t columns, bool keeps_old, cudaStream_t stream) {
  if (r.label_sums != nullptr) {
    using Epilogue = sm90::RoundOnce<GradientTile>;
    Epilogue::Params params{{},
                            r.label_slots + first_column,
                            r.label_sums,
                            static_cast<int>(columns),
                            static_cast<int>(r.d_model)};
    void* const out =
        static_cast<__nv_bfloat16*>(r.d_weight_rounded) + first_column * r.d_weight_rounded_stride;
    if (!product::encode_bf16_store_map(&params.c_map, out, columns, r.d_model,
                                        r.d_weight_rounded_stride)) {
      return map_refused(columns, r.d_model);
    }
    return start_weight_product<Epilogue>(r, e, first_column, columns, params, stream);
  }
  using Epilogue = sm90::ChainF32<GradientTile>;
  float* const sum = r.d_weight_sum + first_column * r.d_weight_sum_stride;
  Epilogue::Params params{{},
                          sum,
                          r.d_weight_sum_stride,
                          0,
                          static_cast<int>(columns),
                          static_cast<int>(r.d_model),
                          keeps_old};
  ULLAGE_RETURN_IF_REFUSED(
      map_sums(params.c_map, sum, 1, columns, r.d_model, r.d_weight_sum_stride));
  return start_weight_product<Epilogue>(r, e, first_column, columns, params, stream);
}

// d_weight (+)= E^T scaled_hidden; a float32 sum starts at E's first column. Range by range,
// ascending: each may overwrite the exponentials of the one before it.
Status start_weight_gradient(const LinearParams& r, const BlockedMatrix& e, int64_t columns,
                             bool keeps_old, cudaStream_t stream) {
  int first_block = 0;
  for (int range = 0; range < e.n_ranges; ++range) {
    const int end_block = std::min((range + 1) * e.range_blocks - e.missing_blocks, e.n_blocks);
    BlockedMatrix only;
    only.rows = e.rows;
    only.n_blocks = only.range_blocks = end_block - first_block;
    only.last = e.block(first_block);
    const int64_t first_column = int64_t{first_block} * product::kBlockColumns;
    const int64_t end_column = std::min(int64_t{end_block} * product::kBlockColumns, columns);
    ULLAGE_RETURN_IF_REFUSED(
        start_weight_range(r, only, first_column, end_column - first_column, keeps_old, stream));
    first_block = end_block;
  }
  return kCudaOk;
}

// The labels' columns of d_weight, then the rounding where the caller's type is bf16.
Status finish_weight_gradient(const LinearParams& r, int64_t first_column, int64_t columns,
                              cudaStream_t stream) {
  if (r.n_tok > 0) {
    linear_label_gradient<<<static_cast<unsigned>(r.n_tok), 256, 0, stream>>>(r, first_column,
                                                                              columns);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head label rows of d_weight", cudaGetLastError());
  }
  if (r.d_weight_rounded != nullptr && r.label_sums == nullptr) {
    linear_round_weight<<<static_cast<unsigned>(columns), 256, 0, stream>>>(r, first_column);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head rounding of d_weight", cudaGetLastError());
  }
  return kCudaOk;
}

Status start_rows(const HeadParams& p, const LinearParams& r, const Part& part, bool gradients,
                  cudaStream_t stream) {
  linear_rows<<<static_cast<unsigned>(part.rows), 128, 0, stream>>>(p, r, part.e, part.e_row,
                                                                    part.first, gradients);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head rows", cudaGetLastError());
  return kCudaOk;
}

// Marks what the gradients of a part leave out, and lists what d_hidden takes.
Status start_filter(const LinearParams& r, const Part& part, cudaStream_t stream) {
  const auto groups = static_cast<unsigned>(divide_up(part.rows, kChunkRows));
  linear_mark_tiles<<<dim3(static_cast<unsigned>(divide_up(r.layout.n_tiles, 128)), groups), 128, 0,
                      stream>>>(r, part.first, part.rows, part.e_row);
  linear_skipped_mass<<<static_cast<unsigned>(divide_up(part.rows, 8)), 256, 0, stream>>>(
      r, part.first, part.rows, part.e_row);
  linear_list_tiles<<<groups, 32, 0, stream>>>(r, part.first, part.e_row);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head filter", cudaGetLastError());
  return kCudaOk;
}

// One range in the workspace, for `rows` rows of `columns` columns.
BlockedMatrix kept_apart(const LinearParams& r, int64_t rows, int64_t columns) {
  BlockedMatrix e;
  e.last = r.exponentials;
  e.rows = rows;
  e.n_blocks = e.range_blocks = static_cast<int>(divide_up(columns, product::kBlockColumns));
  return e;
}

// All ranges but the last in d_weight's memory, each where the next range of d_weight will be.
BlockedMatrix lodged_in_weight(const LinearParams& r) {
  BlockedMatrix e = kept_apart(r, r.layout.lodged.rows, r.vocab);
  e.n_ranges = r.layout.n_ranges;
  e.range_blocks = static_cast<int>(r.layout.range_columns / product::kBlockColumns);
  const int64_t columns = r.layout.range_columns * e.n_ranges;
  // Whole cluster tiles of d_weight and of the logits lie in one range.
  const int64_t end = divide_up(r.vocab, kStripColumns) * kStripColumns;
  e.missing_blocks = static_cast<int>((columns - end) / product::kBlockColumns);
  const int64_t second_range = (r.layout.range_columns - (columns - end)) * r.d_model;
  const bool rounds = r.label_sums != nullptr;
  e.first = rounds
                ? static_cast<void*>(static_cast<__nv_bfloat16*>(r.d_weight_rounded) + second_range)
                : r.d_weight_sum + second_range;
  e.range_stride = r.layout.range_columns * r.d_model * (rounds ? 1 : 2);
  return e;
}

// Calls step(first row, group) for every group of rows.
template <class Step>
Status for_each_group(const LinearParams& r, const Step& step) {
  for (int64_t first = 0; first < r.n_tok;) {
    const RowGroup group = r.layout.group_at(first, r.n_tok);
    ULLAGE_RETURN_IF_REFUSED(step(first, group));
    first += group.rows;
  }
  return kCudaOk;
}

// Calls step(part) for every part of a group that starts at row `first`.
template <class Step>
Status for_each_part(const LinearParams& r, int64_t first, const RowGroup& group,
                     const BlockedMatrix& e, const Step& step) {
  for (int64_t row = 0; row < group.rows; row += group.part) {
    const int64_t rows = std::min(group.part, group.rows - row);
    ULLAGE_RETURN_IF_REFUSED(step(Part{first + row, rows, 0, r.vocab, e, row}));
  }
  return kCudaOk;
}

// Groups of rows over the whole vocabulary.
Status launch_groups(HeadParams p, const LinearParams& r, cudaStream_t stream) {
  const bool gradients = r.d_hidden != nullptr || r.wants_d_weight();
  const bool sequences = p.n_sequence_terms > 0 && r.n_tok > 0;
  const bool one_part = r.layout.longest_part() >= r.n_tok;
  const int n_tiles = r.layout.n_tiles;
  const auto exponentials_of = [&](int64_t first, const RowGroup& group) {
    return first == 0 && r.layout.lodged.rows > 0 ? lodged_in_weight(r)
                                                  : kept_apart(r, group.rows, r.vocab);
  };
  if (sequences) {
    // A sequence's slope needs the log-probabilities of all its rows.
    ULLAGE_RETURN_IF_REFUSED(for_each_group(r, [&](int64_t first, const RowGroup& group) {
      return for_each_part(r, first, group, exponentials_of(first, group),
                           [&](const Part& part) -> Status {
                             ULLAGE_RETURN_IF_REFUSED(
                                 start_logits(p, r, part, n_tiles, gradients && one_part, stream));
                             return start_rows(p, r, part, false, stream);
                           });
    }));
    ULLAGE_RETURN_IF_REFUSED(launch_sequences(p, stream));
    p.slopes_ready = true;
  }
  const bool keeps_old = r.accumulate && r.d_weight_rounded == nullptr;
  if (gradients || !sequences) {
    ULLAGE_RETURN_IF_REFUSED(for_each_group(r, [&](int64_t first, const RowGroup& group) -> Status {
      const BlockedMatrix e = exponentials_of(first, group);
      ULLAGE_RETURN_IF_REFUSED(for_each_part(r, first, group, e, [&](const Part& part) -> Status {
        if (!(sequences && one_part))
          ULLAGE_RETURN_IF_REFUSED(start_logits(p, r, part, n_tiles, gradients, stream));
        ULLAGE_RETURN_IF_REFUSED(start_rows(p, r, part, gradients, stream));
        if (gradients && r.filter.threshold > 0)
          ULLAGE_RETURN_IF_REFUSED(start_filter(r, part, stream));
        if (r.d_hidden == nullptr) return kCudaOk;
        ULLAGE_RETURN_IF_REFUSED(
            start_hidden_product(r, part, r.layout.vocab_slices, false, stream));
        return start_hidden_gradient(r, part, stream);
      }));
      if (!r.wants_d_weight()) return kCudaOk;
      return start_weight_gradient(r, e, r.vocab, keeps_old || first > 0, stream);
    }));
  }
  if (!r.wants_d_weight()) return kCudaOk;
  if (r.n_tok == 0 && !keeps_old) {
    ULLAGE_RETURN_IF_CUDA_FAILS(
        "linear_head d_weight of no rows",
        cudaMemset2DAsync(r.d_weight_sum, static_cast<size_t>(r.d_weight_sum_stride) * 4, 0,
                          static_cast<size_t>(r.d_model) * 4, static_cast<size_t>(r.vocab),
                          stream));
  }
  return finish_weight_gradient(r, 0, r.vocab, stream);
}

// The rows' statistics first; then, strip by strip of the vocabulary, the logits of all rows again
// and both gradients. A row of d_weight is complete within its strip and is rounded there.
Status launch_strips(const HeadParams& p, const LinearParams& r, cudaStream_t stream) {
  ULLAGE_RETURN_IF_REFUSED(
      for_each_part(r, 0, {r.n_tok, r.layout.chunk.part}, {}, [&](const Part& part) -> Status {
        ULLAGE_RETURN_IF_REFUSED(start_logits(p, r, part, r.layout.n_tiles, false, stream));
        return start_rows(p, r, part, true, stream);
      }));
  for (int64_t column = 0; column < r.vocab; column += r.layout.strip) {
    const int64_t columns = std::min(r.layout.strip, r.vocab - column);
    const Part part{0, r.n_tok, column, columns, kept_apart(r, r.n_tok, columns), 0};
    ULLAGE_RETURN_IF_REFUSED(start_logits(p, r, part, r.layout.strip_tiles, true, stream));
    linear_settle_strip<<<static_cast<unsigned>(divide_up(r.n_tok, 8)), 256, 0, stream>>>(r, part.e,
                                                                                          columns);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head strip shifts", cudaGetLastError());
    if (r.d_hidden != nullptr) {
      ULLAGE_RETURN_IF_REFUSED(start_hidden_product(r, part, 1, column > 0, stream));
    }
    ULLAGE_RETURN_IF_REFUSED(start_weight_gradient(r, part.e, columns, false, stream));
    ULLAGE_RETURN_IF_REFUSED(finish_weight_gradient(r, column, columns, stream));
  }
  return r.d_hidden == nullptr ? Status(kCudaOk)
                               : start_hidden_gradient(r, {0, r.n_tok, 0, r.vocab, {}, 0}, stream);
}

}  // namespace

Status launch_linear_head(const HeadParams& p, const LinearParams& r, CUstream_st* stream) {
  ULLAGE_RETURN_IF_REFUSED(launch_census(p, stream));
  if (r.label_slots != nullptr) {
    ULLAGE_RETURN_IF_CUDA_FAILS(
        "linear_head label slots",
        cudaMemsetAsync(r.label_slots, 0xff, static_cast<size_t>(r.vocab) * sizeof(int), stream));
  }
  if (r.n_tok > 0) {
    linear_columns<<<static_cast<unsigned>(divide_up(r.n_tok, kColumnWarps)), 32 * kColumnWarps, 0,
                     stream>>>(p, r);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head columns", cudaGetLastError());
  }
  ULLAGE_RETURN_IF_REFUSED(r.layout.strip == 0 ? launch_groups(p, r, stream)
                                               : launch_strips(p, r, stream));
  return launch_scalars(p, stream);
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
