// Model files as bytes, for tests: a safetensors file from its header's text, a GGUF file field by
// field. Nothing is checked here, so that anything malformed can be said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace ullage::model {

class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    char raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    bytes_.append(raw, sizeof(T));
    return *this;
  }
  Bytes& u32(uint32_t value) { return put(value); }
  Bytes& u64(uint64_t value) { return put(value); }
  Bytes& raw(std::string_view text) {
    bytes_ += text;
    return *this;
  }
  // GGUF's string: a length and so many bytes.
  Bytes& string(std::string_view text) { return u64(text.size()).raw(text); }
  Bytes& zeros(size_t count) {
    bytes_.append(count, '\0');
    return *this;
  }
  Bytes& pad_to(size_t alignment) { return zeros((alignment - size() % alignment) % alignment); }

  size_t size() const { return bytes_.size(); }
  const std::string& str() const { return bytes_; }

 private:
  std::string bytes_;
};

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

inline std::string safetensors(std::string_view header, size_t buffer_bytes = 0) {
  return Bytes().u64(header.size()).raw(header).zeros(buffer_bytes).str();
}

// Numbers of GGUF's value and tensor types.
inline constexpr uint32_t kTypeU32 = 4, kTypeF32 = 6, kTypeBool = 7, kTypeString = 8,
                          kTypeArray = 9;
inline constexpr uint32_t kTensorF32 = 0, kTensorQ8_0 = 8;

// The 24 bytes that begin a GGUF file.
inline Bytes gguf_header(uint64_t n_tensors, uint64_t n_entries, uint32_t version = 3) {
  return Bytes().raw("GGUF").u32(version).u64(n_tensors).u64(n_entries);
}

}  // namespace ullage::model
