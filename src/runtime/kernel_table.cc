#include "runtime/kernel_table.h"

#include <atomic>
#include <cctype>
#include <cstdlib>
#include <string_view>

#include "cpu/instruction_set.h"

namespace ullage {
namespace {

constexpr std::string_view kHeadPrefix = "head_cpu_";

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

}  // namespace

std::vector<KernelEntry> kernel_table() {
  std::vector<KernelEntry> table;
  for (const std::string_view set : cpu::instruction_sets()) {
    table.push_back({std::string(kHeadPrefix) + lower(set), "head", "instruction set " + lower(set),
                     "every term from logits and from hidden states; f64, f32, bf16, f16", ""});
  }
  return table;
}

Result<std::string> choose_head_kernel() {
  const std::vector<KernelEntry> table = kernel_table();
  const char* const forced = std::getenv("ULLAGE_FORCE_KERNEL");
  static std::atomic<bool> pinned{false};
  if (!forced || !*forced) {
    if (pinned.exchange(false)) cpu::force_instruction_set("");
    return std::string(kHeadPrefix) + lower(cpu::instruction_set());
  }
  std::string names;
  for (const std::string_view set : cpu::instruction_sets()) {
    const std::string name = std::string(kHeadPrefix) + lower(set);
    if (name == forced) {
      pinned = true;
      cpu::force_instruction_set(set);
      return name;
    }
    names += names.empty() ? name : ", " + name;
  }
  return Result<std::string>(kHeadUnknownKernel, "ULLAGE_FORCE_KERNEL is '" + std::string(forced) +
                                                     "'; accepted: " + names);
}

}  // namespace ullage
