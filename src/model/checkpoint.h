// A model on disk, opened: configuration, weights by role, tokenizer data. Reads a folder
// (config.json with safetensors, single or sharded) or a .gguf file; everything stays
// memory-mapped, nothing is copied but names and metadata.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/tokenizer.h"
#include "model/weight.h"
#include "ullage/status.h"

namespace ullage::model {

struct LayerWeights {
  Weight attn_norm;               // [1][d_model]
  Weight q, k, v;                 // [h_q * d_head][d_model], [h_kv * d_head][d_model] twice
  Weight q_bias, k_bias, v_bias;  // [1][rows of q, k, v], or empty
  Weight q_norm, k_norm;          // [1][d_head], or empty
  Weight o;                       // [d_model][h_q * d_head]
  Weight ffn_norm;                // [1][d_model]
  Weight gate, up;                // [d_ff][d_model]
  Weight down;                    // [d_model][d_ff]
};

class Checkpoint {
 public:
  // Errors 640-659, naming the file and the offset, key or tensor at fault.
  static Result<Checkpoint> open(const std::filesystem::path& path);

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const Config& config() const;
  const std::string& name() const;   // the folder's or file's own name
  const Weight& embedding() const;   // [vocab][d_model]
  const Weight& head() const;        // [vocab][d_model]; the embedding where tied
  const Weight& final_norm() const;  // [1][d_model]
  const std::vector<LayerWeights>& layers()
      const;                        // n_layers of them, every shape checked against config()
  int64_t stored_elements() const;  // on disk; a tied model may also store its head
  int64_t stored_bytes() const;
  const std::vector<std::string>& warnings()
      const;  // e.g. an index whose total_size disagrees with the shards
  // The tokenizer that came with the model: of the GGUF metadata, or tokenizer.json beside
  // config.json, which says what begins and ends a text. 659 where there is none, where it is of a
  // kind that is not read, or has more tokens than the embedding has rows (fewer are common).
  Result<Tokenizer> tokenizer() const;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ullage::model
