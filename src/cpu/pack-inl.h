// Copies an operand of a product, widened, into the panels that tiles read in order. Included once
// per Highway target.
#if defined(ULLAGE_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_PACK_INL_H_
#undef ULLAGE_CPU_PACK_INL_H_
#else
#define ULLAGE_CPU_PACK_INL_H_
#endif

#include "cpu/columns-inl.h"
#include "cpu/lanes-inl.h"
#include "cpu/product.h"
#include "cpu/product_plan.h"
#include "cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// An operand seen from its lanes (rows of A, columns of B), which the product runs along k.
struct LaneOperand {
  const void* data;
  ElementType type;
  int64_t lane_stride;
  int64_t k_stride;

  bool lies_along_k() const { return k_stride == 1 && lane_stride != 1; }
};

// The cache lines of one block of k of some lanes, dealt out to the tiles that run before it is
// packed, so that packing finds it in the second-level cache.
class BlockLines {
 public:
  BlockLines() = default;
  BlockLines(const LaneOperand& operand, int64_t lane0, int64_t n_lanes, int64_t k) {
    const int64_t inner = operand.lies_along_k() ? kProductKBlock : n_lanes;
    const int64_t outer = operand.lies_along_k() ? n_lanes : kProductKBlock;
    const int64_t outer_stride = operand.lies_along_k() ? operand.lane_stride : operand.k_stride;
    base_ = static_cast<const char*>(operand.data) +
            bytes_of(operand.type, lane0 * operand.lane_stride + k * operand.k_stride);
    step_ = bytes_of(operand.type, outer_stride);
    across_ = (bytes_of(operand.type, inner) + 63) / 64;
    n_ = across_ * ((outer + kProductKBlock - 1) / kProductKBlock);
  }

  // The share of tile number `tile`: kProductKBlock lines, one below the other.
  Ahead of_tile(int64_t tile) const {
    if (tile >= n_) return {base_, 0};
    return {base_ + tile / across_ * kProductKBlock * step_ + tile % across_ * 64, step_};
  }

 private:
  const char* base_ = nullptr;
  int64_t step_ = 0, across_ = 0, n_ = 0;
};

// Calls visit(pointer to the operand's element type) for the types that accumulate in T.
template <class T, class Visit>
HWY_INLINE void visit_elements(const LaneOperand& operand, Visit visit) {
  if constexpr (std::is_same_v<T, double>) {
    visit(static_cast<const double*>(operand.data));
  } else {
    switch (operand.type) {
      case ElementType::kF64:
        return;
      case ElementType::kF32:
        return visit(static_cast<const float*>(operand.data));
      case ElementType::kBF16:
        return visit(static_cast<const BF16*>(operand.data));
      case ElementType::kF16:
        return visit(static_cast<const F16*>(operand.data));
      case ElementType::kQ8_0:
        return visit(static_cast<const Q8_0Block*>(operand.data));
      case ElementType::kQ4_0:
        return visit(static_cast<const Q4_0Block*>(operand.data));
      case ElementType::kQ4_1:
        return visit(static_cast<const Q4_1Block*>(operand.data));
    }
  }
}

template <class D>
struct StoreColumns {
  hn::TFromD<D>* to;
  int64_t step;

  HWY_INLINE void operator()(int64_t, int64_t, hn::Vec<D> column) {
    hn::Store(column, D(), to);
    to += step;
  }
};

// Lanes [lane0, lane0 + n_lanes) for k in [k0, k0 + depth), widened, to panels of `width` lanes:
// [panel][depth][width], the last panel narrowed to a multiple of `granule`. Lanes past n_lanes
// hold anything: they are columns or rows of C that nobody stores.
template <class D>
void pack_panels(D d, const LaneOperand& operand, int64_t lane0, int64_t n_lanes, int64_t k0,
                 int64_t depth, int64_t width, int64_t granule, hn::TFromD<D>* to) {
  constexpr int64_t kLanes = kLanesOf<D>;
  using T = hn::TFromD<D>;
  visit_elements<T>(operand, [&](const auto* base) HWY_ATTR {
    if (operand.lies_along_k()) {
      for (int64_t lane = 0; lane < n_lanes; lane += kLanes) {
        const int64_t panel = lane / width * width;
        const int64_t step = std::min(width, round_up(n_lanes - panel, granule));
        StoreColumns<D> store{to + panel * depth + (lane - panel), step};
        read_columns<1>(d, row_at(base, lane0 + lane, operand.lane_stride), operand.lane_stride,
                        std::min(kLanes, n_lanes - lane), k0, depth, store);
      }
      return;
    }
    using Element = std::remove_cv_t<std::remove_pointer_t<decltype(base)>>;
    if constexpr (!kIsBlock<Element>) {  // blocks lie along k
      // A row of lanes is short against a page: ask for the rows to come.
      constexpr int64_t kRowsAhead = 6;
      for (int64_t k = 0; k < depth; ++k) {
        const Element* const row = base + (k0 + k) * operand.k_stride + lane0 * operand.lane_stride;
        for (int64_t panel = 0; panel < n_lanes; panel += width) {
          const int64_t step = std::min(width, round_up(n_lanes - panel, granule));
          T* const at = to + panel * depth + k * step;
          for (int64_t lane = 0; lane < step; lane += kLanes) {
            const Element* const from = row + panel + lane;
            const int64_t valid = n_lanes - panel - lane;
            if (k + kRowsAhead < depth) hwy::Prefetch(from + kRowsAhead * operand.k_stride);
            hn::Store(valid >= kLanes ? load_lanes(d, from) : load_lanes(d, from, valid, T(0)), d,
                      at + lane);
          }
        }
      }
    }
  });
}

// All `rows` <= kTileRows rows of A, unpadded: [depth][rows].
template <class T>
void pack_few_rows(const LaneOperand& a, int64_t rows, int64_t k0, int64_t depth, T* to) {
  visit_elements<T>(a, [&](const auto* base) {
    using Element = std::remove_cv_t<std::remove_pointer_t<decltype(base)>>;
    if constexpr (!kIsBlock<Element>) {
      for (int64_t r = 0; r < rows; ++r) {
        const Element* const row = base + r * a.lane_stride + k0 * a.k_stride;
        for (int64_t k = 0; k < depth; ++k) to[k * rows + r] = widen(row[k * a.k_stride]);
      }
    }
  });
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
