#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <vector>

#include "contract/extremes.h"
#include "ullage/lossk/contract.h"
#include "ullage/lossk/cross_entropy.h"

namespace ullage::lossk {
namespace {

// a * b * c <= ceiling in exact arithmetic, all at least 1. a * b fits 126 bits; once it is under
// the ceiling the product with c does too.
bool fits_exactly(int64_t a, int64_t b, int64_t c, int64_t ceiling) {
  const __int128 ab = static_cast<__int128>(a) * b;
  return ab <= ceiling && ab * c <= ceiling;
}

TEST(LossContract, ConstantsAreThePublishedOnes) {
  EXPECT_EQ(kLossMaxWorkCells, 70368744177664);
  EXPECT_EQ(kLossMaxLogitCells, 134217728);
  EXPECT_EQ(kLossTranscendentalFloor, 1e-9);
}

TEST(LossContract, NamesItsOwnCodesOnly) {
  EXPECT_EQ(loss_status_name(580), "ok");
  EXPECT_EQ(loss_status_name(581), "empty_dimension");
  EXPECT_EQ(loss_status_name(582), "length_mismatch");
  EXPECT_EQ(loss_status_name(583), "dimension_too_large");
  EXPECT_EQ(loss_status_name(584), "work_budget_exceeded");
  EXPECT_EQ(loss_status_name(585), "non_finite_scalar");
  EXPECT_EQ(loss_status_name(586), "target_id_out_of_range");
  EXPECT_EQ(loss_status_name(587), "chunk_exceeds_logit_budget");
  EXPECT_EQ(loss_status_name(588), "unknown_objective");
  for (int64_t code :
       {int64_t{579}, int64_t{589}, int64_t{600}, kInt64Min, kInt64Max, (int64_t{1} << 32) + 580}) {
    EXPECT_EQ(loss_status_name(code), "unknown_status") << code;
  }
}

TEST(LossContract, TheTwoBudgetsAreDifferentQuestions) {
  EXPECT_EQ(loss_dims_check(2048, 4096, 151936), 580);
  EXPECT_EQ(loss_chunk_check(2048, 151936), 587);
  EXPECT_EQ(loss_chunk_check(256, 151936), 580);
}

TEST(LossContract, DimensionsAtTheirCeilings) {
  EXPECT_EQ(loss_dims_check(1, 1, 1), 580);
  EXPECT_EQ(loss_dims_check(kLossMaxTokens, 1, kLossMaxVocab), 580);  // 2^46 exactly
  EXPECT_EQ(loss_dims_check(kLossMaxTokens, 2, kLossMaxVocab), 584);
  EXPECT_EQ(loss_dims_check(512, kLossMaxModelDim, kLossMaxVocab), 580);  // 2^46 exactly
  EXPECT_EQ(loss_dims_check(513, kLossMaxModelDim, kLossMaxVocab), 584);
  EXPECT_EQ(loss_dims_check(kLossMaxTokens + 1, 1, 1), 583);
  EXPECT_EQ(loss_dims_check(1, kLossMaxModelDim + 1, 1), 583);
  EXPECT_EQ(loss_dims_check(1, 1, kLossMaxVocab + 1), 583);
  EXPECT_EQ(loss_dims_check(0, 1, 1), 581);
  EXPECT_EQ(loss_dims_check(1, 0, 1), 581);
  EXPECT_EQ(loss_dims_check(1, 1, -1), 581);
  EXPECT_EQ(loss_dims_check(0, kInt64Max, 1), 581) << "an empty dimension is named first";
}

TEST(LossContract, ChunksAtTheLogitBudget) {
  EXPECT_EQ(loss_chunk_check(kLossMaxLogitCells, 1), 580);
  EXPECT_EQ(loss_chunk_check(kLossMaxLogitCells + 1, 1), 587);
  EXPECT_EQ(loss_chunk_check(128, kLossMaxVocab), 580);
  EXPECT_EQ(loss_chunk_check(129, kLossMaxVocab), 587);
  EXPECT_EQ(loss_chunk_check(1, kLossMaxVocab + 1), 583);
  EXPECT_EQ(loss_chunk_check(0, 1), 581);
  EXPECT_EQ(loss_chunk_check(1, 0), 581);
}

TEST(LossContract, NoExtremeOverflowsACheck) {
  for (int64_t a : kExtremes) {
    for (int64_t b : kExtremes) {
      const bool positive = a >= 1 && b >= 1;
      const double cells = loss_logit_cells(a, b);
      EXPECT_EQ(cells, positive ? static_cast<double>(a) * static_cast<double>(b) : -1.0);
      EXPECT_EQ(loss_chunk_check(a, b) == kLossOk,
                positive && b <= kLossMaxVocab && fits_exactly(a, b, 1, kLossMaxLogitCells))
          << a << ' ' << b;
      for (int64_t c : kExtremes) {
        const bool shape = positive && c >= 1 && a <= kLossMaxTokens && b <= kLossMaxModelDim &&
                           c <= kLossMaxVocab;
        EXPECT_EQ(loss_dims_check(a, b, c) == kLossOk,
                  shape && fits_exactly(a, b, c, kLossMaxWorkCells))
            << a << ' ' << b << ' ' << c;
        for (int64_t ceiling : kExtremes) {
          EXPECT_EQ(loss_work_fits(a, b, c, ceiling),
                    positive && c >= 1 && ceiling >= 1 && fits_exactly(a, b, c, ceiling))
              << a << ' ' << b << ' ' << c << ' ' << ceiling;
        }
      }
    }
  }
}

RC_GTEST_PROP(LossContractProperty, WorkFitsIsTheExactComparison, ()) {
  const auto factor = rc::gen::inRange<int64_t>(1, int64_t{1} << 24);
  const int64_t a = *factor, b = *factor, c = *factor;
  const __int128 product = static_cast<__int128>(a) * b * c;
  // At the product and one to either side, where the product itself is a ceiling that can be named.
  if (product < kInt64Max) {
    const auto exact = static_cast<int64_t>(product);
    RC_ASSERT(loss_work_fits(a, b, c, exact));
    RC_ASSERT(loss_work_fits(a, b, c, exact + 1));
    RC_ASSERT(!loss_work_fits(a, b, c, exact - 1));
  } else {
    RC_ASSERT(!loss_work_fits(a, b, c, kInt64Max - 1));
  }
}

TEST(LossContract, TargetsInRange) {
  const std::vector<int64_t> targets = {0, 8, 3, -1, 9};
  EXPECT_TRUE(loss_targets_in_range(targets, 3, 9));
  EXPECT_FALSE(loss_targets_in_range(targets, 4, 9)) << "-1 is not a mask";
  EXPECT_FALSE(loss_targets_in_range({targets.data() + 4, 1}, 1, 9));
  EXPECT_TRUE(loss_targets_in_range({targets.data() + 4, 1}, 1, 10));
  EXPECT_FALSE(loss_targets_in_range(targets, 6, 9)) << "fewer targets than tokens";
  EXPECT_FALSE(loss_targets_in_range(targets, -1, 9));
  EXPECT_FALSE(loss_targets_in_range(targets, kInt64Max, 9));
  EXPECT_FALSE(loss_targets_in_range(targets, kInt64Min, 9));
  EXPECT_TRUE(loss_targets_in_range({}, 0, 9));
}

TEST(LossContract, Scalars) {
  EXPECT_TRUE(loss_scalars_ok(0.0));
  EXPECT_TRUE(loss_scalars_ok(-1.7976931348623157e308));
  EXPECT_FALSE(loss_scalars_ok(std::nan("")));
  EXPECT_FALSE(loss_scalars_ok(INFINITY));
  EXPECT_FALSE(loss_scalars_ok(-INFINITY));
}

TEST(LossContract, ToleranceScalesWithMagnitudeAndWidth) {
  EXPECT_GE(loss_tol_for(0.0, 1), kLossTranscendentalFloor);
  EXPECT_DOUBLE_EQ(loss_tol_for(0.5, 10), loss_tol_for(-1.0, 10));
  EXPECT_DOUBLE_EQ(loss_tol_for(100.0, 10), 100 * loss_tol_for(1.0, 10));
  EXPECT_DOUBLE_EQ(loss_tol_for(1.0, 1 << 20) - loss_tol_for(1.0, 1 << 19),
                   std::ldexp(1.0, 19 - 52));
  EXPECT_EQ(loss_tol_for(std::nan(""), 10), 0.0);
  EXPECT_EQ(loss_tol_for(INFINITY, 10), 0.0);
  EXPECT_EQ(loss_tol_for(1.0, 0), 0.0);
  EXPECT_EQ(loss_tol_for(1.0, kInt64Min), 0.0);
  EXPECT_GT(loss_tol_for(1.0, kInt64Max), 1.0);
}

TEST(PeakLogitCells, HoldsEightTimesLess) {
  const PeakLogitCells peak = ce_peak_logit_cells(2048, 151936, 256);
  EXPECT_EQ(peak.chunked_cells, 38895616.0);
  EXPECT_EQ(peak.materialized_cells, 311164928.0);
  EXPECT_EQ(peak.ratio, 8.0);
  EXPECT_EQ(peak.n_chunks, 8);
  EXPECT_EQ(peak.status, 580);
}

TEST(PeakLogitCells, TheLastChunkIsShorterAndAChunkBeyondTheBatchHoldsTheBatch) {
  EXPECT_EQ(ce_peak_logit_cells(7, 10, 3).n_chunks, 3);
  EXPECT_EQ(ce_peak_logit_cells(6, 10, 3).n_chunks, 2);
  const PeakLogitCells whole = ce_peak_logit_cells(7, 10, 100);
  EXPECT_EQ(whole.chunked_cells, 70.0);
  EXPECT_EQ(whole.ratio, 1.0);
  EXPECT_EQ(whole.n_chunks, 1);
}

TEST(PeakLogitCells, RefusesWithZeros) {
  const struct {
    int64_t n_tok, vocab, chunk;
    int status;
  } cases[] = {{0, 9, 1, 581},         {1, 0, 1, 581},         {1, 9, 0, 581},
               {kInt64Max, 9, 1, 583}, {1, kInt64Max, 1, 583}, {2048, 151936, 2048, 587},
               {1, 9, kInt64Max, 587}, {kInt64Min, 9, 1, 581}};
  for (const auto& c : cases) {
    const PeakLogitCells peak = ce_peak_logit_cells(c.n_tok, c.vocab, c.chunk);
    EXPECT_EQ(peak.status, c.status) << c.n_tok << ' ' << c.vocab << ' ' << c.chunk;
    EXPECT_EQ(peak.chunked_cells, 0);
    EXPECT_EQ(peak.materialized_cells, 0);
    EXPECT_EQ(peak.ratio, 0);
    EXPECT_EQ(peak.n_chunks, 0);
  }
}

}  // namespace
}  // namespace ullage::lossk
