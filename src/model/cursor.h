// A bounded walk through little-endian bytes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "ullage/status.h"

namespace ullage::model {

static_assert(std::endian::native == std::endian::little, "model files are read in place");

// The first failed read is kept, with its offset; it and all later reads give zeros and empty
// views.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, std::string_view origin)
      : bytes_(bytes), origin_(origin) {}

  // `what` names the field in the error. 642 where the file ends inside it.
  uint32_t u32(std::string_view what) { return fixed<uint32_t>(what); }
  uint64_t u64(std::string_view what) { return fixed<uint64_t>(what); }

  // The next `count` bytes, as declared by the file itself: 645 where it has not so many left.
  std::span<const std::byte> take(uint64_t count, std::string_view what);
  std::string_view text(uint64_t count, std::string_view what) {
    const auto bytes = take(count, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  uint64_t offset() const { return offset_; }
  uint64_t left() const { return bytes_.size() - offset_; }
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

  // Records a refusal at `offset`, unless there is one already; returns the first.
  const Status& refuse(StatusCode code, uint64_t offset, std::string_view why);

 private:
  template <class T>
  T fixed(std::string_view what) {
    T value{};
    if (can_read(sizeof(T), what)) {
      std::memcpy(&value, bytes_.data() + offset_, sizeof(T));
      offset_ += sizeof(T);
    }
    return value;
  }
  bool can_read(uint64_t count, std::string_view what);

  std::span<const std::byte> bytes_;
  std::string_view origin_;
  uint64_t offset_ = 0;
  Status status_ = kModelOk;
};

}  // namespace ullage::model
