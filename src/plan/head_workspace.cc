#include "plan/head_workspace.h"

#include <algorithm>
#include <vector>

#include "cpu/product.h"
#include "plan/saturating.h"

namespace ullage::lossk {
namespace {

constexpr int64_t kAlignment = 64;

// Lays slots one after the other and books them.
class Carver {
 public:
  explicit Carver(std::vector<Booking>* bookings) : bookings_(bookings) {}

  Slot operator()(const char* purpose, int64_t bytes) {
    bytes = bytes > kTooMany - kAlignment ? kTooMany
                                          : (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const Slot slot{total_, bytes};
    total_ = saturating_plus(total_, bytes);
    if (bytes == 0) return slot;
    for (Booking& booking : *bookings_) {
      if (booking.purpose == purpose) {
        booking.bytes = saturating_plus(booking.bytes, bytes);
        return slot;
      }
    }
    bookings_->push_back({purpose, bytes});
    return slot;
  }

  int64_t total() const { return total_; }

 private:
  std::vector<Booking>* bookings_;
  int64_t total_ = 0;
};

// Packing of the largest product of a run with `chunk` rows.
int64_t product_bytes(const HeadLayout& layout, int64_t chunk) {
  const auto& [n_tok, d_model, vocab] = layout.shape;
  int64_t bytes = 0;
  const auto product = [&](int64_t m, int64_t n, int64_t k, DType type) {
    bytes = std::max(bytes, cpu::product_workspace_bytes({m, n, k}, type, layout.n_threads,
                                                         layout.packed_bytes));
  };
  const DType type = layout.accumulate;
  // The last strip may be shorter, and then another operand is packed.
  for (const int64_t columns : {layout.strip, vocab % layout.strip}) {
    if (columns == 0 || !layout.from_hidden()) continue;
    product(chunk, columns, d_model, type);
    if (layout.request.d_hidden) product(chunk, d_model, columns, type);
    if (layout.request.d_weight) product(columns, d_model, chunk, type);
    if (const int64_t rank = layout.config.options.adapter_rank; rank > 0) {
      product(chunk, rank, d_model, type);
      product(chunk, columns, rank, type);
      product(chunk, rank, columns, type);
      product(chunk, d_model, rank, type);
      product(columns, rank, chunk, type);
      product(rank, d_model, chunk, type);
    }
  }
  for (size_t i = 0; i < layout.config.teachers.size(); ++i) {
    const Teacher& teacher = layout.config.teachers[i];
    if (!layout.makes_logits_of(i)) continue;
    product(chunk, vocab, teacher.d_model, product_type(teacher.dtype));
  }
  return bytes;
}

}  // namespace

void set_strip(HeadLayout& layout, int64_t strip) {
  layout.strip = strip;
  // Softmaxes and divergences read a row in the type in which it lies; all else wants it in T.
  const bool elsewhere = layout.smoothing || layout.request.entropy ||
                         layout.request.policy_metrics || layout.top_k ||
                         (layout.gradient && layout.one_label_group < 0);
  const bool converts =
      elsewhere && !layout.from_hidden() && layout.request.input_dtype != layout.accumulate;
  layout.scratch_student = !layout.strips() && (converts || layout.changes_logits);
  layout.scratch_gradient = layout.gradient;
  constexpr int64_t kPadding = 16;  // elements, so that every scratch row is aligned to 64 bytes
  const int64_t row = saturating_plus(strip, cpu::row_blocks(strip) + kPadding - 1);
  layout.scratch_stride = row / kPadding * kPadding;
}

void carve(HeadLayout& layout, int64_t chunk) {
  const auto& [n_tok, d_model, vocab] = layout.shape;
  const Request& request = layout.request;
  const HeadConfig& config = layout.config;
  const int64_t element = size_of(layout.accumulate);
  const int64_t rank = config.options.adapter_rank;
  HeadSlots& slots = layout.slots;
  slots = {};
  layout.bookings.clear();
  layout.chunk = chunk;
  Carver book(&layout.bookings);

  if (layout.from_hidden()) {
    slots.logits = book("logit chunk", saturating_times(chunk, layout.strip, element));
    constexpr int64_t kBestBytes = 16;
    if (layout.strips()) slots.best = book("row statistics", saturating_times(chunk, kBestBytes));
    slots.hidden =
        book("hidden rows", saturating_times(chunk, d_model, size_of(request.input_dtype)));
    if (request.d_hidden)
      slots.d_hidden = book("d_hidden chunk", saturating_times(chunk, d_model, element));
    if (rank > 0) {
      slots.adapter_rows = book("adapter rows", saturating_times(chunk, rank, element));
      if (layout.gradient) {
        slots.d_adapter_rows = book("adapter rows", saturating_times(chunk, rank, element));
      }
    }
    const bool rounds = request.d_weight_dtype != layout.accumulate;
    constexpr const char* kAccumulators = "gradient accumulators";
    if (request.d_weight && rounds) {
      slots.d_weight = book(kAccumulators, saturating_times(vocab, d_model, element));
    }
    if (request.d_adapter && rounds) {
      slots.d_adapter_a = book(kAccumulators, saturating_times(rank, d_model, element));
      slots.d_adapter_b = book(kAccumulators, saturating_times(vocab, rank, element));
    }
    if (request.d_bias) slots.d_bias = book(kAccumulators, saturating_times(vocab, element));
  }
  for (size_t i = 0; i < config.teachers.size(); ++i) {
    const Teacher& teacher = config.teachers[i];
    const bool made = layout.makes_logits_of(i);
    const int64_t bytes = size_of(product_type(teacher.dtype));
    slots.teacher_logits.push_back(
        book("teacher chunk", made ? saturating_times(chunk, vocab, bytes) : 0));
    slots.teacher_hidden.push_back(
        book("hidden rows",
             made ? saturating_times(chunk, teacher.d_model, size_of(teacher.dtype)) : 0));
  }
  if (layout.makes_logits()) slots.product = book("product packing", product_bytes(layout, chunk));

  if (config.options.bias || layout.smoothing) {
    slots.columns = book("bias and class weights", saturating_times(vocab, 2, element));
  }
  slots.scratch = book("row scratch", saturating_times(layout.n_threads, layout.scratch_rows(),
                                                       layout.scratch_stride, element));

  // Per row: a softmax of each group, a teacher of each distillation, a loss of each term, its
  // place among the rows that are not ignored, among those of its segment, and its segment's
  // length.
  const auto n_groups = static_cast<int64_t>(layout.groups.size());
  int64_t row_bytes = saturating_times(n_groups, int64_t{sizeof(SoftmaxStatistics)});
  row_bytes = saturating_plus(
      row_bytes, saturating_times(layout.n_distillation, int64_t{sizeof(TeacherStatistics)}));
  row_bytes =
      saturating_plus(row_bytes, saturating_times(layout.n_terms(), int64_t{sizeof(TermRow)}));
  row_bytes = saturating_plus(row_bytes, 3 * int64_t{sizeof(int64_t)});
  const int64_t term_bytes = saturating_times(layout.n_terms(), 2 * int64_t{sizeof(double)});
  slots.statistics =
      book("row statistics", saturating_plus(saturating_times(n_tok, row_bytes), term_bytes));
  layout.workspace_bytes = book.total();
}

}  // namespace ullage::lossk
