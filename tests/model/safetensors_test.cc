#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <string>

#include "model/byte_builder.h"
#include "model/refusal.h"

namespace ullage::model {
namespace {

Result<std::vector<StoredTensor>> read(const std::string& file) {
  return read_safetensors(as_bytes(file), "x.safetensors");
}

// One F32 tensor 'a' with this shape and these offsets.
std::string one(std::string_view shape, std::string_view offsets, size_t buffer_bytes,
                std::string_view dtype = "F32") {
  return safetensors("{\"a\":{\"dtype\":\"" + std::string(dtype) + "\",\"shape\":" +
                         std::string(shape) + ",\"data_offsets\":" + std::string(offsets) + "}}",
                     buffer_bytes);
}

TEST(Safetensors, ReadsTensorsInTheOrderOfTheBuffer) {
  const std::string file = safetensors(
      R"({"b":{"dtype":"BF16","shape":[3,2],"data_offsets":[8,20]},)"
      R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"format":"pt"}}   )",
      20);
  const auto tensors = read(file);
  ASSERT_TRUE(tensors) << tensors.status().to_string();
  ASSERT_EQ(tensors->size(), 2u);
  const StoredTensor& a = (*tensors)[0];
  const StoredTensor& b = (*tensors)[1];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.type.element, ElementType::kF32);
  EXPECT_EQ(a.shape, std::vector<int64_t>{2});
  EXPECT_EQ(b.type.element, ElementType::kBF16);
  EXPECT_EQ(b.shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(b.elements, 6);
  EXPECT_EQ(b.bytes, 12);
  EXPECT_EQ(b.data + 12, as_bytes(file).data() + file.size());
  EXPECT_EQ(b.data - a.data, 8);
}

TEST(Safetensors, ReadsAnEmptyFile) {
  const auto tensors = read(safetensors("{}"));
  ASSERT_TRUE(tensors) << tensors.status().to_string();
  EXPECT_TRUE(tensors->empty());
}

// S1
TEST(Safetensors, RefusesHeaderLengths) {
  expect_refused(read(std::string(8, '\xff')), kModelCountExceedsFile,
                 {"offset 0", "18446744073709551615", "100000000"});
  expect_refused(read(Bytes().u64(100'000'001).zeros(64).str()), kModelCountExceedsFile,
                 {"offset 0", "100000001"});
  expect_refused(read(Bytes().u64(65).zeros(64).str()), kModelCountExceedsFile,
                 {"offset 8", "65 bytes", "64 left"});
  expect_refused(read(safetensors("")), kModelBadJson, {"offset 8", "0 bytes"});
  expect_refused(read(safetensors("{")), kModelBadJson, {"x.safetensors"});
  expect_refused(read(safetensors("x")), kModelBadJson, {"offset 8", "'x'"});
  for (size_t size = 0; size < 8; ++size) {
    expect_refused(read(std::string(size, '\x02')), kModelTruncated,
                   {"offset 0", "header length", std::to_string(8 - size)});
  }
}

