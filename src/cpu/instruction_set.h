// Which of the compiled instruction sets the CPU kernels use.
#pragma once

#include <string_view>
#include <vector>

namespace ullage::cpu {

// The sets that were compiled in and that this CPU has, best first: "AVX3", "AVX2", "NEON",
// "SCALAR", ...
std::vector<std::string_view> instruction_sets();

// Makes every CPU kernel of the process use this set from now on; "" means the best. False (and no
// change) if the set is not one of instruction_sets(). All sets give the same bits: this is for
// tests and for measuring. Not to be called while a kernel runs.
bool force_instruction_set(std::string_view name);

// The set in use.
std::string_view instruction_set();

}  // namespace ullage::cpu
