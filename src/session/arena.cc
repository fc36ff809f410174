#include "session/arena.h"

#include <sys/mman.h>

#include <utility>

namespace ullage::session {

size_t ArenaPlan::book(std::string purpose, int64_t count, int64_t element_bytes) {
  int64_t bytes = 0;
  int64_t total = 0;
  const bool fits = count >= 0 && element_bytes >= 0 &&
                    !__builtin_mul_overflow(count, element_bytes, &bytes) &&
                    !__builtin_add_overflow(bytes, kSliceAlignmentBytes - 1, &bytes);
  bytes -= bytes % kSliceAlignmentBytes;
  if (!fits || __builtin_add_overflow(bytes_, bytes, &total)) {
    overflowed_ = true;
    bytes = 0;
    total = bytes_;
  }
  bytes_ = total;
  bookings_.push_back({std::move(purpose), bytes});
  return bookings_.size() - 1;
}

Result<Arena> Arena::create(const ArenaPlan& plan) {
  if (plan.overflowed()) {
    return Status(kResidentDimensionTooLarge, "the session's memory does not fit 63 bits");
  }
  Arena arena;
  int64_t offset = 0;
  for (const Booking& booking : plan.bookings()) {
    arena.offsets_.push_back(offset);
    offset += booking.bytes;
  }
  if (offset == 0) return arena;
  // mmap gives zeroed pages that cost nothing until they are touched.
  void* memory = mmap(nullptr, static_cast<size_t>(offset), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status(kResidentDimensionTooLarge,
                  "the system refuses the session's " + std::to_string(offset) + " bytes");
  }
  arena.base_ = static_cast<std::byte*>(memory);
  arena.bytes_ = offset;
  return arena;
}

Arena::Arena(Arena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      offsets_(std::move(other.offsets_)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(offsets_, other.offsets_);
  return *this;
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes_));
}

}  // namespace ullage::session
