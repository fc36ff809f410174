#include "model/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "model/cursor.h"
#include "model/gguf_tensor_type.h"
#include "model/text.h"
#include "model/utf8.h"

namespace ullage::model {
namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint64_t kMaxTensorNameBytes = 63;
constexpr uint32_t kMaxDimensions = 4;
constexpr int64_t kDefaultAlignment = 32;
constexpr std::string_view kAlignmentKey = "general.alignment";

// The least bytes that one of them takes, which bounds how many a file can hold.
constexpr uint64_t kMinEntryBytes = 8 + 1 + 4 + 1;       // key, value type, value
constexpr uint64_t kMinTensorBytes = 8 + 1 + 4 + 4 + 8;  // name, dimensions, type, offset

class Reader {
 public:
  Reader(std::span<const std::byte> file, std::string_view origin)
      : file_(file), origin_(origin), cursor_(file, origin) {}

  Result<GgufFile> read() {
    read_header();
    for (uint64_t i = 0; i < n_entries_ && cursor_.ok(); ++i) read_entry();
    check_unique_keys();
    read_alignment();
    for (uint64_t i = 0; i < n_tensors_ && cursor_.ok(); ++i) read_tensor();
    if (cursor_.ok() && n_tensors_ > 0) lay_out();
    if (!cursor_.ok()) return cursor_.status();
    return std::move(result_);
  }

 private:
  void read_header() {
    const std::string_view magic = cursor_.text(std::min<uint64_t>(4, cursor_.left()), "magic");
    if (magic != kMagic) {
      // A file cut inside the magic is a cut file.
      cursor_.refuse(kMagic.starts_with(magic) ? kModelTruncated : kModelBadMagic, 0,
                     fmt::format("the file begins with {}, not with 'GGUF'", in_quotes(magic)));
    }
    result_.version = cursor_.u32("version");
    if (const uint32_t v = result_.version; cursor_.ok() && v != 2 && v != 3) {
      const uint32_t swapped = __builtin_bswap32(v);
      cursor_.refuse(kModelVersion, 4,
                     swapped == 2 || swapped == 3
                         ? fmt::format("big-endian GGUF version {}; little-endian is read", swapped)
                         : fmt::format("GGUF version {}; 2 and 3 are read", v));
    }
    n_tensors_ = read_count(kMinTensorBytes, "tensors");
    n_entries_ = read_count(kMinEntryBytes, "metadata pairs");
  }

  // A number of items of at least `item_bytes` each that are still to come.
  uint64_t read_count(uint64_t item_bytes, std::string_view what) {
    const uint64_t at = cursor_.offset();
    const uint64_t count = cursor_.u64(what);
    if (count > cursor_.left() / item_bytes) {
      cursor_.refuse(
          kModelCountExceedsFile, at,
          fmt::format("{} {} of at least {} bytes each, where the file has {} bytes left", count,
                      what, item_bytes, cursor_.left()));
    }
    return cursor_.ok() ? count : 0;
  }

  // A length and so many bytes.
  std::string_view read_string(std::string_view what) {
    return cursor_.text(cursor_.u64(what), what);
  }

  std::string read_name(uint64_t max_bytes, std::string_view what) {
    const uint64_t at = cursor_.offset();
    const std::string_view name = read_string(what);
    const bool usable =
        !name.empty() && name.size() <= max_bytes && utf8_valid_prefix_bytes(name) == name.size();
    if (!usable) {
      cursor_.refuse(kModelBadName, at,
                     fmt::format("the {} of {} bytes, {}, is not 1 to {} bytes of UTF-8", what,
                                 name.size(), in_quotes(name), max_bytes));
    }
    return std::string(name);
  }

  GgufType read_type() {
    const uint64_t at = cursor_.offset();
    const uint32_t type = cursor_.u32("value type");
    if (type > static_cast<uint32_t>(GgufType::kFloat64)) {
      cursor_.refuse(kModelBadValue, at, fmt::format("value type {}; 0 to 12 are known", type));
      return {};
    }
    return static_cast<GgufType>(type);
  }

  void read_entry() {
    GgufFile::Entry entry;
    entry.key = read_name(kMaxKeyBytes, "key");
    GgufValue& value = entry.value;
    value.type = read_type();
    if (value.type == GgufType::kArray) {
      const uint64_t at = cursor_.offset();
      value.is_array = true;
      value.type = read_type();
      if (value.type == GgufType::kArray) {
        cursor_.refuse(kModelBadValue, at,
                       fmt::format("key {}: an array of arrays is not read", in_quotes(entry.key)));
        return;
      }
      value.count = read_count(size_of(value.type), "array elements");
    }
    const uint64_t at = cursor_.offset();
    if (value.type == GgufType::kString && value.is_array) {
      for (uint64_t i = 0; i < value.count && cursor_.ok(); ++i) read_string("string");
      value.payload = file_.subspan(at, cursor_.offset() - at);
    } else if (value.type == GgufType::kString) {
      value.payload = std::as_bytes(std::span(read_string("string")));
    } else {
      value.payload = cursor_.take(value.count * size_of(value.type), "value");
    }
    if (value.type == GgufType::kBool) {
      const auto bad =
          std::ranges::find_if(value.payload, [](std::byte b) { return b > std::byte{1}; });
      if (bad != value.payload.end()) {
        cursor_.refuse(kModelBadValue, at + static_cast<uint64_t>(bad - value.payload.begin()),
                       fmt::format("key {}: a boolean of {}; 0 and 1 are known",
                                   in_quotes(entry.key), static_cast<int>(*bad)));
      }
    }
    if (cursor_.ok()) result_.metadata.push_back(std::move(entry));
  }

