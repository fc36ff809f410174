// Byte-pair encoding: the pair of neighbouring symbols with the lowest rank is joined, the leftmost
// of equals first, until no pair has a rank (Sennrich et al., https://arxiv.org/abs/1508.07909).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "ullage/status.h"

namespace ullage::model {

class Bpe {
 public:
  struct Merge {
    int32_t left, right, result;  // ids >= 0
  };
  static constexpr int32_t kNoToken = -1;

  // `byte_ids`: byte -> its id or kNoToken. `merges`: by rank. Error 649: a pair with two ranks.
  static Result<Bpe> create(const std::array<int32_t, 256>& byte_ids,
                            std::span<const Merge> merges);

  // One symbol of a piece, in a list linked by positions in the piece.
  struct Symbol {
    int32_t id;
    uint32_t rank;   // of the merge with the next symbol; kNoRank: none, or this symbol is gone
    int32_t result;  // of that merge
    uint32_t previous, next;
  };
  // Room that encode reuses from one piece to the next.
  struct Scratch {
    std::vector<Symbol> symbols;
    std::vector<uint64_t> queue;
  };

  // Appends the ids of `piece` (under 2^32 - 1 bytes), in O(n log n). Returns piece.size(), or the
  // offset of the first byte that has no id and then appends nothing.
  size_t encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  // Open addressing with linear probing, at most half full.
  struct Slot {
    uint64_t pair;  // left id in the upper half, right id in the lower; kEmpty: none
    uint32_t rank;
    int32_t result;
  };
  // The place of a pair: its slot, or the empty one where it would go.
  size_t slot_of(int32_t left, int32_t right) const;
  // Looks up the merge of the symbol at `at` with its next one, and queues it.
  void rank_pair(Scratch& scratch, uint32_t at) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<Slot> slots_;  // a power of two of them
  int hash_shift_ = 0;       // 64 - log2(slots_.size())
};

}  // namespace ullage::model
