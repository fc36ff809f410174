#include "model/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "model/cursor.h"
#include "model/json_document.h"
#include "model/text.h"

namespace ullage::model {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int kMaxHeaderDepth = 3;                 // header, entry, shape

constexpr auto kTypes = std::to_array<StoredType>({
    {"BOOL", 1, 1, {}},
    {"F4", 2, 1, {}},
    {"F6_E2M3", 4, 3, {}},
    {"F6_E3M2", 4, 3, {}},
    {"U8", 1, 1, {}},
    {"I8", 1, 1, {}},
    {"F8_E5M2", 1, 1, {}},
    {"F8_E4M3", 1, 1, {}},
    {"F8_E8M0", 1, 1, {}},
    {"F8_E4M3FNUZ", 1, 1, {}},
    {"F8_E5M2FNUZ", 1, 1, {}},
    {"I16", 1, 2, {}},
    {"U16", 1, 2, {}},
    {"F16", 1, 2, ElementType::kF16},
    {"BF16", 1, 2, ElementType::kBF16},
    {"I32", 1, 4, {}},
    {"U32", 1, 4, {}},
    {"F32", 1, 4, ElementType::kF32},
    {"C64", 1, 8, {}},
    {"F64", 1, 8, ElementType::kF64},
    {"I64", 1, 8, {}},
    {"U64", 1, 8, {}},
});

// One file being read; its members say what went wrong where.
class Reader {
 public:
  Reader(std::span<const std::byte> file, std::string_view origin) : file_(file), origin_(origin) {}

  Result<std::vector<StoredTensor>> read() {
    Cursor cursor(file_, origin_);
    const uint64_t header_bytes = cursor.u64("header length");
    if (!cursor.ok()) return cursor.status();
    if (header_bytes > kMaxHeaderBytes) {
      return refuse(kModelCountExceedsFile,
                    fmt::format("offset 0: header length {} is above the format's limit of {}",
                                header_bytes, kMaxHeaderBytes));
    }
    const std::string_view header = cursor.text(header_bytes, "header");
    if (!cursor.ok()) return cursor.status();
    if (!header.starts_with('{')) {
      return refuse(kModelBadJson, fmt::format("offset 8: the header of {} bytes begins with {}, "
                                               "not with '{{'",
                                               header_bytes, in_quotes(header.substr(0, 1))));
    }
    const auto json = parse_json(header, origin_, {.max_depth = kMaxHeaderDepth});
    if (!json) return json.status();
    buffer_ = file_.subspan(8 + header_bytes);

    std::vector<Placed> placed;
    for (const JsonMember& member : *json->get<JsonValue::Object>()) {
      const Status status =
          member.key == "__metadata__" ? check_metadata(member.value) : read_entry(member, placed);
      if (!status.ok()) return status;
    }
    return lay_out(std::move(placed));
  }

 private:
  struct Placed {
    StoredTensor tensor;
    int64_t begin = 0;
    int64_t end = 0;
  };

  Status refuse(StatusCode code, std::string_view why) const {
    return {code, fmt::format("{}: {}", origin_, why)};
  }
  Status refuse_tensor(StatusCode code, std::string_view name, std::string_view why) const {
    return refuse(code, fmt::format("tensor {}: {}", in_quotes(name), why));
  }

  Status check_metadata(const JsonValue& metadata) const {
    const auto* members = metadata.get<JsonValue::Object>();
    if (members == nullptr) {
      return refuse(kModelBadJson, "__metadata__ is " + describe(metadata) + ", not an object");
    }
    for (const auto& [key, value] : *members) {
      if (value.get<std::string>() == nullptr) {
        return refuse(kModelBadJson, fmt::format("__metadata__ {} is {}, not a string",
                                                 in_quotes(key), describe(value)));
      }
    }
    return kModelOk;
  }