  void check_unique_keys() {
    std::ranges::sort(result_.metadata, {}, &GgufFile::Entry::key);
    const auto twice = std::ranges::adjacent_find(result_.metadata, {}, &GgufFile::Entry::key);
    if (twice != result_.metadata.end()) {
      cursor_.refuse(kModelDuplicate, 24, "key " + in_quotes(twice->key) + " appears twice");
    }
  }

  void read_alignment() {
    const GgufValue* value = result_.find(kAlignmentKey);
    if (value == nullptr) return;
    const int64_t alignment = value->integer().value_or(0);
    const bool usable = value->type == GgufType::kUint32 && alignment >= 8 &&
                        std::has_single_bit(static_cast<uint64_t>(alignment));
    if (!usable) {
      cursor_.refuse(kModelBadAlignment,
                     static_cast<uint64_t>(value->payload.data() - file_.data()),
                     fmt::format("{} is {}; a power of two from 8 is read, as uint32",
                                 kAlignmentKey, alignment));
      return;
    }
    alignment_ = static_cast<uint64_t>(alignment);
  }

  void read_tensor() {
    const uint64_t at = cursor_.offset();
    StoredTensor tensor;
    tensor.name = read_name(kMaxTensorNameBytes, "tensor name");
    if (!names_.insert(tensor.name).second) {
      cursor_.refuse(kModelDuplicate, at, "tensor " + in_quotes(tensor.name) + " appears twice");
    }
    const auto refuse = [&](StatusCode code, std::string_view why) {
      cursor_.refuse(code, at, fmt::format("tensor {} {}", in_quotes(tensor.name), why));
    };
    const uint32_t n_dimensions = cursor_.u32("number of dimensions");
    if (n_dimensions > kMaxDimensions) {
      return refuse(kModelTooManyDimensions, fmt::format("has {} dimensions; the format allows {}",
                                                         n_dimensions, kMaxDimensions));
    }
    for (uint32_t i = 0; i < n_dimensions; ++i) {  // innermost first in the file
      const uint64_t dimension = cursor_.u64("dimension");
      if (!std::in_range<int64_t>(dimension)) {
        return refuse(kModelProductOverflow, fmt::format("has a dimension of {}", dimension));
      }
      tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(dimension));
    }
    const uint32_t type = cursor_.u32("tensor type");
    offsets_.push_back(cursor_.u64("tensor offset"));
    if (!cursor_.ok()) return;
    const auto known = gguf_tensor_type(type);
    if (!known) return refuse(kModelTypeUnsupported, fmt::format("has the unknown type {}", type));
    tensor.type = *known;
    const int64_t row = tensor.shape.empty() ? 1 : tensor.shape.back();
    if (row % tensor.type.block_elements != 0) {
      return refuse(kModelBlockMisaligned,
                    fmt::format("has rows of {}, no multiple of the {}-element blocks of {}", row,
                                tensor.type.block_elements, tensor.type.name));
    }
    if (const Status status = measure(tensor, origin_); !status.ok()) {
      return refuse(status.code(), status.message());
    }
    result_.tensors.push_back(std::move(tensor));
  }

  uint64_t padded(uint64_t size) const { return (size + alignment_ - 1) / alignment_ * alignment_; }

  // Each tensor begins where the one before it ends, padded. The last needs no padding after it.
  void lay_out() {
    const uint64_t begin = padded(cursor_.offset());
    uint64_t running = 0;
    for (size_t i = 0; i < result_.tensors.size(); ++i) {
      StoredTensor& tensor = result_.tensors[i];
      const auto bytes = static_cast<uint64_t>(tensor.bytes);
      if (offsets_[i] != running) {
        cursor_.refuse(kModelLayout, begin,
                       fmt::format("tensor {} is at {} of the data section, where {} follows",
                                   in_quotes(tensor.name), offsets_[i], running));
        return;
      }
      if (begin + running > file_.size() || bytes > file_.size() - begin - running) {
        cursor_.refuse(kModelTruncated, begin + running,
                       fmt::format("tensor {} of {} bytes ends after the file of {}",
                                   in_quotes(tensor.name), bytes, file_.size()));
        return;
      }
      tensor.data = file_.data() + begin + running;
      running = padded(running + bytes);
    }
  }

  std::span<const std::byte> file_;
  std::string_view origin_;
  Cursor cursor_;
  GgufFile result_;
  uint64_t n_tensors_ = 0;
  uint64_t n_entries_ = 0;
  uint64_t alignment_ = kDefaultAlignment;
  std::vector<uint64_t> offsets_;  // of the tensors, into the data section
  std::set<std::string> names_;
};

}  // namespace

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto at = std::ranges::lower_bound(
      metadata, key, {}, [](const Entry& entry) { return std::string_view(entry.key); });
  return at != metadata.end() && at->key == key ? &at->value : nullptr;
}

Result<GgufFile> read_gguf(std::span<const std::byte> file, std::string_view origin) {
  return Reader(file, origin).read();
}

}  // namespace ullage::model
