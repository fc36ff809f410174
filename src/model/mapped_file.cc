#include "model/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "model/text.h"

namespace ullage::model {
namespace {

Status unreadable(const std::filesystem::path& path, int error) {
  return {kModelUnreadable,
          fmt::format("{}: {}", in_quotes(path.string()), std::generic_category().message(error))};
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: a FIFO answers at once, and is then refused, instead of waiting for a writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat info;
  if (file.fd < 0 || ::fstat(file.fd, &info) != 0) return unreadable(path, errno);
  if (!S_ISREG(info.st_mode)) {
    return {kModelUnreadable, in_quotes(path.string()) + " is not a regular file"};
  }
  if (info.st_size == 0) return MappedFile({});
  const auto size = static_cast<size_t>(info.st_size);
  void* const base = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (base == MAP_FAILED) return unreadable(path, errno);
  return MappedFile({static_cast<const std::byte*>(base), size});
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : bytes_(std::exchange(other.bytes_, std::span<const std::byte>())) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace ullage::model
