#include "plan/head_plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"
#include "cpu/product.h"
#include "plan/head_workspace.h"
#include "plan/saturating.h"

namespace ullage::lossk {
namespace {

constexpr int64_t kDefaultBudgetBytes = int64_t{256} << 20;

// A strip of 1024 rows is 16 MiB of float32: it stays in the last cache level between its product
// and its sweeps, and the weight is read once per 1024 rows.
constexpr int64_t kStrip = 4096;
constexpr int64_t kStripRows = 1024;
constexpr int64_t kNarrowStrip = 2048;
static_assert(kStrip % cpu::kRowBlock == 0 && kStrip % cpu::kProductKBlock == 0 &&
                  kNarrowStrip % cpu::kRowBlock == 0 && kNarrowStrip % cpu::kProductKBlock == 0,
              "strips are whole blocks of every sum over columns");

// A chunk of fewer rows costs more than a second product of the logits: it moves the weight twice
// and its gradient in and out, 16 V D bytes, where that product is 2 rows V D operations. At 7.3
// operations for a byte (2 cores of Zen 4: 190 GF/s, 26 GB/s) both take as long at 58 rows; in
// float64 the same.
constexpr int64_t kFewRows = 64;

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

std::string mode_of(const HeadLayout& layout) {
  if (!layout.from_hidden()) return "from_logits";
  if (layout.strips()) return layout.makes_strips_twice() ? "recompute" : "strips";
  return layout.two_pass && layout.n_chunks > 1 ? "chunk_two_pass" : "chunk";
}

double operations_of(const HeadLayout& layout) {
  const auto n = static_cast<double>(layout.shape.n_tok);
  const auto d = static_cast<double>(layout.shape.d_model);
  const auto v = static_cast<double>(layout.shape.vocab);
  const auto r = static_cast<double>(layout.config.options.adapter_rank);
  const Request& request = layout.request;
  const bool again =
      layout.strips() ? layout.makes_strips_twice() : layout.two_pass && layout.n_chunks > 1;
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

int sole_divergence(const HeadLayout& layout) {
  if (!layout.gradient || layout.n_distillation != 1) return -1;
  for (int term = 0; term < layout.n_terms(); ++term) {
    if (layout.distillation[static_cast<size_t>(term)] < 0) continue;
    if (layout.is_top_k(term) || layout.config.terms[static_cast<size_t>(term)].weight == 0) break;
    for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
      const bool is_own = group == layout.group_of[static_cast<size_t>(term)];
      if (!is_own && layout.has_gradient(group)) return -1;
    }
    return term;
  }
  return -1;
}

// What depends neither on the chunk nor on the strip.
void describe_rows(HeadLayout& layout) {
  const Request& request = layout.request;
  const HeadConfig& config = layout.config;
  layout.gradient = request.d_logits || request.d_hidden || request.d_weight || request.d_bias ||
                    request.d_adapter;
  layout.teacher_used.assign(config.teachers.size(), false);
  bool whole_rows = false;  // a divergence from a whole row of a teacher
  for (int i = 0; i < layout.n_terms(); ++i) {
    const LossTerm& term = config.terms[static_cast<size_t>(i)];
    const bool by_segment = term.kind == LossKind::kGspo || term.kind == LossKind::kDpo;
    layout.two_pass |=
        layout.gradient && by_segment && term.weight != 0 && config.options.group_vocab == 0;
    layout.smoothing |= term.kind == LossKind::kCrossEntropy && term.label_smoothing > 0;
    const bool distils = term.kind == LossKind::kDistillation;
    layout.distillation.push_back(distils ? layout.n_distillation++ : -1);
    if (!distils) continue;
    layout.needs_effective_row = true;
    layout.teacher_used[static_cast<size_t>(term.teacher)] = true;
    layout.top_k |= layout.is_top_k(i);
    whole_rows |= !layout.is_top_k(i);
    layout.scratch_teacher |= !layout.is_top_k(i) || layout.needs_tail(i);
    layout.reads_row_again |= term.divergence == Divergence::kJensenShannon;
  }
  layout.sole_divergence = sole_divergence(layout);
  layout.scratch_exponentials = whole_rows && layout.sole_divergence < 0;
  layout.reads_row_again |=
      layout.smoothing || (layout.n_distillation > 0 && layout.sole_divergence < 0);
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

// The weight, and its gradient, come and go once for every chunk: under a budget, strips of half
// the columns and a smaller packing cost less than another chunk.
Status choose_strips(HeadLayout& layout, const PlanLimits& limits) {
  struct Candidate {
    int64_t strip, packed_bytes;
  };
  constexpr Candidate kCandidates[] = {{kStrip, cpu::kMostPackedBytes},
                                       {kStrip, cpu::kMostPackedBytes / 4},
                                       {kNarrowStrip, cpu::kMostPackedBytes / 4},
                                       {kNarrowStrip, cpu::kLeastPackedBytes}};
  const int64_t every_row = std::min(kStripRows, std::max<int64_t>(layout.shape.n_tok, 1));
  const std::vector<Rejection> rejections = layout.rejections;
  Status status = kHeadOk;
  for (const Candidate& candidate : kCandidates) {
    layout.rejections = rejections;
    layout.packed_bytes = candidate.packed_bytes;
    set_strip(layout, candidate.strip);
    status = choose_chunk(layout, limits, kStripRows);
    if (status.ok() && (limits.chunk > 0 || layout.chunk >= every_row)) break;
  }
  return status;
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
  return choose_strips(layout, limits);
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
  layout.materialized_bytes =
      saturating_times(shape.n_tok, shape.vocab, size_of(layout.accumulate));

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
