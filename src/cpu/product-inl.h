// The product kernels, once per Highway target. After GotoBLAS (Goto and van de Geijn 2008,
// https://doi.org/10.1145/1356052.1356053) with the roles of the caches turned round: a panel of A
// (8 rows x 256 k, 8 KiB) stays in the first-level cache while panels of B (256 k x 3 vectors)
// stream from the second, 3 vectors for 24 multiply-adds.
#if defined(ULLAGE_CPU_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_PRODUCT_INL_H_
#undef ULLAGE_CPU_PRODUCT_INL_H_
#else
#define ULLAGE_CPU_PRODUCT_INL_H_
#endif

#include <array>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "cpu/columns-inl.h"
#include "cpu/lanes-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/product.h"
#include "cpu/product_plan.h"
#include "cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// sum[g][r] += A(r, k) * column, A packed [k - k0][kRows].
template <class D, int64_t kRows, int64_t kGroups>
struct MultiplyColumns {
  const hn::TFromD<D>* a;
  int64_t k0;
  hn::Vec<D> sum[kGroups][kRows];

  HWY_INLINE void operator()(int64_t g, int64_t k, hn::Vec<D> column) {
    const D d;
    HWY_UNROLL(8)
    for (int64_t r = 0; r < kRows; ++r) {
      sum[g][r] = fma(d, hn::Set(d, a[(k - k0) * kRows + r]), column, sum[g][r]);
    }
  }
};

template <class T>
struct Product {
  using D = hn::ScalableTag<T>;
  using RowTag = hn::CappedTag<T, kTileRows>;  // packs A: vectors no wider than a tile
  static constexpr int64_t kLanes = kLanesOf<D>;
  static constexpr int64_t kTileColumns = kTileVecs * kLanes;
  static constexpr ElementType kElement =
      std::is_same_v<T, double> ? ElementType::kF64 : ElementType::kF32;

  ProductShape shape;
  LaneOperand a, b;
  T* c;
  int64_t c_stride;
  bool accumulate;
  SumOrder order;
  ProductPlan plan;
  T* stationary;
  std::byte* streams;  // kStreamBytes for each worker

  // The stationary piece in hand.
  int64_t lane0 = 0, n_lanes = 0, k0 = 0, n_k = 0;
  int64_t stream_lanes = 0;

  bool has_few_rows() const { return plan.a_is_stationary && shape.m <= kTileRows; }
  int64_t a_step() const { return has_few_rows() ? shape.m : kTileRows; }
  T* stream_of(int worker) const { return reinterpret_cast<T*>(streams + worker * kStreamBytes); }
  int64_t depth_at(int64_t k) const { return std::min(kProductKBlock, k0 + n_k - k); }

  // Where the block of k that starts at k0 + offset is packed.
  T* stationary_at(int64_t k) const { return stationary + plan.stationary_lanes * (k - k0); }

  Meet meet_at(int64_t k) const {
    if (k == 0 && !accumulate) return Meet::kStore;
    return order == SumOrder::kBlocks ? Meet::kAdd : Meet::kContinue;
  }

  // One block of k of the stationary operand: lanes [from, from + count) of the piece.
  void pack_stationary(int64_t from, int64_t count, int64_t k) const {
    T* const to = stationary_at(k);
    const int64_t depth = depth_at(k);
    if (has_few_rows()) {
      pack_few_rows(a, shape.m, k, depth, to);
    } else if (plan.a_is_stationary) {
      pack_panels(RowTag(), a, lane0 + from, count, k, depth, kTileRows, kTileRows,
                  to + from * depth);
    } else {
      pack_panels(D(), b, lane0 + from, count, k, depth, kTileColumns, kLanes, to + from * depth);
    }
  }

