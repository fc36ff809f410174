// The kernels that depend on T, the 16-bit type of hidden and weight, each put on a stream.
#pragma once

#include "cuda/linear_head/filter.h"
#include "cuda/linear_head/part.h"
#include "cuda/linear_head/row_kernels.cuh"
#include "cuda/product/start_product.cuh"

namespace ullage::lossk::cuda {

namespace sm90 = ullage::cuda::sm90;
using product::BlockLists;
using product::Form;
using product::Major;
using product::MatrixOperand;
using product::ProductGrid;
using product::ProductOperands;

template <class T>
MatrixOperand rows_of(const void* base, int64_t first, int64_t rows, int64_t cols, int64_t stride) {
  return {static_cast<const T*>(base) + first * stride, rows, cols, stride};
}

// The part's exponentials, where `store`, and its tiles' sums, `n_tiles` to a row.
template <class T>
Status start_logits(const HeadParams& p, const LinearParams& r, const Part& part, int n_tiles,
                    bool store, cudaStream_t stream) {
  using Epilogue = sm90::ScaledExponentials<LogitsTile, T>;
  typename Epilogue::Params params;
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
  ULLAGE_RETURN_IF_REFUSED(product::map_rows(
      operands, rows_of<T>(r.hidden, part.first, part.rows, r.d_model, r.hidden_stride)));
  ULLAGE_RETURN_IF_REFUSED((product::map_b<LogitsTile, Major::kK>(
      operands,
      rows_of<T>(r.weight, part.first_column, part.columns, r.d_model, r.weight_stride))));
  // All rows against a tile of the weight before the next: the weight is read once.
  const ProductGrid grid =
      product::grid_of<LogitsTile>(part.rows, part.columns, r.d_model, 1, part.rows);
  return product::start_product<LogitsTile, Form::kRows, Major::kK, Major::kK, Epilogue>(
      "linear_head logits", operands, grid, params, stream);
}

// The losses of a part's rows from its tiles' sums. `stored`: its exponentials are there, to be
// brought to one shift a row.
template <class T>
Status start_rows(const HeadParams& p, const LinearParams& r, const Part& part, bool stored,
                  bool gradients, cudaStream_t stream) {
  linear_rows<T><<<static_cast<unsigned>(part.rows), 128, 0, stream>>>(
      p, r, part.e, part.e_row, part.group_row, part.first, stored, gradients);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head rows", cudaGetLastError());
  return kCudaOk;
}

// slices = E weight over the whole vocabulary, in r.layout.vocab_slices.
template <class T>
Status start_hidden_product(const LinearParams& r, const Part& part, cudaStream_t stream) {
  using Epilogue = sm90::ChainF32<GradientTile, T>;
  const int n_slices = r.layout.vocab_slices;
  typename Epilogue::Params params{{},
                                   r.slices,
                                   r.d_model,
                                   part.rows * r.d_model,
                                   static_cast<int>(part.rows),
                                   static_cast<int>(r.d_model),
                                   false,
                                   1};
  ULLAGE_RETURN_IF_REFUSED(
      product::map_sums(params.c_map, r.slices, n_slices, part.rows, r.d_model, r.d_model));
  ProductOperands operands = {};
  ULLAGE_RETURN_IF_REFUSED(product::map_blocked(operands, part.e, part.e_row));
  ULLAGE_RETURN_IF_REFUSED((product::map_b<GradientTile, Major::kMN>(
      operands, rows_of<T>(r.weight, 0, r.vocab, r.d_model, r.weight_stride))));
  const ProductGrid grid =
      product::grid_of<GradientTile>(part.rows, r.d_model, r.vocab, n_slices, part.rows);
  if (r.filter.threshold > 0) {
    const BlockLists lists{r.filter.tile_counts + part.first / kChunkRows, r.filter.tile_entries,
                           r.layout.n_tiles, LogitsTile::kN / product::kBlockColumns};
    return product::start_product<GradientTile, Form::kBlocks, Major::kK, Major::kMN, Epilogue,
                                  true>("linear_head filtered d_hidden", operands, grid, params,
                                        stream, lists);
  }
  return product::start_product<GradientTile, Form::kBlocks, Major::kK, Major::kMN, Epilogue>(
      "linear_head d_hidden", operands, grid, params, stream);
}

template <class T>
Status start_hidden_gradient(const LinearParams& r, const Part& part, cudaStream_t stream) {
  linear_hidden_gradient<T>
      <<<static_cast<unsigned>(part.rows), 256, 0, stream>>>(r, part.first, part.rows);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head d_hidden rows", cudaGetLastError());
  return kCudaOk;
}

template <class T>
Status start_scaled_rows(const LinearParams& r, int64_t first, int64_t rows, cudaStream_t stream) {
  linear_scale_rows<T><<<static_cast<unsigned>(rows), 128, 0, stream>>>(r, first);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head scaled rows", cudaGetLastError());
  return kCudaOk;
}

template <class T>
Status start_settled_strip(const LinearParams& r, const Part& part, cudaStream_t stream) {
  linear_settle_strip<T><<<static_cast<unsigned>(divide_up(part.rows, 8)), 256, 0, stream>>>(
      r, part.e, part.first, part.columns);
  ULLAGE_RETURN_IF_CUDA_FAILS("linear_head strip shifts", cudaGetLastError());
  return kCudaOk;
}

template <class T, class Tile, class Epilogue>
Status start_weight_product(const LinearParams& r, const WeightPart& part,
                            const typename Epilogue::Params& params, cudaStream_t stream) {
  ProductOperands operands = {};
  ULLAGE_RETURN_IF_REFUSED(product::map_blocked(operands, part.e, part.e_row));
  if (part.more_from < part.rows)
    ULLAGE_RETURN_IF_REFUSED(product::map_more(operands, part.more, part.more_from));
  if (part.e.n_ranges > 1) operands.tiles_read = r.tiles_read;
  ULLAGE_RETURN_IF_REFUSED((product::map_b<Tile, Major::kMN>(
      operands, rows_of<T>(r.scaled_hidden, part.scaled_row, part.rows, r.d_model, r.d_model))));
  const ProductGrid grid =
      product::grid_of<Tile>(part.columns, r.d_model, part.rows, 1, kWeightGroup);
  if (r.filter.threshold > 0) {
    const int groups = static_cast<int>(divide_up(part.rows, kChunkRows));
    ULLAGE_RETURN_IF_REFUSED(start_group_lists(r, grid.m_tiles, groups, stream));
    const BlockLists lists{r.filter.group_counts, r.filter.group_entries, groups,
                           static_cast<int>(kChunkRows) / Tile::kK};
    return product::start_product<Tile, Form::kBlocks, Major::kMN, Major::kMN, Epilogue, true>(
        "linear_head filtered d_weight", operands, grid, params, stream, lists);
  }
  return product::start_product<Tile, Form::kBlocks, Major::kMN, Major::kMN, Epilogue>(
      "linear_head d_weight", operands, grid, params, stream);
}

// Into the float32 sum.
template <class T, class Tile>
Status start_weight_sum(const LinearParams& r, const WeightPart& part, cudaStream_t stream) {
  using Epilogue = sm90::ChainF32<Tile, T>;
  typename Epilogue::Params params{{},
                                   part.sum,
                                   r.d_weight_sum_stride,
                                   0,
                                   static_cast<int>(part.columns),
                                   static_cast<int>(r.d_model),
                                   part.keeps_old,
                                   r.unit};
  ULLAGE_RETURN_IF_REFUSED(
      product::map_sums(params.c_map, part.sum, 1, part.columns, r.d_model, r.d_weight_sum_stride));
  return start_weight_product<T, Tile, Epilogue>(r, part, params, stream);
}

// Into the float32 sum, or rounded into d_weight where rows of labels wait apart.
template <class T>
Status start_weight_part(const LinearParams& r, const WeightPart& part, cudaStream_t stream) {
  if (r.label_sums == nullptr) {
    return part.keeps_old ? start_weight_sum<T, ContinuedTile>(r, part, stream)
                          : start_weight_sum<T, GradientTile>(r, part, stream);
  }
  using Epilogue = sm90::RoundOnce<GradientTile, T>;
  typename Epilogue::Params params{{},
                                   r.label_slots + part.first_column,
                                   r.label_sums,
                                   static_cast<int>(part.columns),
                                   static_cast<int>(r.d_model),
                                   r.unit};
  void* const out =
      static_cast<T*>(r.d_weight_rounded) + part.first_column * r.d_weight_rounded_stride;
  if (!product::encode_store_map(&params.c_map, out, part.columns, r.d_model,
                                 r.d_weight_rounded_stride)) {
    return product::map_refused(part.columns, r.d_model);
  }
  return start_weight_product<T, GradientTile, Epilogue>(r, part, params, stream);
}

// The labels' part of d_weight's columns [first_column, first_column + columns), then the rounding
// where the caller's type is T.
template <class T>
Status finish_weight_gradient(const LinearParams& r, int64_t first_column, int64_t columns,
                              cudaStream_t stream) {
  if (r.n_tok > 0) {
    linear_label_gradient<T>
        <<<static_cast<unsigned>(r.n_tok), 256, 0, stream>>>(r, first_column, columns);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head label rows of d_weight", cudaGetLastError());
  }
  if (r.d_weight_rounded != nullptr && r.label_sums == nullptr) {
    linear_round_weight<T><<<static_cast<unsigned>(columns), 256, 0, stream>>>(r, first_column);
    ULLAGE_RETURN_IF_CUDA_FAILS("linear_head rounding of d_weight", cudaGetLastError());
  }
  return kCudaOk;
}

}  // namespace ullage::lossk::cuda
