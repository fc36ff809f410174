// Every stored type against an independent implementation (make_gguf_fixtures.py), to the bit.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "model/gguf.h"
#include "model/mapped_file.h"
#include "model/weight_finder.h"
#include "ullage/dtype.h"

namespace ullage::model {
namespace {

class BlocksFixture : public testing::Test {
 protected:
  void SetUp() override {
    auto opened = MappedFile::open(std::string(ULLAGE_TEST_DATA) + "/gguf_blocks.gguf");
    ASSERT_TRUE(opened) << opened.status().to_string();
    file_.emplace(*std::move(opened));
    auto gguf = read_gguf(file_->bytes(), "gguf_blocks.gguf");
    ASSERT_TRUE(gguf) << gguf.status().to_string();
    for (const StoredTensor& tensor : gguf->tensors) weights_[tensor.name] = weight_of(tensor);
  }

  std::optional<MappedFile> file_;
  std::map<std::string, Weight> weights_;
};

TEST_F(BlocksFixture, WidensEveryQuantisedTypeToTheBit) {
  const ElementType types[] = {ElementType::kQ4_0, ElementType::kQ4_1, ElementType::kQ5_0,
                               ElementType::kQ5_1, ElementType::kQ8_0, ElementType::kQ2_K,
                               ElementType::kQ3_K, ElementType::kQ4_K, ElementType::kQ5_K,
                               ElementType::kQ6_K, ElementType::kQ8_K};
  for (const ElementType type : types) {
    const std::string name(name_of(type));
    ASSERT_TRUE(weights_.contains(name));
    const Weight& weight = weights_[name];
    const Weight& widened = weights_[name + ".widened"];
    ASSERT_EQ(weight.type, type);
    ASSERT_EQ(weight.rows, 2);
    ASSERT_EQ(weight.cols, widened.cols);
    const int64_t block = block_elements(type);
    for (int64_t row = 0; row < 2; ++row) {
      // Whole rows, and block by block from within a row.
      std::vector<float> whole(static_cast<size_t>(weight.cols));
      std::vector<float> pieces(whole.size());
      std::vector<float> expected(whole.size());
      dequantize(weight, row, 0, weight.cols, whole.data());
      for (int64_t at = 0; at < weight.cols; at += block) {
        dequantize(weight, row, at, block, pieces.data() + at);
      }
      dequantize(widened, row, 0, widened.cols, expected.data());
      for (size_t i = 0; i < whole.size(); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(whole[i]), std::bit_cast<uint32_t>(expected[i]))
            << name << " row " << row << " element " << i << ": " << whole[i] << " for "
            << expected[i];
        ASSERT_EQ(std::bit_cast<uint32_t>(pieces[i]), std::bit_cast<uint32_t>(expected[i]))
            << name << " row " << row << " element " << i << ", block by block";
      }
    }
  }
}

// At an odd address, as safetensors files may have them.
template <class T>
float widen_unaligned(ElementType type, T value) {
  std::byte bytes[1 + sizeof(T)];
  std::memcpy(bytes + 1, &value, sizeof(T));
  float widened = 0;
  dequantize({.data = bytes + 1, .type = type, .rows = 1, .cols = 1, .row_bytes = sizeof(T)}, 0, 0,
             1, &widened);
  return widened;
}

TEST(Dequantize, WidensPlainTypes) {
  EXPECT_EQ(widen_unaligned(ElementType::kF32, -1.25f), -1.25f);
  EXPECT_EQ(widen_unaligned(ElementType::kF64, 0.1), 0.1f);
  EXPECT_EQ(widen_unaligned(ElementType::kF16, uint16_t{0x3555}), 0x1.554p-2f);
  EXPECT_EQ(widen_unaligned(ElementType::kF16, uint16_t{0x0001}), 0x1p-24f);
  EXPECT_EQ(widen_unaligned(ElementType::kBF16, uint16_t{0xbf81}), -1.0078125f);
}

TEST(Dequantize, ReadsNothingForNoElements) {
  dequantize({.data = nullptr, .type = ElementType::kQ4_K, .rows = 1, .cols = 0, .row_bytes = 0}, 0,
             0, 0, nullptr);
}

}  // namespace
}  // namespace ullage::model