  // C [rows][columns] at `at` meets the product of packed panels; `next` is what will be packed
  // then.
  void multiply_panels(const T* a_panels, int64_t rows, const T* b_panels, int64_t columns,
                       int64_t depth, T* at, Meet meet, const BlockLines& next = {}) const {
    int64_t tile = 0;
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t tile_rows = std::min(kTileRows, rows - row);
      for (int64_t column = 0; column < columns; column += kTileColumns) {
        const int64_t width = std::min(kTileColumns, columns - column);
        multiply_one(a_panels + row * depth, tile_rows, b_panels + column * depth,
                     std::min(kTileColumns, round_up(width, kLanes)), width, depth,
                     at + row * c_stride + column, meet, next.of_tile(tile++));
      }
    }
  }

  // One tile, `width` columns wide; at C's right edge the last vector is partial.
  void multiply_one(const T* a_panel, int64_t rows, const T* b_panel, int64_t b_step, int64_t width,
                    int64_t depth, T* at, Meet meet, Ahead ahead = {}) const {
    const int64_t vecs = (width + kLanes - 1) / kLanes;
    const TileFunction<T> tile = kTiles<D>[(rows - 1) * kTileVecs + vecs - 1];
    if (width % kLanes == 0) {
      tile(a_panel, a_step(), b_panel, b_step, depth, at, c_stride, meet, ahead);
      return;
    }
    HWY_ALIGN T edge[kTileRows * kTileColumns] = {};
    if (meet != Meet::kStore) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(at + r * c_stride, width, edge + r * kTileColumns);
      }
    }
    tile(a_panel, a_step(), b_panel, b_step, depth, edge, kTileColumns, meet, ahead);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(edge + r * kTileColumns, width, at + r * c_stride);
    }
  }

  // A stationary: columns [from, from + count) of C.
  void stream_columns(int64_t from, int64_t count, int worker) const {
    if (has_few_rows() && b.lies_along_k()) {
      multiply_rows_of_b(from, count);
      return;
    }
    // With few rows, whole vectors of B are as good where they lie as packed.
    const bool in_place = has_few_rows() && b.lane_stride == 1 && b.type == kElement;
    const int64_t n_in_place = in_place ? count / kLanes * kLanes : 0;
    T* const panels = stream_of(worker);
    for (int64_t k = k0; k < k0 + n_k; k += kProductKBlock) {
      const int64_t depth = depth_at(k);
      T* const at = c + lane0 * c_stride + from;
      for (int64_t column = 0; column < n_in_place; column += kTileColumns) {
        multiply_one(stationary_at(k), shape.m,
                     static_cast<const T*>(b.data) + k * b.k_stride + from + column, b.k_stride,
                     std::min(kTileColumns, n_in_place - column), depth, at + column, meet_at(k));
      }
      if (n_in_place == count) continue;
      pack_panels(D(), b, from + n_in_place, count - n_in_place, k, depth, kTileColumns, kLanes,
                  panels);
      const int64_t next_k = k + kProductKBlock;
      multiply_panels(stationary_at(k), n_lanes, panels, count - n_in_place, depth, at + n_in_place,
                      meet_at(k),
                      next_k < shape.k ? BlockLines(b, from, count, next_k) : BlockLines());
    }
  }

  // B stationary: rows [from, from + count) of C. Columns go by in pieces that the second-level
  // cache holds beside the packed rows.
  void stream_rows(int64_t from, int64_t count, int worker) const {
    T* const panels = stream_of(worker);
    for (int64_t k = k0; k < k0 + n_k; k += kProductKBlock) {
      const int64_t depth = depth_at(k);
      pack_panels(RowTag(), a, from, count, k, depth, kTileRows, kTileRows, panels);
      const int64_t piece = plan.stream_lanes_max / kTileColumns * kTileColumns;
      for (int64_t column = 0; column < n_lanes; column += piece) {
        multiply_panels(panels, count, stationary_at(k) + column * depth,
                        std::min(piece, n_lanes - column), depth,
                        c + from * c_stride + lane0 + column, meet_at(k));
      }
    }
  }

  // A few rows of A times rows of B that lie along k: B is read once, where it lies, and never
  // stored.
  void multiply_rows_of_b(int64_t from, int64_t count) const {
    using Function = void (Product::*)(int64_t, int64_t) const;
    constexpr auto kFunctions = []<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return std::array<Function, kTileRows>{&Product::multiply_rows_of_b<kIndex + 1>...};
    }(std::make_index_sequence<kTileRows>());
    (this->*kFunctions[shape.m - 1])(from, count);
  }

  template <int64_t kRows>
  void multiply_rows_of_b(int64_t from, int64_t count) const {
    const D d;
    using V = hn::Vec<D>;
    visit_elements<T>(b, [&](const auto* base) HWY_ATTR {
      // Two groups where few sums are in flight and a tile leaves the registers for it: beside a
      // square transpose they do not fit (four f32 rows fell from 24 to 14 GB/s on Zen 4). Rows of
      // B are read to their end: blocks of k outermost read memory at 16.6 instead of 20.2 GB/s
      // there.
      using Element = std::remove_cv_t<std::remove_pointer_t<decltype(base)>>;
      constexpr int64_t kGroups = kRows <= 4 && kIsBlock<Element> ? 2 : 1;
      for (int64_t column = from; column < from + count; column += kGroups * kLanes) {
        for (int64_t k = k0; k < k0 + n_k; k += kProductKBlock) {
          const Meet meet = meet_at(k);
          const int64_t valid = std::min(kGroups * kLanes, from + count - column);
          // visit(vector of sums, where it lies in C, how many lanes lie in C)
          MultiplyColumns<D, kRows, kGroups> multiply;
          const auto each_sum = [&](auto visit) HWY_ATTR {
            HWY_UNROLL(2)
            for (int64_t g = 0; g < kGroups; ++g) {
              HWY_UNROLL(8)
              for (int64_t r = 0; r < kRows; ++r) {
                visit(multiply.sum[g][r], c + r * c_stride + column + g * kLanes,
                      std::clamp<int64_t>(valid - g * kLanes, 0, kLanes));
              }
            }
          };
          const auto load = [d](const T* at, int64_t lanes) HWY_ATTR {
            return lanes == kLanes ? hn::LoadU(d, at) : load_lanes(d, at, lanes, T(0));
          };
          multiply.a = stationary_at(k);
          multiply.k0 = k;
          each_sum([&](V& sum, const T* at, int64_t lanes)
                       HWY_ATTR { sum = meet == Meet::kContinue ? load(at, lanes) : hn::Zero(d); });
          read_columns<kGroups>(d, row_at(base, column, b.lane_stride), b.lane_stride, valid, k,
                                depth_at(k), multiply);
          each_sum([&](V& sum, T* at, int64_t lanes) HWY_ATTR {
            if (meet == Meet::kAdd) sum = hn::Add(load(at, lanes), sum);
            lanes == kLanes ? hn::StoreU(sum, d, at) : store_lanes(d, sum, at, lanes);
          });
        }
      }
    });
  }

  // Lanes of the streamed operand that one task takes: whole tiles, at least two tasks a thread,
  // and of those sizes the one after which the last thread is done first. A task is counted as a
  // quarter of a tile more than it is.
  int64_t task_lanes(int64_t lanes, int64_t n_threads) const {
    const int64_t tile = plan.a_is_stationary ? kTileColumns : kTileRows;
    const int64_t half = round_up((lanes + 2 * n_threads - 1) / (2 * n_threads), tile);
    int64_t best = std::min(half, plan.stream_lanes_max / tile * tile);
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t size = best; size >= tile; size -= tile) {
      const int64_t whole = lanes / size, rounds = whole / n_threads;
      const int64_t done =
          whole % n_threads == 0 ? rounds * size + lanes % size : (rounds + 1) * size;
      if (done + rounds * tile / 4 < least) {
        least = done + rounds * tile / 4;
        best = size;
      }
    }
    return best;
  }

  void run(WorkerPool& pool) {
    const int64_t stationary_total = plan.a_is_stationary ? shape.m : shape.n;
    const int64_t stream_total = plan.a_is_stationary ? shape.n : shape.m;
    stream_lanes = task_lanes(stream_total, pool.n_threads());
    // A multiple of either tile, so that a panel is packed by one task.
    constexpr int64_t kPackLanes = 2 * std::lcm(kTileColumns, kTileRows);
    for (lane0 = 0; lane0 < stationary_total; lane0 += plan.stationary_lanes) {
      n_lanes = std::min(plan.stationary_lanes, stationary_total - lane0);
      const int64_t pieces = (n_lanes + kPackLanes - 1) / kPackLanes;
      for (k0 = 0; k0 < shape.k; k0 += plan.stationary_k) {
        n_k = std::min(plan.stationary_k, shape.k - k0);
        const int64_t blocks = (n_k + kProductKBlock - 1) / kProductKBlock;
        pool.run(blocks * pieces, [&](int64_t task, int) {
          const int64_t from = task % pieces * kPackLanes;
          pack_stationary(from, std::min(kPackLanes, n_lanes - from),
                          k0 + task / pieces * kProductKBlock);
        });
        pool.run((stream_total + stream_lanes - 1) / stream_lanes, [&](int64_t task, int worker) {
          const int64_t from = task * stream_lanes;
          const int64_t count = std::min(stream_lanes, stream_total - from);
          plan.a_is_stationary ? stream_columns(from, count, worker)
                               : stream_rows(from, count, worker);
        });
      }
    }
  }
};

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
