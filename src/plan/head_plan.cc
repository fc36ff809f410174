#include "plan/head_plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"
#include "cpu/product.h"

namespace ullage::lossk {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kDefaultBudgetBytes = int64_t{256} << 20;

// A strip of 1024 rows is 16 MiB of float32: it stays in the last cache level between its product
// and its sweeps, and the weight is read once per 1024 rows.
constexpr int64_t kStrip = 4096;
constexpr int64_t kStripRows = 1024;
static_assert(kStrip % cpu::kRowBlock == 0 && kStrip % cpu::kProductKBlock == 0,
              "strips are whole blocks of every sum over columns");

// Below so many rows at a time the products wait for the weight; a second product of the logits
// costs less.
constexpr int64_t kFewRows = 32;

// Arithmetic that sticks at the largest value: a count too large can never read as small.
constexpr int64_t kTooMany = std::numeric_limits<int64_t>::max();

int64_t times(int64_t a, int64_t b) {
  int64_t product;
  return a == kTooMany || b == kTooMany || __builtin_mul_overflow(a, b, &product) ? kTooMany
                                                                                  : product;
}

int64_t plus(int64_t a, int64_t b) {
  int64_t sum;
  return a == kTooMany || b == kTooMany || __builtin_add_overflow(a, b, &sum) ? kTooMany : sum;
}

template <class... Factors>
int64_t times(int64_t a, int64_t b, Factors... rest) {
  return times(times(a, b), rest...);
}

// Lays slots one after the other and books them.
class Carver {
 public:
  explicit Carver(std::vector<Booking>* bookings) : bookings_(bookings) {}

