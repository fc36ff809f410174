#include "model/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <string>

namespace ullage::model {
namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr uint32_t kNoRank = ~uint32_t{0};
constexpr uint32_t kNone = ~uint32_t{0};  // no neighbour

constexpr uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

Result<Bpe> Bpe::create(const std::array<int32_t, 256>& byte_ids, std::span<const Merge> merges) {
  Bpe bpe;
  bpe.byte_ids_ = byte_ids;
  bpe.slots_.assign(std::bit_ceil(2 * merges.size() + 2), {kEmpty, kNoRank, kNoToken});
  bpe.hash_shift_ = 64 - std::countr_zero(bpe.slots_.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    Slot& slot = bpe.slots_[bpe.slot_of(merge.left, merge.right)];
    if (slot.pair != kEmpty) {
      return {kModelDuplicate, "merges " + std::to_string(slot.rank) + " and " +
                                   std::to_string(rank) + " join the same pair of tokens"};
    }
    slot = {pair_of(merge.left, merge.right), static_cast<uint32_t>(rank), merge.result};
  }
  return bpe;
}

size_t Bpe::slot_of(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  // Fibonacci hashing: 2^64 divided by the golden ratio spreads consecutive ids over the upper
  // bits.
  size_t at = (pair * 0x9e3779b97f4a7c15u) >> hash_shift_;
  while (slots_[at].pair != pair && slots_[at].pair != kEmpty) at = (at + 1) & (slots_.size() - 1);
  return at;
}

void Bpe::rank_pair(Scratch& scratch, uint32_t at) const {
  Symbol& symbol = scratch.symbols[at];
  symbol.rank = kNoRank;
  if (symbol.next == kNone) return;
  const Slot& slot = slots_[slot_of(symbol.id, scratch.symbols[symbol.next].id)];
  if (slot.rank == kNoRank) return;
  symbol.rank = slot.rank;
  symbol.result = slot.result;
  // Ordered by rank, then by position.
  scratch.queue.push_back(uint64_t{slot.rank} << 32 | at);
  std::push_heap(scratch.queue.begin(), scratch.queue.end(), std::greater<>());
}

size_t Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const {
  const auto length = static_cast<uint32_t>(piece.size());
  auto& [symbols, queue] = scratch;
  symbols.resize(length);
  queue.clear();
  for (uint32_t i = 0; i < length; ++i) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(piece[i])];
    if (id == kNoToken) return i;
    symbols[i] = {id, kNoRank, kNoToken, i == 0 ? kNone : i - 1, i + 1 == length ? kNone : i + 1};
  }
  for (uint32_t i = 0; i < length; ++i) rank_pair(scratch, i);

  while (!queue.empty()) {
    const uint64_t best = queue.front();
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    queue.pop_back();
    const auto at = static_cast<uint32_t>(best);
    Symbol& left = symbols[at];
    if (left.rank != best >> 32) continue;  // queued before a neighbour was joined to another
    Symbol& right = symbols[left.next];
    left.id = left.result;
    left.next = right.next;
    right.rank = kNoRank;
    if (left.next != kNone) symbols[left.next].previous = at;
    rank_pair(scratch, at);
    if (left.previous != kNone) rank_pair(scratch, left.previous);
  }
  for (uint32_t at = 0; at < length; at = symbols[at].next) ids.push_back(symbols[at].id);
  return piece.size();
}

}  // namespace ullage::model
