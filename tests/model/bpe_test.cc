#include "model/bpe.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <string>
#include <utility>

namespace ullage::model {
namespace {

// The bytes 'a' to 'd' are tokens 0 to 3; other bytes have none.
std::array<int32_t, 256> four_letters() {
  std::array<int32_t, 256> ids;
  ids.fill(Bpe::kNoToken);
  for (int32_t i = 0; i < 4; ++i) ids[static_cast<size_t>('a' + i)] = i;
  return ids;
}

std::vector<int32_t> encode(const Bpe& bpe, std::string_view piece) {
  Bpe::Scratch scratch;
  std::vector<int32_t> ids;
  EXPECT_EQ(bpe.encode(piece, scratch, ids), piece.size());
  return ids;
}

// The definition, word for word.
std::vector<int32_t> join_until_nothing_has_a_rank(std::vector<int32_t> ids,
                                                   const std::vector<Bpe::Merge>& merges) {
  std::map<std::pair<int32_t, int32_t>, size_t> ranks;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    ranks[{merges[rank].left, merges[rank].right}] = rank;
  }
  while (true) {
    size_t best = merges.size();
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto found = ranks.find({ids[i], ids[i + 1]});
      if (found != ranks.end() && found->second < best) {
        best = found->second;
        at = i;
      }
    }
    if (best == merges.size()) return ids;
    ids[at] = merges[best].result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

RC_GTEST_PROP(Bpe, MatchesTheDefinition, ()) {
  // Each merge joins two earlier tokens into a new one; then the ranks are shuffled.
  std::vector<Bpe::Merge> merges;
  std::map<std::pair<int32_t, int32_t>, bool> seen;
  const int n_merges = *rc::gen::inRange(0, 40);
  int32_t n_tokens = 4;
  for (int i = 0; i < n_merges; ++i) {
    const int32_t left = *rc::gen::inRange(0, n_tokens);
    const int32_t right = *rc::gen::inRange(0, n_tokens);
    if (std::exchange(seen[{left, right}], true)) continue;
    merges.push_back({left, right, n_tokens++});
  }
  for (size_t i = merges.size(); i > 1; --i) {
    std::swap(merges[i - 1], merges[*rc::gen::inRange<size_t>(0, i)]);
  }
  const auto bpe = Bpe::create(four_letters(), merges);
  RC_ASSERT(bpe.ok());
  const auto letters = *rc::gen::container<std::string>(rc::gen::inRange('a', 'e'));
  std::vector<int32_t> ids;
  for (const char c : letters) ids.push_back(c - 'a');
  RC_ASSERT(encode(*bpe, letters) == join_until_nothing_has_a_rank(ids, merges));
}

TEST(Bpe, JoinsTheLeftmostOfEquals) {
  const auto bpe = Bpe::create(four_letters(), std::vector<Bpe::Merge>{{0, 0, 4}, {4, 4, 5}});
  ASSERT_TRUE(bpe);
  EXPECT_EQ(encode(*bpe, ""), (std::vector<int32_t>{}));
  EXPECT_EQ(encode(*bpe, "aaa"), (std::vector<int32_t>{4, 0}));
  EXPECT_EQ(encode(*bpe, "aaaaaaa"), (std::vector<int32_t>{5, 4, 0}));
}

TEST(Bpe, NamesTheFirstByteWithoutATokenAndAppendsNothing) {
  const auto bpe = Bpe::create(four_letters(), {});
  ASSERT_TRUE(bpe);
  Bpe::Scratch scratch;
  std::vector<int32_t> ids = {7};
  EXPECT_EQ(bpe->encode("abxcy", scratch, ids), 2);
  EXPECT_EQ(ids, (std::vector<int32_t>{7}));
}

TEST(Bpe, RefusesAPairWithTwoRanks) {
  const std::vector<Bpe::Merge> merges = {{0, 1, 4}, {1, 0, 5}, {0, 1, 6}};
  const auto bpe = Bpe::create(four_letters(), merges);
  EXPECT_EQ(bpe.status().code(), kModelDuplicate);
  EXPECT_EQ(bpe.status().message(), "merges 0 and 2 join the same pair of tokens");
}

// A quadratic loop would take over 10^11 steps.
TEST(Bpe, EncodesAWordOfAMegabyte) {
  std::vector<Bpe::Merge> merges;
  for (int32_t i = 0; i < 10; ++i)
    merges.push_back({i == 0 ? 0 : 3 + i, i == 0 ? 0 : 3 + i, 4 + i});
  const auto bpe = Bpe::create(four_letters(), merges);
  ASSERT_TRUE(bpe);
  EXPECT_EQ(encode(*bpe, std::string(1 << 20, 'a')), std::vector<int32_t>(1 << 10, 13));
}

}  // namespace
}  // namespace ullage::model
