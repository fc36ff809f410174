// A file, memory-mapped for reading.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "ullage/status.h"

namespace ullage::model {

// The pages come from the file as they are touched. A file that another process shortens while it
// is mapped ends in SIGBUS, as with every mapped file: replace model files by renaming.
class MappedFile {
 public:
  // 641 where the path is missing, unreadable or not a regular file.
  static Result<MappedFile> open(const std::filesystem::path& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

}  // namespace ullage::model
