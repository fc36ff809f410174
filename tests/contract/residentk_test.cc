#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "contract/extremes.h"
#include "contract/session_shape.h"
#include "ullage/residentk/contract.h"

namespace ullage::residentk {
namespace {

TEST(ResidentContract, ConstantsAreThePublishedOnes) {
  EXPECT_EQ(kResidentMaxContext, 65536);
  EXPECT_EQ(kResidentDefaultContext, 512);
}

TEST(ResidentContract, NamesItsOwnCodesOnly) {
  EXPECT_EQ(residentk_status_name(600), "resident_ok");
  EXPECT_EQ(residentk_status_name(601), "resident_empty_dimension");
  EXPECT_EQ(residentk_status_name(602), "resident_dimension_too_large");
  EXPECT_EQ(residentk_status_name(603), "resident_head_geometry_unsupported");
  EXPECT_EQ(residentk_status_name(604), "resident_shader_toolchain_absent");
  EXPECT_EQ(residentk_status_name(605), "resident_no_accelerator_present");
  EXPECT_EQ(residentk_status_name(606), "resident_kv_context_full");
  EXPECT_EQ(residentk_status_name(607), "resident_weight_length_mismatch");
  EXPECT_EQ(residentk_status_name(608), "resident_launch_failed");
  EXPECT_EQ(residentk_status_name(609), "resident_non_finite_scalar");
  EXPECT_EQ(residentk_status_name(610), "resident_code_out_of_range");
  for (int64_t code : {int64_t{580}, int64_t{599}, int64_t{611}, int64_t{620}, kInt64Min, kInt64Max,
                       (int64_t{1} << 32) + 600}) {
    EXPECT_EQ(residentk_status_name(code), "resident_code_out_of_range") << code;
  }
}

// The published shapes, h_q * d_head != d_model among them.
TEST(ResidentContract, AcceptsPublishedModels) {
  EXPECT_EQ(residentk_dims_check(1024, 16, 8, 128, 3072), 600);       // Qwen3-0.6B
  EXPECT_EQ(residentk_dims_check(4096, 32, 8, 128, 12288), 600);      // Qwen3-8B
  EXPECT_EQ(residentk_dims_check(576, 9, 3, 64, 1536), 600);          // SmolLM2-135M
  EXPECT_EQ(residentk_dims_check(8192, 64, 8, 128, 28672), 600);      // Llama-3.1-70B
  EXPECT_EQ(residentk_dims_check(16384, 128, 8, 128, 53248), 600);    // Llama-3.1-405B
  EXPECT_EQ(residentk_dims_check(5376, 32, 16, 128, 21504), 600);     // Gemma-3-27B
  EXPECT_EQ(residentk_dims_check(14336, 112, 112, 128, 57344), 600);  // BLOOM-176B
}

TEST(ResidentContract, RefusesShapes) {
  EXPECT_EQ(residentk_dims_check(1024, 5, 2, 128, 3072), 603);
  EXPECT_EQ(residentk_dims_check(1024, 8, 16, 128, 3072), 603);
  EXPECT_EQ(residentk_dims_check(1024, 16, 8, 96, 3072), 603);
  EXPECT_EQ(residentk_dims_check(1024, 16, 8, 1, 3072), 600);  // 1 = 2^0
  EXPECT_EQ(residentk_dims_check(0, 16, 8, 128, 3072), 601);
  EXPECT_EQ(residentk_dims_check(1024, 0, 8, 128, 3072), 601);
  EXPECT_EQ(residentk_dims_check(1024, 16, 0, 128, 3072), 601);
  EXPECT_EQ(residentk_dims_check(1024, 16, 8, 0, 3072), 601);
  EXPECT_EQ(residentk_dims_check(1024, 16, 8, 128, -1), 601);
  EXPECT_EQ(residentk_dims_check(kInt64Max, 16, 8, 128, 0), 601) << "an empty one is named first";
  EXPECT_EQ(residentk_dims_check(kResidentMaxModelDim + 1, 16, 8, 128, 3072), 602);
  EXPECT_EQ(residentk_dims_check(1024, kResidentMaxHeads * 2, 8, 1, 3072), 602);
  EXPECT_EQ(residentk_dims_check(1024, 16, kResidentMaxHeads + 1, 128, 3072), 602);
  EXPECT_EQ(residentk_dims_check(1024, 1, 1, kResidentMaxHeadDim * 2, 3072), 602);
  EXPECT_EQ(residentk_dims_check(1024, 16, 8, 128, kResidentMaxFeedForwardDim + 1), 602);
}

// Each of the three candidates for the staged vector, at the tier and one float beyond.
TEST(ResidentContract, TheStagedVectorFitsTheSharedMemoryTier) {
  const int64_t floats = shared_memory_tier_bytes() / 4;
  EXPECT_EQ(residentk_dims_check(floats, 1, 1, 1, 1), 600);
  EXPECT_EQ(residentk_dims_check(floats + 1, 1, 1, 1, 1), 602);
  EXPECT_EQ(residentk_dims_check(1, 1, 1, 1, floats), 600);
  EXPECT_EQ(residentk_dims_check(1, 1, 1, 1, floats + 1), 602);
  const int64_t heads = floats / 128;
  EXPECT_EQ(residentk_dims_check(1, heads, 1, 128, 1), 600);
  EXPECT_EQ(residentk_dims_check(1, heads + 1, 1, 128, 1), 602);
}

TEST(ResidentContract, ContextCheck) {
  EXPECT_EQ(residentk_context_check(500, 12, 512), 600);
  EXPECT_EQ(residentk_context_check(500, 13, 512), 606);
  EXPECT_EQ(residentk_context_check(1, 1, 1), 606);
  EXPECT_EQ(residentk_context_check(65535, 1, 65536), 600);
  EXPECT_EQ(residentk_context_check(1, 1, 65537), 602);
  EXPECT_EQ(residentk_context_check(0, 1, 512), 601);
  EXPECT_EQ(residentk_context_check(1, 0, 512), 601);
  EXPECT_EQ(residentk_context_check(1, 1, 0), 601);
  EXPECT_EQ(residentk_context_check(kInt64Max, kInt64Max, 512), 606);
  EXPECT_EQ(residentk_context_check(1, kInt64Max, 65536), 606);
  EXPECT_EQ(residentk_context_check(kInt64Max, kInt64Max, kInt64Max), 602);
  EXPECT_EQ(residentk_context_check(kInt64Min, kInt64Min, kInt64Min), 601);
}

TEST(ResidentContract, Counts) {
  EXPECT_EQ(residentk_dispatch_budget(28), 171);
  EXPECT_EQ(residentk_dispatch_budget_deep(28), 199);
  EXPECT_EQ(residentk_cache_elements(28, 8, 128, 512), 29360128);
  EXPECT_EQ(residentk_cache_elements(28, 8, 128, 65536), 3758096384);
  EXPECT_EQ(residentk_weight_elems(1024, 16, 8, 128, 3072, 28, 151936), 625410048);
  EXPECT_EQ(residentk_weight_elems(1024, 16, 8, 128, 3072, 28, 151936, 65536),
            625410048 - 29360128 + 3758096384);
}

TEST(ResidentContract, CountsAreZeroWhereRefused) {
  for (int64_t bad : {kInt64Min, int64_t{-1}, int64_t{0}, kResidentMaxLayers + 1, kInt64Max}) {
    EXPECT_EQ(residentk_dispatch_budget(bad), 0) << bad;
    EXPECT_EQ(residentk_dispatch_budget_deep(bad), 0) << bad;
    EXPECT_EQ(residentk_cache_elements(bad, 8, 128, 512), 0) << bad;
    EXPECT_EQ(residentk_weight_elems(1024, 16, 8, 128, 3072, bad, 151936), 0) << bad;
  }
  EXPECT_EQ(residentk_cache_elements(28, kResidentMaxHeads + 1, 128, 512), 0);
  EXPECT_EQ(residentk_cache_elements(28, 8, kResidentMaxHeadDim + 1, 512), 0);
  EXPECT_EQ(residentk_cache_elements(28, 8, 128, 65537), 0);
  EXPECT_EQ(residentk_weight_elems(1024, 5, 2, 128, 3072, 28, 151936), 0);
  EXPECT_EQ(residentk_weight_elems(1024, 16, 8, 128, 3072, 28, kResidentMaxVocab + 1), 0);
  EXPECT_EQ(residentk_weight_elems(1024, 16, 8, 128, 3072, 28, 151936, 65537), 0);
}

TEST(ResidentContract, NoExtremeOverflowsACount) {
  for (int64_t a : kExtremes) {
    for (int64_t b : kExtremes) {
      for (int64_t c : kExtremes) {
        for (int64_t d : kExtremes) {
          const int64_t cache = residentk_cache_elements(a, b, c, d);
          const int64_t weights = residentk_weight_elems(a, b, b, c, d, a, d, a);
          ASSERT_GE(cache, 0);
          ASSERT_LT(cache, int64_t{1} << 51);
          ASSERT_GE(weights, 0);
          ASSERT_LT(weights, int64_t{1} << 51);
        }
        const StatusCode context = residentk_context_check(a, b, c);
        ASSERT_EQ(context == kResidentOk, a >= 1 && b >= 1 && c >= 1 && c <= kResidentMaxContext &&
                                              static_cast<__int128>(a) + b <= c);
        const int64_t splits = residentk_splitk_policy(a, b, c);
        ASSERT_GE(splits, 1);
        ASSERT_LE(splits, residentk_splitk_max_n_splits(b, c));
      }
    }
  }
}

TEST(ResidentContract, Scalars) {
  EXPECT_TRUE(residentk_scalars_ok(1e-6, 0.08838834764831845));
  EXPECT_EQ(residentk_scalars_check(1e-6, 0.1), 600);
  for (double bad : {0.0, -1.0, static_cast<double>(NAN), static_cast<double>(INFINITY),
                     -static_cast<double>(INFINITY)}) {
    EXPECT_FALSE(residentk_scalars_ok(bad, 1.0)) << bad;
    EXPECT_FALSE(residentk_scalars_ok(1.0, bad)) << bad;
    EXPECT_EQ(residentk_scalars_check(1.0, bad), 609) << bad;
  }
}

TEST(SplitK, Anchors) {
  EXPECT_EQ(residentk_splitk_max_n_splits(40, 16), 80);
  EXPECT_EQ(residentk_splitk_policy(128, 40, 16), 40);
  EXPECT_EQ(residentk_splitk_policy(1000, 40, 16), 80);
  EXPECT_EQ(residentk_splitk_max_n_splits(0, 16), 80);
  EXPECT_EQ(residentk_splitk_max_n_splits(kInt64Min, 16), 80);
  EXPECT_EQ(residentk_splitk_max_n_splits(40, 0), 80);
  EXPECT_EQ(residentk_splitk_max_n_splits(1, 64), 1);
  EXPECT_EQ(residentk_splitk_max_n_splits(kInt64Max, kInt64Max), 32);
  EXPECT_EQ(residentk_splitk_max_n_splits(kInt64Max, 1), kInt64Max);
  EXPECT_EQ(residentk_splitk_policy(31, 40, 16), 1);
  EXPECT_GT(residentk_splitk_policy(32, 40, 16), 1);
  EXPECT_EQ(residentk_splitk_policy(kInt64Max, 40, 16), 80);
  EXPECT_EQ(residentk_splitk_policy(kInt64Max, kInt64Max, 1), kInt64Max);
  EXPECT_FALSE(residentk_splitk_should_split(31));
  EXPECT_TRUE(residentk_splitk_should_split(32));
  EXPECT_FALSE(residentk_splitk_should_split(kInt64Min));
}

// Never fewer splits for more keys; equal ratios of keys are equal steps, to the rounding.
TEST(SplitK, IsLogLinearBetweenItsAnchors) {
  for (int64_t n_keys = 1; n_keys < 2000; ++n_keys) {
    EXPECT_LE(residentk_splitk_policy(n_keys, 40, 16), residentk_splitk_policy(n_keys + 1, 40, 16));
  }
  const auto at = [](int64_t n_keys) {
    return static_cast<double>(residentk_splitk_policy(n_keys, 4000, 16));
  };
  EXPECT_EQ(at(128), 4000);
  EXPECT_EQ(at(1000), 8000);
  EXPECT_NEAR(at(512) - at(256), at(256) - at(128), 1.5);
  EXPECT_NEAR(at(128) - at(64), at(64) - at(32), 1.5);
}

TEST(PrefillGemm, TileAnchors) {
  EXPECT_TRUE(residentk_prefill_gemm_use_narrow_tile(5));
  EXPECT_TRUE(residentk_prefill_gemm_use_narrow_tile(31));
  EXPECT_FALSE(residentk_prefill_gemm_use_narrow_tile(32));
  EXPECT_FALSE(residentk_prefill_gemm_use_narrow_tile(256));
}

TEST(ContextBucket, EveryRequestGetsTheSmallestPowerOfTwoThatHoldsIt) {
  for (int64_t max_ctx = 1; max_ctx <= kResidentMaxContext; ++max_ctx) {
    const ContextBucket b = residentk_context_bucket(max_ctx);
    ASSERT_EQ(b.status, 600);
    ASSERT_TRUE(std::has_single_bit(static_cast<uint64_t>(b.bucket)));
    ASSERT_GE(b.bucket, std::max(max_ctx, kResidentDefaultContext));
    ASSERT_TRUE(b.bucket == kResidentDefaultContext || b.bucket / 2 < max_ctx);
    ASSERT_EQ(b.bucket - b.wasted_positions, max_ctx);
  }
  EXPECT_EQ(residentk_context_bucket(513).bucket, 1024);
  EXPECT_EQ(residentk_context_bucket(768).waste_fraction, 0.25);
  EXPECT_EQ(residentk_context_bucket(0).status, 601);
  EXPECT_EQ(residentk_context_bucket(kInt64Min).status, 601);
  EXPECT_EQ(residentk_context_bucket(65537).status, 602);
  EXPECT_EQ(residentk_context_bucket(kInt64Max).status, 602);
  EXPECT_EQ(residentk_context_bucket(kInt64Max).bucket, 0);
}

ResidentProbe qwen3_probe(HostFacts (*ask_host)()) {
  return session_probe(1024, 16, 8, 128, 3072, 28, 151936, ask_host);
}

TEST(SessionProbe, CostsAreReportedWhateverTheHost) {
  const struct {
    HostFacts (*ask_host)();
    int status;
  } hosts[] = {{[] { return HostFacts{false, false}; }, 604},
               {[] { return HostFacts{false, true}; }, 604},
               {[] { return HostFacts{true, false}; }, 605},
               {[] { return HostFacts{true, true}; }, 600}};
  for (const auto& host : hosts) {
    const ResidentProbe probe = qwen3_probe(host.ask_host);
    EXPECT_EQ(probe.kernels_compiled, host.ask_host().kernels_compiled);
    EXPECT_EQ(probe.device_present, host.ask_host().device_present);
    EXPECT_EQ(probe.session_possible, host.status == 600);
    EXPECT_EQ(probe.dispatch_budget, 171);
    EXPECT_EQ(probe.resident_f32_elems, 625410048);
    EXPECT_EQ(probe.status, host.status);
  }
}

TEST(SessionProbe, ARefusedShapeAsksNothingOfTheHost) {
  const auto ask_host = []() -> HostFacts {
    ADD_FAILURE() << "asked the host about a refused shape";
    return {true, true};
  };
  const auto expect_refusal = [](const ResidentProbe& probe, int status) {
    EXPECT_EQ(probe.status, status);
    EXPECT_FALSE(probe.kernels_compiled || probe.device_present || probe.session_possible);
    EXPECT_EQ(probe.dispatch_budget, 0);
    EXPECT_EQ(probe.resident_f32_elems, 0);
  };
  expect_refusal(session_probe(1024, 5, 2, 128, 3072, 2, 151936, ask_host), 603);
  expect_refusal(session_probe(1024, 16, 8, 128, 3072, 0, 151936, ask_host), 601);
  expect_refusal(session_probe(1024, 16, 8, 128, 3072, 28, 0, ask_host), 601);
  expect_refusal(session_probe(1024, 16, 8, 128, 3072, kInt64Max, 151936, ask_host), 602);
}

}  // namespace
}  // namespace ullage::residentk
