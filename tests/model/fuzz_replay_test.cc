// Replays the seeds of one fuzz target, cut at every byte and mutated at random, without a fuzzer:
// nothing may crash, and under the sanitizers nothing may be read outside.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr int kMutations = 20'000;

std::vector<std::string> seeds() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(ULLAGE_SEEDS)) {
    std::ifstream file(entry.path(), std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return files;
}

// From an allocation of exactly its size, so that one byte too far is seen.
void feed(const std::string& input) {
  const auto copy = std::make_unique<uint8_t[]>(input.size());
  std::copy(input.begin(), input.end(), copy.get());
  EXPECT_EQ(LLVMFuzzerTestOneInput(copy.get(), input.size()), 0);
}

class Mutator {
 public:
  // A few changes: a bit, a byte, an extreme integer, bytes lost, bytes twice, bytes of another.
  std::string mutate(std::string text, const std::string& other) {
    for (size_t n = 1 + below(4); n > 0 && !text.empty(); --n) {
      const size_t at = below(text.size());
      const size_t length = std::min(text.size() - at, 1 + below(16));
      switch (below(6)) {
        case 0:
          text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
          break;
        case 1:
          text[at] = static_cast<char>(below(256));
          break;
        case 2:
          for (size_t i = 0; i < std::min<size_t>(length, 8); ++i) {
            text[at + i] = static_cast<char>(kExtremes[below(std::size(kExtremes))] >> (8 * i));
          }
          break;
        case 3:
          text.erase(at, length);
          break;
        case 4:
          text.insert(at, text.substr(at, length));
          break;
        default:
          text.replace(at, length, other.substr(std::min(at, other.size()), length));
      }
    }
    return text;
  }

  size_t below(size_t bound) { return random_() % bound; }

 private:
  static constexpr uint64_t kExtremes[] = {0,          1,         UINT64_MAX, UINT64_MAX >> 1,
                                           1ull << 32, 1ull << 62};
  std::mt19937_64 random_{20261129};
};

TEST(FuzzReplay, SeedsAndTheirCuts) {
  const auto files = seeds();
  ASSERT_FALSE(files.empty()) << ULLAGE_SEEDS;
  for (const std::string& file : files) {
    for (size_t size = 0; size <= file.size(); ++size) feed(file.substr(0, size));
  }
}

TEST(FuzzReplay, Mutations) {
  const auto files = seeds();
  Mutator mutator;
  for (int i = 0; i < kMutations; ++i) {
    feed(mutator.mutate(files[mutator.below(files.size())], files[mutator.below(files.size())]));
  }
}

}  // namespace