  Slot operator()(const char* purpose, int64_t bytes) {
    bytes = bytes > kTooMany - kAlignment ? kTooMany
                                          : (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const Slot slot{total_, bytes};
    total_ = plus(total_, bytes);
    if (bytes == 0) return slot;
    for (Booking& booking : *bookings_) {
      if (booking.purpose == purpose) {
        booking.bytes = plus(booking.bytes, bytes);
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

DType product_type(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

double scale_of(const HeadOptions& options, const LossTerm& term) {
  const double scale = options.logits_scale * term.logits_scale;
  return term.kind == LossKind::kDistillation ? scale / term.student_temperature : scale;
}

void group_terms(HeadLayout& layout, Implementation implementation) {
  const HeadOptions& options = layout.config.options;
  for (size_t i = 0; i < layout.config.terms.size(); ++i) {
    const double scale = scale_of(options, layout.config.terms[i]);
    auto& groups = layout.groups;
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const SoftmaxGroup& g) { return g.scale == scale; });
    if (group == groups.end() || implementation == Implementation::kPerTerm) {
      groups.push_back({scale, {}});
      group = groups.end() - 1;
    }
    group->terms.push_back(static_cast<int>(i));
    layout.group_of.push_back(static_cast<int>(group - groups.begin()));
  }
  auto base = std::find_if(layout.groups.begin(), layout.groups.end(),
                           [&](const SoftmaxGroup& g) { return g.scale == options.logits_scale; });
  if (base == layout.groups.end()) {
    layout.groups.push_back({options.logits_scale, {}});
    base = layout.groups.end() - 1;
  }
  layout.base_group = static_cast<int>(base - layout.groups.begin());
}

// Packing of the largest product of a run with `chunk` rows.
int64_t product_bytes(const HeadLayout& layout, int64_t chunk) {
  const auto& [n_tok, d_model, vocab] = layout.shape;
  int64_t bytes = 0;
  const auto product = [&](int64_t m, int64_t n, int64_t k, DType type) {
    bytes = std::max(bytes, cpu::product_workspace_bytes({m, n, k}, type, layout.n_threads));
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

// Lays out the workspace for `chunk` rows at a time; total in layout.workspace_bytes.
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
    slots.logits = book("logit chunk", times(chunk, layout.strip, element));
    constexpr int64_t kBestBytes = 16;
    if (layout.strips()) slots.best = book("row statistics", times(chunk, kBestBytes));
    slots.hidden = book("hidden rows", times(chunk, d_model, size_of(request.input_dtype)));
    if (request.d_hidden) slots.d_hidden = book("d_hidden chunk", times(chunk, d_model, element));
    if (rank > 0) {
      slots.adapter_rows = book("adapter rows", times(chunk, rank, element));
      if (layout.gradient) {
        slots.d_adapter_rows = book("adapter rows", times(chunk, rank, element));
      }
    }
    const bool rounds = request.d_weight_dtype != layout.accumulate;
    constexpr const char* kAccumulators = "gradient accumulators";
    if (request.d_weight && rounds) {
      slots.d_weight = book(kAccumulators, times(vocab, d_model, element));
    }
    if (request.d_adapter && rounds) {
      slots.d_adapter_a = book(kAccumulators, times(rank, d_model, element));
      slots.d_adapter_b = book(kAccumulators, times(vocab, rank, element));
    }
    if (request.d_bias) slots.d_bias = book(kAccumulators, times(vocab, element));
  }
  for (size_t i = 0; i < config.teachers.size(); ++i) {
    const Teacher& teacher = config.teachers[i];
    const bool made = layout.makes_logits_of(i);
    const int64_t bytes = size_of(product_type(teacher.dtype));
    slots.teacher_logits.push_back(book("teacher chunk", made ? times(chunk, vocab, bytes) : 0));
    slots.teacher_hidden.push_back(
        book("hidden rows", made ? times(chunk, teacher.d_model, size_of(teacher.dtype)) : 0));
  }
  if (layout.makes_logits()) slots.product = book("product packing", product_bytes(layout, chunk));

  if (config.options.bias || layout.smoothing) {
    slots.columns = book("bias and class weights", times(vocab, 2, element));
  }
  const int n_scratch = layout.scratch_student + layout.scratch_teacher + layout.scratch_gradient;
  slots.scratch =
      book("row scratch", times(layout.n_threads, n_scratch, layout.scratch_stride, element));

  // Per row: a softmax of each group, a teacher of each distillation, a loss of each term, its
  // place among the rows that are not ignored, among those of its segment, and its segment's
  // length.
  const auto n_groups = static_cast<int64_t>(layout.groups.size());
  int64_t row_bytes = times(n_groups, int64_t{sizeof(SoftmaxStatistics)});
  row_bytes = plus(row_bytes, times(layout.n_distillation, int64_t{sizeof(TeacherStatistics)}));
  row_bytes = plus(row_bytes, times(layout.n_terms(), int64_t{sizeof(TermRow)}));
  row_bytes = plus(row_bytes, 3 * int64_t{sizeof(int64_t)});
  const int64_t term_bytes = times(layout.n_terms(), 2 * int64_t{sizeof(double)});
  slots.statistics = book("row statistics", plus(times(n_tok, row_bytes), term_bytes));
  layout.workspace_bytes = book.total();
}

std::string mode_of(const HeadLayout& layout) {
  if (!layout.from_hidden()) return "from_logits";
  if (layout.strips()) return layout.gradient ? "recompute" : "strips";
  return layout.two_pass && layout.n_chunks > 1 ? "chunk_two_pass" : "chunk";
}

double operations_of(const HeadLayout& layout) {
  const auto n = static_cast<double>(layout.shape.n_tok);
  const auto d = static_cast<double>(layout.shape.d_model);
  const auto v = static_cast<double>(layout.shape.vocab);
  const auto r = static_cast<double>(layout.config.options.adapter_rank);
  const Request& request = layout.request;
  const bool again = layout.strips() ? layout.gradient : layout.two_pass && layout.n_chunks > 1;
  const double passes = again ? 2 : 1;
  const double logits = n * d * v + n * r * (d + v);
  double products = logits * passes;
  if (request.d_hidden) products += logits;
  if (request.d_weight) products += n * d * v;
  if (request.d_adapter) products += n * r * (request.d_hidden ? d + v : d + 2 * v);
  for (size_t i = 0; i < layout.config.teachers.size(); ++i) {
    if (!layout.makes_logits_of(i)) continue;
    products += n * static_cast<double>(layout.config.teachers[i].d_model) * v * passes;
  }
  return 2 * products;
}

int sole_label_group(const HeadLayout& layout) {
  if (layout.config.options.softcap > 0) return -1;
  int sole = -1;
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    if (!layout.has_gradient(group)) continue;
    if (sole >= 0) return -1;
    sole = group;
    for (const int index : layout.groups[static_cast<size_t>(group)].terms) {
      const LossTerm& term = layout.config.terms[static_cast<size_t>(index)];
      if (term.weight == 0) continue;
      if (term.kind == LossKind::kDistillation) return -1;
      if (term.kind == LossKind::kCrossEntropy && term.label_smoothing > 0) return -1;
    }
  }
  return sole;
}

// Columns at a time, and with them what a thread's scratch rows hold.
void set_strip(HeadLayout& layout, int64_t strip) {
  layout.strip = strip;
  const bool converts = !layout.from_hidden() && layout.request.input_dtype != layout.accumulate;
  layout.scratch_student = !layout.strips() && (converts || layout.changes_logits);
  layout.scratch_gradient = layout.gradient;
  constexpr int64_t kPadding = 16;  // elements, so that every scratch row is aligned to 64 bytes
  const int64_t row = plus(strip, cpu::row_blocks(strip) + kPadding - 1);
  layout.scratch_stride = row / kPadding * kPadding;
}

// What depends neither on the chunk nor on the strip.
void describe_rows(HeadLayout& layout) {
  const Request& request = layout.request;
  const HeadConfig& config = layout.config;
  layout.gradient = request.d_logits || request.d_hidden || request.d_weight || request.d_bias ||
                    request.d_adapter;
  layout.teacher_used.assign(config.teachers.size(), false);
  for (int i = 0; i < layout.n_terms(); ++i) {
    const LossTerm& term = config.terms[static_cast<size_t>(i)];
    const bool by_segment = term.kind == LossKind::kGspo || term.kind == LossKind::kDpo;
    layout.two_pass |= layout.gradient && by_segment && term.weight != 0;
    layout.smoothing |= term.kind == LossKind::kCrossEntropy && term.label_smoothing > 0;
    const bool distils = term.kind == LossKind::kDistillation;
    layout.distillation.push_back(distils ? layout.n_distillation++ : -1);
    if (!distils) continue;
    layout.needs_effective_row = true;
    layout.teacher_used[static_cast<size_t>(term.teacher)] = true;
    const Teacher& teacher = config.teachers[static_cast<size_t>(term.teacher)];
    const DType rows =
        teacher.kind == TeacherKind::kHidden ? product_type(teacher.dtype) : teacher.dtype;
    layout.scratch_teacher |= layout.is_top_k(i) ? layout.needs_tail(i) : rows != layout.accumulate;
  }
  layout.needs_effective_row |= layout.smoothing;
  layout.changes_logits = config.options.bias || config.options.softcap > 0;
  layout.one_label_group = sole_label_group(layout);
  set_strip(layout, layout.shape.vocab);
}

Status mixed_types(const std::string& what, DType a, DType b) {
  return {kHeadBadDtype, what + " are " + std::string(name_of(a)) + " and " +
                             std::string(name_of(b)) +
                             "; accepted: f64 with f64, or any two of "
                             "f32, bf16, f16"};
}

Status check_products(const HeadLayout& layout) {
  const auto mixed = [](DType a, DType b) { return (a == DType::kF64) != (b == DType::kF64); };
  const Request& request = layout.request;
  if (layout.from_hidden() && mixed(request.input_dtype, request.weight_dtype)) {
    return mixed_types("hidden and weight", request.input_dtype, request.weight_dtype);
  }
  for (size_t i = 0; i < layout.config.teachers.size(); ++i) {
    const Teacher& teacher = layout.config.teachers[i];
    if (teacher.kind == TeacherKind::kHidden && mixed(teacher.dtype, teacher.weight_dtype)) {
      return mixed_types("hidden and weight of teachers[" + describe(i) + "]", teacher.dtype,
                         teacher.weight_dtype);
    }
  }
  return kHeadOk;
}

Status over_budget(const HeadLayout& layout, const std::string& what, int64_t budget) {
  return {kLossBadChunk,
          what + " needs " +
              (layout.workspace_bytes == kTooMany ? std::string("more than 2^63")
                                                  : describe(layout.workspace_bytes)) +
              " bytes; allowed " + describe(budget)};
}

// The given chunk, or the largest of at most `most` rows that the budget allows.
Status choose_chunk(HeadLayout& layout, const PlanLimits& limits, int64_t most) {
  carve(layout, 1);
  const int64_t budget = limits.budget_bytes > 0
                             ? limits.budget_bytes
                             : std::max(kDefaultBudgetBytes, layout.workspace_bytes);
  if (layout.workspace_bytes > budget) return over_budget(layout, "a chunk of 1 row", budget);
  const int64_t n_tok = std::max<int64_t>(layout.shape.n_tok, 1);
  if (limits.chunk > 0) {
    carve(layout, std::min(limits.chunk, n_tok));
    if (limits.budget_bytes > 0 && layout.workspace_bytes > budget) {
      return over_budget(layout, "a chunk of " + describe(layout.chunk) + " rows", budget);
    }
    return kHeadOk;
  }
  int64_t fits = 1, too_many = std::min(most, n_tok) + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    carve(layout, middle);
    (layout.workspace_bytes <= budget ? fits : too_many) = middle;
  }
  if (fits < std::min(most, n_tok)) {
    carve(layout, n_tok);
    layout.rejections.push_back(
        {"one chunk of " + describe(n_tok) + " rows", over_budget(layout, "it", budget).message()});
  }
  carve(layout, fits);
  return kHeadOk;
}

// Why strips cannot serve; empty where they can.
std::string against_strips(const HeadLayout& layout) {
  if (!layout.from_hidden()) return "the logits are given";
  if (layout.needs_effective_row) return "a term reads a row more often than once";
  if (layout.request.entropy || layout.request.policy_metrics) {
    return "the entropy reads a row more often than once";
  }
  if (layout.shape.vocab <= kStrip) return "one strip holds the vocabulary";
  return "";
}

// Whole rows of logits in a chunk, or strips of their columns. Strips take a fixed amount of
// memory; without a gradient they cost nothing, with one they make the logits twice.
Status choose_mode(HeadLayout& layout, const PlanLimits& limits) {
  constexpr int64_t kEveryRow = std::numeric_limits<int64_t>::max();
  const std::string reason = against_strips(layout);
  if (!reason.empty()) {
    layout.rejections.push_back({layout.gradient ? "recompute" : "strips", reason});
    return choose_chunk(layout, limits, kEveryRow);
  }
  if (layout.gradient) {
    const Status status = choose_chunk(layout, limits, kEveryRow);
    const int64_t wanted = std::min(kFewRows, std::max<int64_t>(layout.shape.n_tok, 1));
    if (limits.chunk > 0 || (status.ok() && layout.chunk >= wanted)) {
      layout.rejections.push_back({"recompute", "whole rows fit, and make their logits once"});
      return status;
    }
    layout.rejections = {{"chunk", status.ok() ? "no more than " + describe(layout.chunk) +
                                                     " rows at a time fit the budget"
                                               : status.message()}};
  }
  set_strip(layout, kStrip);
  return choose_chunk(layout, limits, kStripRows);
}

}  // namespace

bool HeadLayout::makes_teacher_logits() const {
  for (size_t i = 0; i < config.teachers.size(); ++i) {
    if (makes_logits_of(i)) return true;
  }
  return false;
}

bool HeadLayout::is_top_k(int term) const {
  const LossTerm& t = config.terms[static_cast<size_t>(term)];
  return t.kind == LossKind::kDistillation &&
         config.teachers[static_cast<size_t>(t.teacher)].kind == TeacherKind::kTopK;
}

bool HeadLayout::needs_tail(int term) const {
  return is_top_k(term) && config.terms[static_cast<size_t>(term)].top_k_tail == TopKTail::kTailBin;
}

bool HeadLayout::has_gradient(int group) const {
  const auto& terms = groups[static_cast<size_t>(group)].terms;
  return std::any_of(terms.begin(), terms.end(),
                     [&](int term) { return config.terms[static_cast<size_t>(term)].weight != 0; });
}

Result<HeadLayout> plan_head(const Shape& shape, const HeadConfig& config, const Request& request,
                             const PlanLimits& limits, int n_threads) {
  const auto negative = [](const char* field, int64_t value) {
    return Status(kLossEmptyDimension,
                  std::string(field) + " is " + describe(value) + "; accepted: >= 0");
  };
  if (limits.budget_bytes < 0) return negative("limits.budget_bytes", limits.budget_bytes);
  if (limits.chunk < 0) return negative("limits.chunk", limits.chunk);

  HeadLayout layout;
  layout.shape = shape;
  layout.config = config;
  layout.request = request;
  layout.accumulate = product_type(request.input_dtype);
  layout.n_threads = n_threads;
  if (Status status = check_products(layout); !status.ok()) return status;
  group_terms(layout, limits.implementation);
  describe_rows(layout);
  layout.materialized_bytes = times(shape.n_tok, shape.vocab, size_of(layout.accumulate));

  if (!layout.makes_logits()) {
    carve(layout, std::max<int64_t>(shape.n_tok, 1));
    if (limits.budget_bytes > 0 && layout.workspace_bytes > limits.budget_bytes) {
      return over_budget(layout, "the losses of " + describe(shape.n_tok) + " rows",
                         limits.budget_bytes);
    }
  } else if (Status status = choose_mode(layout, limits); !status.ok()) {
    return status;
  }
  if (layout.workspace_bytes == kTooMany) {
    return Result<HeadLayout>(kLossDimensionTooLarge, "the workspace does not fit 2^63 bytes");
  }
  layout.n_chunks = (shape.n_tok + layout.chunk - 1) / layout.chunk;
  layout.mode = mode_of(layout);
  layout.operations = operations_of(layout);
  return layout;
}

}  // namespace ullage::lossk
