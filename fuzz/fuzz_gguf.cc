// Any bytes as a GGUF file: refused, or every value and tensor lies inside, and so do the weights
// of the model where it is one.
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "model/config_gguf.h"
#include "model/gguf.h"
#include "model/model_weights.h"
#include "model/tokenizer.h"
#include "model/tokenizer_gguf.h"
#include "read_all.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ullage::model;
  auto file = read_gguf(std::as_bytes(std::span(data, size)), "x.gguf");
  if (!file) return 0;
  for (const auto& [key, value] : file->metadata) {
    (void)value.integer();
    (void)value.real();
    (void)value.boolean();
    (void)value.string();
    (void)value.integers();
    (void)value.strings();
  }
  read_all(file->tensors);
  if (auto tokens = tokenizer_data_from_gguf(*file, "x.gguf")) {
    if (const auto tokenizer = Tokenizer::create(*std::move(tokens))) {
      const auto ids = tokenizer->encode("abcab a<|end|>", true);
      if (ids) (void)tokenizer->decode(*ids);
    }
  }
  const auto config = config_from_gguf(*file, "x.gguf");
  if (!config) return 0;
  StoredModel stored;
  stored.tensors = std::move(file->tensors);
  (void)find_weights(*config, kGgufNames, stored, "x.gguf");
  return 0;
}
