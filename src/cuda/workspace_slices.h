// A workspace in slices, each booked under what it is for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "ullage/plan.h"

namespace ullage::lossk::cuda {

// Hands out the workspace in the order of booking; with a base of nullptr it only books. One walk
// serves the plan and the run, so what is promised is what is used.
class WorkspaceSlices {
 public:
  WorkspaceSlices(std::byte* base, std::vector<Booking>* bookings)
      : base_(base), bookings_(bookings) {}

  template <class T>
  void take(T*& pointer, std::string_view purpose, int64_t bytes) {
    constexpr int64_t kAlignBytes = 256;
    if (bytes == 0) return;
    const int64_t rounded = (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    hand_out(pointer, rounded);
    if (bookings_ != nullptr) bookings_->push_back({std::string(purpose), rounded});
  }
  // One block for parts that are booked elsewhere.
  template <class T>
  void take_booked(T*& pointer, const std::vector<Booking>& parts, int64_t bytes) {
    hand_out(pointer, bytes);
    if (bookings_ != nullptr) bookings_->insert(bookings_->end(), parts.begin(), parts.end());
  }
  // Sticks at the largest value: a sum too large never reads as small.
  int64_t used() const { return used_; }

 private:
  template <class T>
  void hand_out(T*& pointer, int64_t bytes) {
    if (base_ != nullptr) pointer = reinterpret_cast<T*>(base_ + used_);
    if (__builtin_add_overflow(used_, bytes, &used_)) {
      used_ = std::numeric_limits<int64_t>::max();
    }
  }

  std::byte* base_;
  std::vector<Booking>* bookings_;
  int64_t used_ = 0;
};

}  // namespace ullage::lossk::cuda
