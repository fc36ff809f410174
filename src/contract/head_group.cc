// What a shard of a vocabulary is held to: its place in the group's, the losses that follow from
// the group's log-sum-exp and label alone, and the statistics that it needs of the group.
#include <string>
#include <string_view>

#include "contract/describe.h"
#include "contract/head_validate.h"

namespace ullage::lossk {
namespace {

Status unsupported(std::string_view owner, std::string_view field, const std::string& value,
                   std::string_view accepted) {
  std::string message(owner);
  message.append(field).append(" is ").append(value).append("; accepted: ").append(accepted);
  return {kGroupUnsupported, message + " for a shard of the vocabulary (group_vocab > 0)"};
}

}  // namespace

Status check_group(const HeadConfig& config) {
  const int64_t group_vocab = config.options.group_vocab;
  if (group_vocab < 0) {
    return {kGroupBadRange, "options: group_vocab is " + describe(group_vocab) +
                                "; accepted: >= 1, or 0 for a head of its whole vocabulary"};
  }
  if (group_vocab == 0) return kHeadOk;
  for (const LossTerm& term : config.terms) {
    const std::string owner = "term '" + term.name + "': ";
    if (term.kind == LossKind::kDistillation) {
      return unsupported(owner, "kind", "distillation", "a loss of labels");
    }
    if (term.logits_scale != 1) {
      return unsupported(owner, "logits_scale", describe(term.logits_scale),
                         "1, or that of the options,");
    }
  }
  return kHeadOk;
}

Status check_shard(const Shape& shape, const HeadOptions& options) {
  if (options.group_vocab == 0) return kHeadOk;
  if (options.group_vocab - options.vocab_offset < shape.vocab) {
    return {kGroupBadRange,
            "options: vocab_offset is " + describe(options.vocab_offset) + " and vocab " +
                describe(shape.vocab) +
                "; accepted: together at most group_vocab = " + describe(options.group_vocab)};
  }
  return kHeadOk;
}

Status check_group_inputs(const Shape& shape, const HeadConfig& config, const Inputs& inputs,
                          const Outputs& outputs) {
  const bool smooths = smooths_labels(config);
  if (outputs.distance && !smooths) {
    return {kHeadShapeMismatch,
            "distance is given, and no term of the plan smooths its labels; "
            "accepted: none"};
  }
  const struct {
    std::string_view name;
    bool given, needed;
  } statistics[] = {{"group_shift", static_cast<bool>(inputs.group_shift), true},
                    {"group_log_sum", static_cast<bool>(inputs.group_log_sum), true},
                    // A shard without labels has no log-probability of one.
                    {"group_label_log_prob", static_cast<bool>(inputs.group_label_log_prob),
                     static_cast<bool>(inputs.labels)},
                    {"group_distance", static_cast<bool>(inputs.group_distance), smooths},
                    {"group_entropy", static_cast<bool>(inputs.group_entropy),
                     outputs.entropy || !outputs.policy_metrics.empty()}};
  bool any = false;
  for (const auto& each : statistics) any |= each.given;
  if (config.options.group_vocab == 0) {
    if (!any) return kHeadOk;
    return {kGroupStatistics,
            "group_shift, or another statistic of a group, is given, and "
            "options.group_vocab is 0; accepted: for a shard of a vocabulary"};
  }
  if (inputs.class_weights) return unsupported("", "class_weights", "given", "none");
  if (!outputs.argmax.empty()) return unsupported("", "argmax", "asked for", "none");
  if (!outputs.correct.empty()) return unsupported("", "correct", "asked for", "none");

  const bool wanted = !outputs.terms.empty() || outputs.total || outputs.token_loss ||
                      !outputs.policy_metrics.empty() || outputs.d_logits || outputs.d_hidden ||
                      outputs.d_weight || outputs.d_bias || outputs.d_adapter_a ||
                      outputs.d_adapter_b;
  if (shape.n_tok == 0 || (!any && !wanted)) return kHeadOk;
  for (const auto& [name, given, needed] : statistics) {
    if (given || !needed) continue;
    return {kGroupStatistics, std::string(name) +
                                  " is not given; needed for the losses and gradients of a shard. "
                                  "accepted without: its own shift, log_sum, label_log_prob, "
                                  "distance, entropy"};
  }
  return kHeadOk;
}

}  // namespace ullage::lossk
