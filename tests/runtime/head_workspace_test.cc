// What a plan books is what a run uses: bytes that two runs over different fillings leave as they
// were are memory booked in vain.
#include <gtest/gtest.h>

#include <cstring>
#include <new>

#include "support/head_plan_case.h"
#include "support/head_random.h"

namespace ullage::test {
namespace {

// The share of the workspace that a run writes, and the place after its last written byte.
struct Use {
  double share = 0;
  int64_t reach = 0, bytes = 0;
};

Use workspace_use(const RandomHead& head, DType dtype, int64_t chunk) {
  const auto [n_tok, d_model, vocab] = head.inputs.shape;
  const lossk::Request request = {.input_dtype = dtype,
                                  .weight_dtype = dtype,
                                  .grad_dtype = dtype,
                                  .d_weight_dtype = dtype,
                                  .d_hidden = true,
                                  .d_weight = true};
  const Result<lossk::HeadPlan> plan =
      lossk::plan(head.inputs.shape, head.config, request, {.chunk = chunk, .n_threads = 1});
  EXPECT_TRUE(plan) << plan.status().to_string();
  if (!plan) return {};
  Stored hidden(head.inputs.hidden, dtype), weight(head.inputs.weight, dtype);
  Stored teacher(head.inputs.teachers[0].logits, DType::kF32);
  Stored dx(head.inputs.hidden, dtype), dw(head.inputs.weight, dtype);
  lossk::Inputs in;
  in.hidden = hidden.matrix(d_model);
  in.weight = weight.matrix(d_model);
  in.labels = ids_of(head.inputs.labels);
  in.teachers.resize(1);
  in.teachers[0].logits = teacher.matrix(vocab);
  lossk::Outputs out;
  out.d_hidden = {dx.data(), dtype, n_tok, d_model, d_model};
  out.d_weight = {dw.data(), dtype, vocab, d_model, d_model};

  const auto size = static_cast<size_t>(plan->workspace_bytes());
  std::vector<std::byte> after[2];
  constexpr std::byte kFilling[2] = {std::byte{0x5a}, std::byte{0xa5}};
  for (int i = 0; i < 2; ++i) {
    auto* const workspace = static_cast<std::byte*>(::operator new(size, std::align_val_t{64}));
    std::memset(workspace, static_cast<int>(kFilling[i]), size);
    const Status status = plan->run(in, out, {workspace, size});
    EXPECT_TRUE(status.ok()) << status.to_string();
    after[i].assign(workspace, workspace + size);
    ::operator delete(workspace, std::align_val_t{64});
  }
  Use use{.bytes = plan->workspace_bytes()};
  int64_t written = 0;
  for (size_t i = 0; i < size; ++i) {
    if (after[0][i] == kFilling[0] && after[1][i] == kFilling[1]) continue;
    ++written;
    use.reach = static_cast<int64_t>(i) + 1;
  }
  use.share = static_cast<double>(written) / static_cast<double>(size);
  return use;
}

TEST(HeadWorkspace, IsUsed) {
  Rng rng(test_seed());
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const int64_t chunk : {64, 256}) {
      RandomHead head = random_head(rng, 256, 64, 4096);
      head.config.terms = {{.name = "ce"}, {.name = "kd", .kind = LossKind::kDistillation}};
      head.config.teachers.resize(1);
      for (int64_t& label : head.inputs.labels) label = std::max<int64_t>(label, 0);
      const Use use = workspace_use(head, dtype, chunk);
      std::printf("[ USE ] %s chunk %lld: %.1f %% of %lld bytes\n",
                  std::string(name_of(dtype)).c_str(), static_cast<long long>(chunk),
                  100 * use.share, static_cast<long long>(use.bytes));
      // Packing is booked for whole panels and rows for whole vectors; all else is used.
      EXPECT_GT(use.share, chunk < 256 ? 0.7 : 0.85) << name_of(dtype) << " chunk " << chunk;
      EXPECT_GT(use.reach, use.bytes * 9 / 10);
    }
  }
}

}  // namespace
}  // namespace ullage::test
