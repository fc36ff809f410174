// A tokenizer.json of any bytes is read or refused; a tokenizer made from one never loses a byte.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "model/tokenizer.h"
#include "model/tokenizer_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ullage::model;
  const std::string_view document(reinterpret_cast<const char*>(data), size);
  auto read = parse_tokenizer_json(document, "fuzz");
  if (!read) return 0;
  const auto tokenizer = Tokenizer::create(*std::move(read));
  if (!tokenizer) return 0;
  // The document is the text as well, and so are its first bytes, where a byte without a token ends
  // it.
  for (const std::string_view text :
       {document.substr(0, 512), document.substr(0, 8), std::string_view("a")}) {
    const auto ids = tokenizer->encode(text, true);
    if (ids && tokenizer->decode(*ids) != text) std::abort();
  }
  return 0;
}
