// A file never makes its reader allocate more than its own size justifies. Every allocation of this
// program is metered.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "model/byte_builder.h"
#include "model/config_gguf.h"
#include "model/config_json.h"
#include "model/gguf.h"
#include "model/json_document.h"
#include "model/safetensors.h"

namespace {

std::atomic<size_t> live_bytes = 0;
std::atomic<size_t> peak_bytes = 0;

// The size stands in front of each block.
constexpr size_t kFront = alignof(std::max_align_t);

void* metered(size_t size) {
  auto* block = static_cast<size_t*>(std::malloc(size + kFront));
  if (block == nullptr) throw std::bad_alloc();
  *block = size;
  const size_t live = live_bytes.fetch_add(size) + size;
  size_t peak = peak_bytes.load();
  while (live > peak && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
  return reinterpret_cast<char*>(block) + kFront;
}

void unmetered(void* pointer) {
  if (pointer == nullptr) return;
  auto* block = reinterpret_cast<size_t*>(static_cast<char*>(pointer) - kFront);
  live_bytes.fetch_sub(*block);
  std::free(block);
}

}  // namespace

void* operator new(size_t size) { return metered(size); }
void* operator new[](size_t size) { return metered(size); }
void operator delete(void* pointer) noexcept { unmetered(pointer); }
void operator delete[](void* pointer) noexcept { unmetered(pointer); }
void operator delete(void* pointer, size_t) noexcept { unmetered(pointer); }
void operator delete[](void* pointer, size_t) noexcept { unmetered(pointer); }

namespace ullage::model {
namespace {

// The most that was allocated at once while `work` ran.
template <class Work>
size_t peak_of(Work work) {
  const size_t before = live_bytes;
  peak_bytes = before;
  work();
  return peak_bytes - before;
}

constexpr size_t kMessageBytes = 16 << 10;  // for a refusal, whatever the file
// A tree or a table of the smallest items there are, in a vector that doubles.
constexpr size_t kBytesPerByte = 64;

TEST(BoundedMemory, MetersThisProgram) {
  const size_t peak = peak_of([] {
    std::string text(100'000, 'x');
    ASSERT_EQ(text[5], 'x');
  });
  EXPECT_GE(peak, 100'000u);
  EXPECT_LE(peak, 101'000u);
}

TEST(BoundedMemory, OfClaimsThatAFileCannotKeep) {
  const std::string ggufs[] = {
      gguf_header(0, uint64_t{1} << 62).str(),
      gguf_header(uint64_t{1} << 62, 0).str(),
      gguf_header(0, 1).string("k").u32(kTypeString).u64(uint64_t{1} << 62).zeros(64).str(),
      gguf_header(0, 1).string("k").u32(kTypeArray).u32(0).u64(uint64_t{1} << 62).zeros(64).str(),
      gguf_header(0, 1).u64(uint64_t{1} << 62).zeros(64).str(),
      gguf_header(1, 0).u64(uint64_t{1} << 62).zeros(64).str(),
      gguf_header(1, 0).string("t").u32(UINT32_MAX).zeros(64).str(),
  };
  for (const std::string& file : ggufs) {
    const size_t peak = peak_of([&] { EXPECT_FALSE(read_gguf(as_bytes(file), "x")); });
    EXPECT_LE(peak, kMessageBytes) << file.size();
  }
  const std::string tensors[] = {
      std::string(8, '\xff'),
      Bytes().u64(100'000'000).zeros(64).str(),
      safetensors(R"({"a":{"dtype":"U8","shape":[4611686018427387904],"data_offsets":[0,0]}})"),
      safetensors("{\"a\":" + std::string(100'000, '[')),
  };
  for (const std::string& file : tensors) {
    const size_t peak = peak_of([&] { EXPECT_FALSE(read_safetensors(as_bytes(file), "x")); });
    EXPECT_LE(peak, kMessageBytes) << file.size();
  }
  const std::string deep(100'000, '[');
  EXPECT_LE(peak_of([&] { EXPECT_FALSE(parse_json(deep, "x")); }), kMessageBytes);
}

TEST(BoundedMemory, OfManySmallThings) {
  std::string json = "[0";
  while (json.size() < 1'000'000) json += ",0";
  json += "]";
  EXPECT_LE(peak_of([&] { EXPECT_TRUE(parse_json(json, "x")); }), kBytesPerByte * json.size());
  std::string lists = "[[]";
  while (lists.size() < 1'000'000) lists += ",{}";
  lists += "]";
  EXPECT_LE(peak_of([&] { EXPECT_TRUE(parse_json(lists, "x")); }), kBytesPerByte * lists.size());

  Bytes entries = gguf_header(0, 40'000);
  for (int i = 0; i < 40'000; ++i) entries.string(std::to_string(i)).u32(0).put(uint8_t{0});
  EXPECT_LE(peak_of([&] { EXPECT_TRUE(read_gguf(as_bytes(entries.str()), "x")); }),
            kBytesPerByte * entries.size());

  Bytes tensors = gguf_header(40'000, 0);
  for (int i = 0; i < 40'000; ++i) {
    tensors.string(std::to_string(i)).u32(1).u64(0).u32(kTensorF32).u64(0);
  }
  tensors.pad_to(32);
  EXPECT_LE(peak_of([&] { EXPECT_TRUE(read_gguf(as_bytes(tensors.str()), "x")); }),
            kBytesPerByte * tensors.size());
}

}  // namespace
}  // namespace ullage::model
