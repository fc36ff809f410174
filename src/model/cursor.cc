#include "model/cursor.h"

#include <fmt/format.h>

namespace ullage::model {

std::span<const std::byte> Cursor::take(uint64_t count, std::string_view what) {
  if (!ok()) return {};
  if (count > left()) {
    refuse(kModelCountExceedsFile, offset_,
           fmt::format("{} of {} bytes, where the file has {} left", what, count, left()));
    return {};
  }
  const auto taken = bytes_.subspan(offset_, count);
  offset_ += count;
  return taken;
}

bool Cursor::can_read(uint64_t count, std::string_view what) {
  if (ok() && count > left()) {
    refuse(kModelTruncated, offset_,
           fmt::format("the file ends inside the {}, {} bytes of it short", what, count - left()));
  }
  return ok();
}

const Status& Cursor::refuse(StatusCode code, uint64_t offset, std::string_view why) {
  if (ok()) status_ = {code, fmt::format("{}: offset {}: {}", origin_, offset, why)};
  return status_;
}

}  // namespace ullage::model
