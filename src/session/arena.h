// One block of memory, cut into slices that were booked by name before it was allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ullage/plan.h"
#include "ullage/status.h"

namespace ullage::session {

inline constexpr int64_t kSliceAlignmentBytes = 64;

class ArenaPlan {
 public:
  // Books `count` elements of `element_bytes` for `purpose` and returns the slice's index. The
  // slice is rounded up to kSliceAlignmentBytes; negative sizes and sums past 2^63 are remembered
  // and refused by Arena::create.
  size_t book(std::string purpose, int64_t count, int64_t element_bytes);

  const std::vector<Booking>& bookings() const { return bookings_; }
  int64_t bytes() const { return bytes_; }  // the sum of the bookings
  bool overflowed() const { return overflowed_; }

 private:
  std::vector<Booking> bookings_;
  int64_t bytes_ = 0;
  bool overflowed_ = false;
};

class Arena {
 public:
  // Zeroed. 602 where the plan overflowed or the system refuses the bytes.
  static Result<Arena> create(const ArenaPlan& plan);

  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();

  template <class T>
  T* slice(size_t index) const {
    return reinterpret_cast<T*>(base_ + offsets_[index]);
  }

 private:
  Arena() = default;

  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<int64_t> offsets_;
};

}  // namespace ullage::session
