#include "cpu/instruction_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/instruction_set.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ullage::cpu {
namespace {

// A lower bit is a better target; the emulated ones run everywhere.
int64_t available() { return (hwy::SupportedTargets() | HWY_EMU128 | HWY_SCALAR) & HWY_TARGETS; }

}  // namespace

HWY_EXPORT(target_name);

std::vector<std::string_view> instruction_sets() {
  std::vector<std::string_view> names;
  for (int64_t targets = available(); targets != 0; targets &= targets - 1) {
    names.push_back(hwy::TargetName(targets & -targets));
  }
  return names;
}

bool force_instruction_set(std::string_view name) {
  if (name.empty()) {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return true;
  }
  for (int64_t targets = available(); targets != 0; targets &= targets - 1) {
    if (name != hwy::TargetName(targets & -targets)) continue;
    hwy::GetChosenTarget().Update(targets & -targets);
    return true;
  }
  return false;
}

std::string_view instruction_set() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace ullage::cpu
#endif  // HWY_ONCE
