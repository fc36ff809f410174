// Every golden case of tests/data/monolithic_losses.json, and where the checkout has the full file
// beside it, of that one: PyTorch's automatic differentiation in float64.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "runtime/head_case_run.h"
#include "support/compare.h"

namespace ullage::test {
namespace {

using nlohmann::json;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Scalars to 1e-11 of their size, gradients to 1e-10.
void expect_golden(const std::string& path, size_t n_cases,
                   const runtime::HeadCaseOptions& options) {
  const std::string text = read_file(path);
  const json expected = json::parse(text);
  const Result<runtime::HeadCases> cases = runtime::head_cases_from_json(text);
  ASSERT_TRUE(cases) << cases.status().to_string();
  ASSERT_EQ(cases->cases.size(), n_cases);
  for (size_t i = 0; i < n_cases; ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    const Result<runtime::HeadCase>& head = cases->cases[i];
    ASSERT_TRUE(head) << head.status().to_string();
    const Result<reference::HeadResult> result = runtime::run_head_case(*head, options);
    ASSERT_TRUE(result) << result.status().to_string();
    const json& right = expected["cases"][i]["expected"];
    const auto& terms = head->config.terms;
    ASSERT_EQ(right["losses"].size(), terms.size());
    for (size_t t = 0; t < terms.size(); ++t) {
      const double scalar = right["losses"][terms[t].name];
      EXPECT_NEAR(result->terms[t], scalar, 1e-11 * std::abs(scalar)) << terms[t].name;
    }
    const double total = right["total"];
    EXPECT_NEAR(result->total, total, 1e-11 * std::abs(total));
    std::vector<double> gradient;
    for (const json& row : right["grad_logits"]) {
      gradient.insert(gradient.end(), row.begin(), row.end());
    }
    EXPECT_TRUE(close(result->d_logits, gradient, 1e-10));
  }
}

class HeadGolden : public testing::TestWithParam<bool> {
 protected:
  runtime::HeadCaseOptions options() const { return {.reference = GetParam()}; }
};

TEST_P(HeadGolden, CasesOfUpTo257Columns) {
  expect_golden(ULLAGE_TEST_DATA "/monolithic_losses.json", 34, options());
}

TEST_P(HeadGolden, FullFile) {
  const std::string path = ULLAGE_GOLDEN "/monolithic_losses.json";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << "no " << path << ": the cases of more columns are not in this checkout";
  }
  expect_golden(path, 44, options());
}

INSTANTIATE_TEST_SUITE_P(, HeadGolden, testing::Values(false, true),
                         [](const auto& each) { return each.param ? "Reference" : "Plan"; });

}  // namespace
}  // namespace ullage::test