  Status read_entry(const JsonMember& member, std::vector<Placed>& placed) const {
    const std::string& name = member.key;
    if (name.empty()) return refuse(kModelBadName, "a tensor's name is empty");
    const auto* fields = member.value.get<JsonValue::Object>();
    const JsonValue* dtype = member.value.find("dtype");
    const JsonValue* shape = member.value.find("shape");
    const JsonValue* offsets = member.value.find("data_offsets");
    if (fields == nullptr || fields->size() != 3 || !dtype || !shape || !offsets) {
      return refuse_tensor(kModelBadJson, name,
                           "an entry has dtype, shape and data_offsets and nothing else");
    }
    const auto* type_name = dtype->get<std::string>();
    if (type_name == nullptr) {
      return refuse_tensor(kModelBadJson, name, "dtype is " + describe(*dtype) + ", not a string");
    }
    const auto* type = std::ranges::find(kTypes, *type_name, &StoredType::name);
    if (type == kTypes.end()) {
      return refuse_tensor(kModelTypeUnsupported, name,
                           fmt::format("dtype {} is not known; read are F64, F32, F16 and BF16",
                                       in_quotes(*type_name)));
    }
    Placed entry;
    entry.tensor.name = name;
    entry.tensor.type = *type;
    std::vector<int64_t> span;
    if (Status status = read_sizes(name, "shape", *shape, entry.tensor.shape); !status.ok()) {
      return status;
    }
    if (Status status = read_sizes(name, "data_offsets", *offsets, span); !status.ok()) {
      return status;
    }
    if (Status status = measure(entry.tensor, origin_); !status.ok()) return status;
    if (span.size() != 2 || span[1] < span[0] || span[1] - span[0] != entry.tensor.bytes) {
      return refuse_tensor(
          kModelLayout, name,
          fmt::format("data_offsets {} do not span the {} bytes of {} {}", describe_shape(span),
                      entry.tensor.bytes, type->name, describe_shape(entry.tensor.shape)));
    }
    if (static_cast<uint64_t>(span[1]) > buffer_.size()) {
      return refuse_tensor(
          kModelTruncated, name,
          fmt::format("ends at byte {} of a buffer of {}", span[1], buffer_.size()));
    }
    entry.begin = span[0];
    entry.end = span[1];
    entry.tensor.data = buffer_.data() + entry.begin;
    placed.push_back(std::move(entry));
    return kModelOk;
  }

  // A list of integers >= 0.
  Status read_sizes(std::string_view name, std::string_view key, const JsonValue& list,
                    std::vector<int64_t>& out) const {
    const auto* items = list.get<JsonValue::Array>();
    if (items == nullptr) {
      return refuse_tensor(kModelBadJson, name,
                           fmt::format("{} is {}, not an array", key, describe(list)));
    }
    for (const JsonValue& item : *items) {
      const auto* size = item.get<int64_t>();
      if (size == nullptr || *size < 0) {
        return refuse_tensor(
            kModelBadJson, name,
            fmt::format("{} holds {}; sizes are integers from 0 to 2^63 - 1", key, describe(item)));
      }
      out.push_back(*size);
    }
    return kModelOk;
  }

  // Tensors in the order of the buffer, which they cover exactly.
  Result<std::vector<StoredTensor>> lay_out(std::vector<Placed> placed) const {
    std::ranges::sort(placed, {}, [](const Placed& p) { return std::pair(p.begin, p.end); });
    std::vector<StoredTensor> tensors;
    int64_t covered = 0;
    for (Placed& entry : placed) {
      if (entry.begin != covered) {
        return refuse_tensor(
            kModelLayout, entry.tensor.name,
            fmt::format("begins at byte {} of the buffer, {} where byte {} follows", entry.begin,
                        entry.begin < covered ? "an overlap" : "a hole", covered));
      }
      covered = entry.end;
      tensors.push_back(std::move(entry.tensor));
    }
    if (static_cast<uint64_t>(covered) != buffer_.size()) {
      return refuse(kModelLayout, fmt::format("tensors cover {} bytes of a buffer of {}", covered,
                                              buffer_.size()));
    }
    return tensors;
  }

  std::span<const std::byte> file_;
  std::string_view origin_;
  std::span<const std::byte> buffer_;
};

}  // namespace

Result<std::vector<StoredTensor>> read_safetensors(std::span<const std::byte> file,
                                                   std::string_view origin) {
  return Reader(file, origin).read();
}

}  // namespace ullage::model
