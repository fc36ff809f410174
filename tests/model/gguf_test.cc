#include "model/gguf.h"

#include <gtest/gtest.h>

#include <string>

#include "model/byte_builder.h"
#include "model/refusal.h"

namespace ullage::model {
namespace {

Result<GgufFile> read(const Bytes& file) { return read_gguf(as_bytes(file.str()), "x.gguf"); }

struct Tensor {
  std::string name = "t";
  std::vector<uint64_t> dimensions = {1};  // innermost first, as in the file
  uint32_t type = kTensorF32;
  uint64_t offset = 0;
};

Bytes& operator<<(Bytes& file, const Tensor& tensor) {
  file.string(tensor.name).u32(static_cast<uint32_t>(tensor.dimensions.size()));
  for (const uint64_t dimension : tensor.dimensions) file.u64(dimension);
  return file.u32(tensor.type).u64(tensor.offset);
}

// A file of one tensor, with so many bytes of data.
Bytes one(const Tensor& tensor, size_t data_bytes = 32) {
  Bytes file = gguf_header(1, 0);
  file << tensor;
  return file.pad_to(32).zeros(data_bytes);
}

// A file of one metadata pair: key, type and whatever `value` holds.
Bytes entry(std::string_view key, uint32_t type, const Bytes& value) {
  return gguf_header(0, 1).string(key).u32(type).raw(value.str());
}

// Every value type, two tensors and an alignment of its own.
Bytes sample() {
  Bytes file = gguf_header(2, 14, 3);
  file.string("u8").u32(0).put(uint8_t{200});
  file.string("i8").u32(1).put(int8_t{-3});
  file.string("u16").u32(2).put(uint16_t{60000});
  file.string("i16").u32(3).put(int16_t{-300});
  file.string("u32").u32(4).put(uint32_t{4000000000});
  file.string("i32").u32(5).put(int32_t{-70000});
  file.string("f32").u32(6).put(1.5f);
  file.string("bool").u32(7).put(uint8_t{1});
  file.string("string").u32(8).string("caf\xc3\xa9");
  file.string("u64").u32(10).u64(uint64_t{1} << 40);
  file.string("i64").u32(11).put(int64_t{-5});
  file.string("f64").u32(12).put(0.1);
  file.string("list")
      .u32(kTypeArray)
      .u32(kTypeString)
      .u64(3)
      .string("a")
      .string("")
      .string("\xff\xfe");
  file.string("general.alignment").u32(kTypeU32).u32(64);
  file << Tensor{.name = "x", .dimensions = {3, 2}} << Tensor{.name = "y", .offset = 64};
  return file.pad_to(64).zeros(24).zeros(40).put(2.5f);
}

TEST(Gguf, ReadsEveryValueType) {
  const Bytes bytes = sample();
  const auto file = read(bytes);
  ASSERT_TRUE(file) << file.status().to_string();
  EXPECT_EQ(file->version, 3u);
  EXPECT_EQ(file->find("u8")->integer(), 200);
  EXPECT_EQ(file->find("i8")->integer(), -3);
  EXPECT_EQ(file->find("u16")->integer(), 60000);
  EXPECT_EQ(file->find("i16")->integer(), -300);
  EXPECT_EQ(file->find("u32")->integer(), 4000000000);
  EXPECT_EQ(file->find("i32")->integer(), -70000);
  EXPECT_EQ(file->find("u64")->integer(), int64_t{1} << 40);
  EXPECT_EQ(file->find("i64")->integer(), -5);
  EXPECT_EQ(file->find("f32")->real(), 1.5);
  EXPECT_EQ(file->find("f64")->real(), 0.1);
  EXPECT_EQ(file->find("bool")->boolean(), true);
  EXPECT_EQ(file->find("string")->string(), "caf\xc3\xa9");
  EXPECT_EQ(file->find("nothing"), nullptr);
  // G12: a string of a list, a token, keeps whatever bytes it has.
  EXPECT_EQ(file->find("list")->strings(), (std::vector<std::string_view>{"a", "", "\xff\xfe"}));
  // A value of one kind is nothing of another.
  EXPECT_EQ(file->find("bool")->integer(), std::nullopt);
  EXPECT_EQ(file->find("f32")->integer(), std::nullopt);
  EXPECT_EQ(file->find("u8")->real(), std::nullopt);
  EXPECT_EQ(file->find("string")->strings(), std::nullopt);
  EXPECT_EQ(file->find("list")->string(), std::nullopt);
  EXPECT_EQ(file->find("list")->integers(), std::nullopt);

  ASSERT_EQ(file->tensors.size(), 2u);
  EXPECT_EQ(file->tensors[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file->tensors[1].name, "y");
  EXPECT_EQ(file->tensors[1].data + 4, as_bytes(bytes.str()).data() + bytes.size());
}

// G1: cut at every byte, the file is refused with the offset of the field it ends in.
TEST(Gguf, RefusesAFileCutAtAnyByte) {
  const std::string whole = sample().str();
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string cut = whole.substr(0, size);
    const auto file = read_gguf(as_bytes(cut), "x.gguf");
    ASSERT_FALSE(file) << size;
    EXPECT_TRUE(file.status().code() == kModelTruncated ||
                file.status().code() == kModelCountExceedsFile)
        << size << ": " << file.status().to_string();
    EXPECT_NE(file.status().message().find("offset "), std::string::npos);
  }
  expect_refused(read(Bytes().raw("GGUF").u32(3).u64(1)), kModelCountExceedsFile, {"offset 8"});
  expect_refused(read(Bytes().raw("GGUF").u32(3).u64(0)), kModelTruncated, {"offset 16"});
  expect_refused(read(Bytes().raw("GGUF").u32(3).u32(0)), kModelTruncated, {"offset 8"});
}

// G2
TEST(Gguf, RefusesCountsThatTheFileCannotHold) {
  expect_refused(read(gguf_header(0, uint64_t{1} << 62)), kModelCountExceedsFile,
                 {"offset 16", "4611686018427387904 metadata pairs"});
  expect_refused(read(gguf_header(uint64_t{1} << 62, 0)), kModelCountExceedsFile,
                 {"offset 8", "4611686018427387904 tensors"});
  expect_refused(read(gguf_header(UINT64_MAX, UINT64_MAX)), kModelCountExceedsFile, {"offset 8"});
  expect_refused(read(entry("k", kTypeArray, Bytes().u32(0).u64(5).zeros(4))),
                 kModelCountExceedsFile, {"offset 41", "5 array elements"});
  expect_refused(
      read(entry("k", kTypeArray, Bytes().u32(kTypeString).u64(UINT64_MAX / 8 + 1).zeros(64))),
      kModelCountExceedsFile, {"offset 41"});
  expect_refused(read(entry("k", kTypeString, Bytes().u64(UINT64_MAX).zeros(64))),
                 kModelCountExceedsFile, {"offset 45", "18446744073709551615"});
}

// G3
TEST(Gguf, RefusesShapesWhoseProductWraps) {
  expect_refused(read(one({.dimensions = {(uint64_t{1} << 42) + 1, uint64_t{1} << 22}})),
                 kModelProductOverflow, {"offset 24", "'t'"});
  expect_refused(read(one({.dimensions = {UINT64_MAX, 2}})), kModelProductOverflow,
                 {"'t'", "18446744073709551615"});
  expect_refused(read(one({.dimensions = {65536, 65536, 65536, 65536}})), kModelProductOverflow,
                 {"'t'", "[65536, 65536, 65536, 65536]"});
  expect_refused(read(one({.dimensions = {uint64_t{1} << 62}})), kModelProductOverflow,
                 {"'t'", "bytes"});
}

// G4
TEST(Gguf, RefusesMoreThanFourDimensions) {
  expect_refused(read(one({.dimensions = {1, 1, 1, 1, 1}})), kModelTooManyDimensions,
                 {"'t'", "5 dimensions", "4"});
  expect_refused(read(gguf_header(1, 0).string("t").u32(UINT32_MAX).zeros(64)),
                 kModelTooManyDimensions, {"4294967295 dimensions"});
  EXPECT_TRUE(read(one({.dimensions = {1, 2, 2, 2}})));
  EXPECT_TRUE(read(one({.dimensions = {}})));
  EXPECT_TRUE(read(one({.dimensions = {5, 0}}, 0)));
}

// G5
TEST(Gguf, RefusesAlignmentsThatAreNoPowerOfTwo) {
  for (const uint32_t alignment : {0u, 1u, 4u, 12u, 24u, 0xffffffffu}) {
    expect_refused(read(entry("general.alignment", kTypeU32, Bytes().u32(alignment))),
                   kModelBadAlignment, {"general.alignment", std::to_string(alignment)});
  }
  expect_refused(read(entry("general.alignment", kTypeString, Bytes().string("32"))),
                 kModelBadAlignment, {"general.alignment"});
  expect_refused(read(entry("general.alignment", 10, Bytes().u64(32))), kModelBadAlignment,
                 {"general.alignment"});
  EXPECT_TRUE(read(entry("general.alignment", kTypeU32, Bytes().u32(8))));
  // An alignment beyond the file costs nothing but the refusal.
  Bytes far = gguf_header(1, 1);
  far.string("general.alignment").u32(kTypeU32).u32(1u << 30) << Tensor{};
  expect_refused(read(far.zeros(64)), kModelTruncated, {"offset 1073741824", "'t'"});
}

// G6
TEST(Gguf, RefusesNames) {
  const Bytes one_byte = Bytes().put(uint8_t{1});
  expect_refused(read(entry("", 0, Bytes().put(uint8_t{1}).zeros(1))), kModelBadName,
                 {"offset 24", "key"});
  EXPECT_TRUE(read(entry(std::string(65535, 'k'), 0, one_byte)));
  expect_refused(read(entry(std::string(65536, 'k'), 0, one_byte)), kModelBadName,
                 {"offset 24", "65536 bytes"});
  expect_refused(
      read(gguf_header(0, 2).string("k").u32(0).put(uint8_t{1}).string("k").u32(0).put(uint8_t{1})),
      kModelDuplicate, {"key 'k'"});
  Bytes twice = gguf_header(2, 0);
  twice << Tensor{} << Tensor{.offset = 32};
  expect_refused(read(twice.pad_to(32).zeros(64)), kModelDuplicate, {"offset 57", "tensor 't'"});
  EXPECT_TRUE(read(one({.name = std::string(63, 't')})));
  expect_refused(read(one({.name = std::string(64, 't')})), kModelBadName,
                 {"offset 24", "tensor name", "64 bytes"});
  expect_refused(read(one({.name = ""})), kModelBadName, {"offset 24", "tensor name"});
}

// G7
TEST(Gguf, RefusesOffsetsThatDoNotFollow) {
  Bytes file = gguf_header(2, 0);
  file << Tensor{.name = "a"} << Tensor{.name = "b", .offset = 32};
  file.pad_to(32);
  EXPECT_TRUE(read(Bytes(file).zeros(36)));
  expect_refused(read(Bytes(file).zeros(35)), kModelTruncated, {"'b'", "4 bytes"});
  for (const uint64_t offset : {uint64_t{0}, uint64_t{4}, uint64_t{64}, UINT64_MAX}) {
    Bytes other = gguf_header(2, 0);
    other << Tensor{.name = "a"} << Tensor{.name = "b", .offset = offset};
    expect_refused(read(other.pad_to(32).zeros(128)), kModelLayout,
                   {"'b'", "at " + std::to_string(offset), "32 follows"});
  }
}

// G8
TEST(Gguf, RefusesUnknownValuesAndTypes) {
  expect_refused(read(entry("k", kTypeBool, Bytes().put(uint8_t{2}))), kModelBadValue,
                 {"offset 37", "'k'", "boolean of 2"});
  expect_refused(read(entry("k", kTypeArray, Bytes().u32(kTypeBool).u64(3).raw({"\0\1\2", 3}))),
                 kModelBadValue, {"offset 51", "'k'", "boolean of 2"});
  expect_refused(read(entry("k", 13, Bytes().zeros(64))), kModelBadValue,
                 {"offset 33", "value type 13"});
  expect_refused(read(entry("k", kTypeArray, Bytes().u32(13).u64(0))), kModelBadValue,
                 {"offset 37", "value type 13"});
  expect_refused(read(entry("k", kTypeArray, Bytes().u32(kTypeArray).u64(0))), kModelBadValue,
                 {"offset 37", "'k'", "array of arrays"});
  expect_refused(read(one({.type = 4'000'000})), kModelTypeUnsupported, {"'t'", "4000000"});
  // Known once and gone since: Q4_2.
  expect_refused(read(one({.type = 4})), kModelTypeUnsupported, {"'t'", "type 4"});
}

// G10
TEST(Gguf, RefusesRowsThatAreNoWholeBlocks) {
  expect_refused(read(one({.dimensions = {33}, .type = kTensorQ8_0}, 64)), kModelBlockMisaligned,
                 {"'t'", "rows of 33", "Q8_0"});
  // The tensor as a whole would be whole blocks.
  expect_refused(read(one({.dimensions = {16, 2}, .type = kTensorQ8_0}, 64)), kModelBlockMisaligned,
                 {"'t'", "rows of 16"});
  const Bytes whole = one({.dimensions = {32, 2}, .type = kTensorQ8_0}, 68);
  const auto file = read(whole);
  ASSERT_TRUE(file) << file.status().to_string();
  EXPECT_EQ(file->tensors[0].bytes, 68);
}

// G12
TEST(Gguf, RefusesKeysAndNamesThatAreNotUtf8) {
  expect_refused(read(entry("\xff\xfe", 0, Bytes().put(uint8_t{1}))), kModelBadName,
                 {"offset 24", "\\xff\\xfe"});
  expect_refused(read(one({.name = "\xff\xfe"})), kModelBadName, {"offset 24", "\\xff\\xfe"});
}

// G13
TEST(Gguf, RefusesOtherVersionsByName) {
  EXPECT_TRUE(read(gguf_header(0, 0, 2)));
  for (const uint32_t version : {0u, 1u, 4u, 0xffffffffu}) {
    expect_refused(read(gguf_header(0, 0, version)), kModelVersion,
                   {"offset 4", "version " + std::to_string(version), "2 and 3"});
  }
  expect_refused(read(gguf_header(0, 0, 0x03000000)), kModelVersion,
                 {"offset 4", "big-endian", "version 3"});
  expect_refused(read(Bytes().raw("GGML").zeros(64)), kModelBadMagic, {"offset 0", "'GGML'"});
  expect_refused(read(Bytes().raw("FUGG").zeros(64)), kModelBadMagic, {"offset 0", "'FUGG'"});
}

}  // namespace
}  // namespace ullage::model
