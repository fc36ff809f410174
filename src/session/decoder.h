// The forward pass of the llama, qwen2 and qwen3 families on the CPU, over a resident KV cache:
// RMSNorm, optional norms of queries and keys, rotary positions, grouped-query attention, SwiGLU.
//
// Grade: bitwise. Hidden states and logits of a token depend on the tokens before it alone: not on
// how they were split into calls, on max_rows, or on the thread count. Everything is float32;
// weights are read as stored.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/checkpoint.h"
#include "ullage/plan.h"
#include "ullage/status.h"

namespace ullage::cpu {
class WorkerPool;
}

namespace ullage::session {

struct DecoderOptions {
  int64_t max_ctx = 512;   // positions the KV cache holds
  int64_t max_rows = 256;  // tokens that pass through the layers together; bounds the scratch
  int n_threads = 0;       // 0: as many as the machine has
};

// What a decoder allocates, by purpose, in one block. Weights stay in the file's mapping.
struct DecoderPlan {
  std::vector<Booking> bookings;
  int64_t bytes = 0;
};

class Decoder {
 public:
  // Errors: 601 and 602 for the options, 602 where the bytes overflow, 603 for a head geometry that
  // rotary positions or grouped heads cannot have.
  static Result<DecoderPlan> plan(const model::Checkpoint& checkpoint,
                                  const DecoderOptions& options);
  static Result<DecoderPlan> plan(const model::Config& config, const DecoderOptions& options);

  // Allocates what `plan` says. `checkpoint` must outlive the decoder. Errors: as plan, and 602
  // where the system refuses the memory.
  static Result<Decoder> create(const model::Checkpoint& checkpoint, const DecoderOptions& options);

  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;
  ~Decoder();

  // Feeds tokens at positions position() ... and moves on by tokens.size(). hidden
  // [tokens.size()][d_model] receives the states after the last norm; null: they are not wanted.
  // Allocates nothing. Errors, with nothing changed: 602 for a token id outside the vocabulary, 606
  // where the context is too small.
  Status forward(std::span<const int32_t> tokens, float* hidden);

  // logits [rows][vocab] = hidden [rows][d_model] times the head. Allocates nothing.
  void logits(const float* hidden, int64_t rows, float* logits);

  int64_t position() const;
  void reset();  // position 0; what the cache held is never read again

  const DecoderPlan& plan() const;
  cpu::WorkerPool& pool();

 private:
  struct State;
  explicit Decoder(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ullage::session