// S2
TEST(Safetensors, RefusesHeadersThatAreNotStrictJson) {
  expect_refused(read(safetensors(" {}")), kModelBadJson, {"offset 8", "' '"});
  expect_refused(read(safetensors("\xef\xbb\xbf{}")), kModelBadJson, {"offset 8", "\\xef"});
  expect_refused(read(safetensors("[]")), kModelBadJson, {"'['"});
  expect_refused(read(safetensors("{}x")), kModelBadJson, {"byte 3"});
  expect_refused(read(safetensors("{,}")), kModelBadJson, {"byte 2"});
  expect_refused(read(safetensors("{\"a\xff\":1}")), kModelBadJson, {"byte 4", "UTF-8"});
  std::string nested = "{\"a\":";
  for (int i = 0; i < 100'000; ++i) nested += i % 2 == 0 ? "[" : "{\"a\":";
  expect_refused(read(safetensors(nested)), kModelBadJson, {"'a'", "nested deeper than 3"});
  // What stands behind a NUL would be out of the parser's sight.
  expect_refused(read(safetensors(std::string("{}  \0{", 6))), kModelBadJson, {"NUL"});
}

// S3
TEST(Safetensors, RefusesShapesWhoseProductWraps) {
  expect_refused(read(one("[4294967296,4294967296]", "[0,0]", 0)), kModelProductOverflow,
                 {"'a'", "[4294967296, 4294967296]"});
  expect_refused(read(one("[9223372036854775807,2]", "[0,0]", 0)), kModelProductOverflow, {"'a'"});
  // The elements fit, their bytes do not.
  expect_refused(read(one("[4611686018427387904]", "[0,0]", 0)), kModelProductOverflow,
                 {"'a'", "bytes"});
}

// S4
TEST(Safetensors, RefusesOffsetsThatDisagreeWithTheShape) {
  expect_refused(read(one("[2,3]", "[0,23]", 24)), kModelLayout, {"'a'", "[0, 23]", "24 bytes"});
  expect_refused(read(one("[2,3]", "[24,0]", 24)), kModelLayout, {"'a'", "[24, 0]"});
  expect_refused(read(one("[2,3]", "[0,24]", 23)), kModelTruncated, {"'a'", "24", "23"});
  expect_refused(read(one("[2,3]", "[0,24]", 25)), kModelLayout, {"24 bytes", "25"});
  expect_refused(read(one("[2,3]", "[0]", 24)), kModelLayout, {"'a'", "[0]"});
  expect_refused(read(one("[2,3]", "[0,24,24]", 24)), kModelLayout, {"'a'"});
  expect_refused(read(one("[2,3]", "[4,28]", 28)), kModelLayout, {"'a'", "hole"});
}

TEST(Safetensors, RefusesHolesAndOverlaps) {
  const auto two = [](std::string_view b_offsets, size_t bytes) {
    return safetensors(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                       R"("b":{"dtype":"U8","shape":[4],"data_offsets":)" +
                           std::string(b_offsets) + "}}",
                       bytes);
  };
  EXPECT_TRUE(read(two("[4,8]", 8)));
  expect_refused(read(two("[5,9]", 9)), kModelLayout, {"'b'", "byte 5", "hole"});
  expect_refused(read(two("[3,7]", 7)), kModelLayout, {"'b'", "byte 3", "overlap"});
  expect_refused(read(two("[0,4]", 4)), kModelLayout, {"'b'", "overlap"});
}

// S6
TEST(Safetensors, RefusesDuplicates) {
  const std::string entry = R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_refused(read(safetensors("{" + entry + "," + entry + "}")), kModelDuplicate,
                 {"'a'", "twice"});
  expect_refused(
      read(safetensors(R"({"a":{"dtype":"U8","shape":[0],"shape":[1],"data_offsets":[0,0]}})")),
      kModelDuplicate, {"'shape'", "twice"});
}

// S7
TEST(Safetensors, AcceptsScalarsAndEmptyTensors) {
  const auto scalar = read(one("[]", "[0,4]", 4));
  ASSERT_TRUE(scalar) << scalar.status().to_string();
  EXPECT_EQ((*scalar)[0].elements, 1);
  const auto empty = read(one("[0,5]", "[0,0]", 0));
  ASSERT_TRUE(empty) << empty.status().to_string();
  EXPECT_EQ((*empty)[0].elements, 0);
}

// S8
TEST(Safetensors, RefusesSizesThatAreNoIntegers) {
  for (const std::string_view size :
       {"-1", "1.5", "1.0", "1e3", "18446744073709551616", "18446744073709551615",
        "9223372036854775808", "\"2\"", "null", "true"}) {
    const std::string list = "[" + std::string(size) + "]";
    expect_refused(read(one(list, "[0,8]", 8)), kModelBadJson, {"'a'", "shape"});
    expect_refused(read(one("[2]", "[0," + std::string(size) + "]", 8)), kModelBadJson,
                   {"'a'", "data_offsets"});
  }
  expect_refused(read(one("[[2]]", "[0,8]", 8)), kModelBadJson, {"'shape'", "nested"});
  expect_refused(read(one("[1e999]", "[0,8]", 8)), kModelBadJson, {"byte"});
  expect_refused(read(one("2", "[0,8]", 8)), kModelBadJson, {"'a'", "not an array"});
}

// S9
TEST(Safetensors, SizesEveryKnownTypeAndRefusesOthersByName) {
  const struct {
    std::string_view dtype;
    int64_t bits;
  } types[] = {{"BOOL", 8}, {"U8", 8},   {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8},
               {"I16", 16}, {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},
               {"U32", 32}, {"F32", 32}, {"C64", 64},    {"F64", 64},    {"I64", 64},
               {"U64", 64}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E8M0", 8}};
  for (const auto& [dtype, bits] : types) {
    const auto bytes = static_cast<size_t>(bits) * 8 / 8;
    const auto tensors = read(one("[8]", "[0," + std::to_string(bytes) + "]", bytes, dtype));
    ASSERT_TRUE(tensors) << tensors.status().to_string();
    EXPECT_EQ((*tensors)[0].bytes, bits) << dtype;
  }
  expect_refused(read(one("[3]", "[0,2]", 2, "F4")), kModelBlockMisaligned, {"'a'", "F4", "[3]"});
  EXPECT_TRUE(read(one("[2,3]", "[0,3]", 3, "F4")));
  for (const std::string_view dtype : {"I4", "F128", "f32", ""}) {
    expect_refused(read(one("[1]", "[0,4]", 4, dtype)), kModelTypeUnsupported,
                   {"'a'", "'" + std::string(dtype) + "'"});
  }
}

TEST(Safetensors, RefusesEntriesOfAnotherForm) {
  for (const std::string_view entry :
       {R"(1)", R"([])", R"({})", R"({"dtype":"U8","shape":[0]})",
        R"({"dtype":"U8","shape":[0],"data_offsets":[0,0],"stride":[1]})",
        R"({"dtype":8,"shape":[0],"data_offsets":[0,0]})"}) {
    expect_refused(read(safetensors("{\"a\":" + std::string(entry) + "}")), kModelBadJson,
                   {"'a'", "dtype"});
  }
  expect_refused(read(safetensors(R"({"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})")),
                 kModelBadName, {"empty"});
  expect_refused(read(safetensors(R"({"__metadata__":[]})")), kModelBadJson, {"__metadata__"});
  expect_refused(read(safetensors(R"({"__metadata__":{"k":1}})")), kModelBadJson, {"'k'"});
}

TEST(Safetensors, RefusesAFileCutAtAnyByte) {
  const std::string whole =
      safetensors(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24);
  ASSERT_TRUE(read(whole));
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto cut = read(whole.substr(0, size));
    ASSERT_FALSE(cut) << size;
    EXPECT_TRUE(cut.status().code() == kModelTruncated ||
                cut.status().code() == kModelCountExceedsFile)
        << size << ": " << cut.status().to_string();
  }
}

}  // namespace
}  // namespace ullage::model
