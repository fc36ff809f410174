#include "session/decoder.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu/attention.h"
#include "cpu/product.h"
#include "cpu/worker_pool.h"
#include "session/arena.h"
#include "session/layer_math.h"
#include "ullage/residentk/contract.h"

namespace ullage::session {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

// Rows of a weight that are widened together where `product` cannot read its type as stored.
constexpr int64_t kStripRows = 128;

// The type under which `product` reads a weight as it is stored; none: it must be widened.
std::optional<cpu::ElementType> product_type(model::ElementType type) {
  switch (type) {
    case model::ElementType::kF32:
      return cpu::ElementType::kF32;
    case model::ElementType::kBF16:
      return cpu::ElementType::kBF16;
    case model::ElementType::kF16:
      return cpu::ElementType::kF16;
    case model::ElementType::kQ8_0:
      return cpu::ElementType::kQ8_0;
    case model::ElementType::kQ4_0:
      return cpu::ElementType::kQ4_0;
    case model::ElementType::kQ4_1:
      return cpu::ElementType::kQ4_1;
    default:
      return std::nullopt;
  }
}

bool needs_strips(const model::Checkpoint& checkpoint) {
  bool needed = !product_type(checkpoint.head().type);
  for (const model::LayerWeights& layer : checkpoint.layers()) {
    for (const model::Weight* weight :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      needed = needed || !product_type(weight->type);
    }
  }
  return needed;
}

struct Shape {
  model::Config config;
  int64_t max_ctx;
  int64_t max_rows;
  int n_threads;
  bool strips;

  int64_t q_width() const { return config.h_q * config.d_head; }
  int64_t kv_width() const { return config.h_kv * config.d_head; }
};

Result<Shape> check(const model::Config& config, const DecoderOptions& options, bool strips) {
  const auto refuse = [](StatusCode code, const char* what, int64_t value,
                         const std::string& rule) {
    return Status(code, std::string(what) + " is " + std::to_string(value) + "; " + rule);
  };
  if (options.max_ctx < 1) {
    return refuse(kResidentEmptyDimension, "max_ctx", options.max_ctx, "at least 1 is needed");
  }
  if (options.max_ctx > residentk::kResidentMaxContext) {
    return refuse(
        kResidentDimensionTooLarge, "max_ctx", options.max_ctx,
        "at most " + std::to_string(residentk::kResidentMaxContext) + " positions are held");
  }
  if (options.max_rows < 1) {
    return refuse(kResidentEmptyDimension, "max_rows", options.max_rows, "at least 1 is needed");
  }
  if (config.h_kv < 1 || config.h_q % config.h_kv != 0) {
    return refuse(kResidentHeadGeometry, "h_q", config.h_q,
                  "it must be a multiple of h_kv = " + std::to_string(config.h_kv));
  }
  if (config.d_head < 2 || config.d_head % 2 != 0) {
    return refuse(kResidentHeadGeometry, "d_head", config.d_head,
                  "rotary positions need an even number");
  }
  const int n_threads = options.n_threads > 0
                            ? options.n_threads
                            : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return Shape{config, options.max_ctx, std::min(options.max_rows, options.max_ctx), n_threads,
               strips};
}

struct Layout {
  ArenaPlan plan;
  size_t keys, values, rope, vectors, residual, normed, query, key, value, gate, up, scores, strip;
  size_t product;

  explicit Layout(const Shape& shape) {
    const model::Config& c = shape.config;
    const int64_t rows = shape.max_rows;
    keys = plan.book("KV cache, keys f32", c.n_layers * c.h_kv,
                     cpu::key_cache_elements(shape.max_ctx, c.d_head) * kFloatBytes);
    values = plan.book("KV cache, values f32", c.n_layers * c.h_kv,
                       cpu::value_cache_elements(shape.max_ctx, c.d_head) * kFloatBytes);
    rope = plan.book("rotary table f32", shape.max_ctx, c.d_head * kFloatBytes);
    const int64_t layer_vectors = 2 * c.d_model + (c.qk_norm ? 2 * c.d_head : 0) +
                                  (c.qkv_bias ? shape.q_width() + 2 * shape.kv_width() : 0);
    vectors =
        plan.book("norms and biases f32", c.n_layers * layer_vectors + c.d_model, kFloatBytes);
    residual = plan.book("residual stream", rows, c.d_model * kFloatBytes);
    normed = plan.book("normed rows", rows, c.d_model * kFloatBytes);
    query = plan.book("queries, then attention", rows, shape.q_width() * kFloatBytes);
    key = plan.book("keys of the rows", rows, shape.kv_width() * kFloatBytes);
    value = plan.book("values of the rows", rows, shape.kv_width() * kFloatBytes);
    gate = plan.book("gates", rows, c.d_ff * kFloatBytes);
    up = plan.book("ups", rows, c.d_ff * kFloatBytes);
    scores = plan.book("attention scores", shape.n_threads,
                       cpu::round_up_to_key_block(shape.max_ctx) * kFloatBytes);
    const int64_t widest = std::max({c.d_model, shape.q_width(), c.d_ff});
    strip = plan.book("widened weight rows", shape.strips ? kStripRows : 0, widest * kFloatBytes);
    int64_t product_bytes = 0;
    for (const auto& [n, k] : {std::pair{shape.q_width(), c.d_model},
                               {shape.kv_width(), c.d_model},
                               {c.d_model, shape.q_width()},
                               {c.d_ff, c.d_model},
                               {c.d_model, c.d_ff},
                               {c.vocab, c.d_model},
                               {kStripRows, widest}}) {
      product_bytes = std::max(
          product_bytes, cpu::product_workspace_bytes({rows, n, k}, DType::kF32, shape.n_threads));
    }
    product = plan.book("packed panels", product_bytes, 1);
  }
};

struct LayerVectors {
  const float *attn_norm, *ffn_norm, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias;
};

Result<DecoderPlan> plan_of(const Result<Shape>& shape) {
  if (!shape) return shape.status();
  const Layout layout(*shape);
  if (layout.plan.overflowed()) {
    return Status(kResidentDimensionTooLarge, "the session's memory does not fit 63 bits");
  }
  return DecoderPlan{layout.plan.bookings(), layout.plan.bytes()};
}

void add_bias(const float* bias, int64_t width, float* row) {
  for (int64_t i = 0; i < width; ++i) row[i] += bias[i];
}

}  // namespace

struct Decoder::State {
  State(const model::Checkpoint& opened, Shape checked, DecoderPlan promised, Layout booked,
        Arena allocated)
      : checkpoint(opened),
        shape(std::move(checked)),
        plan(std::move(promised)),
        layout(std::move(booked)),
        arena(std::move(allocated)),
        pool(shape.n_threads) {
    fill_rope_table(shape.config.rope_inverse_frequencies(), shape.max_ctx,
                    arena.slice<float>(layout.rope));
    widen_vectors();
  }

  void widen_vectors() {
    float* next = arena.slice<float>(layout.vectors);
    const auto widen = [&next](const model::Weight& weight) -> const float* {
      if (!weight) return nullptr;
      float* first = next;
      model::dequantize(weight, 0, 0, weight.cols, first);
      next += weight.cols;
      return first;
    };
    for (const model::LayerWeights& w : checkpoint.layers()) {
      vectors.push_back({widen(w.attn_norm), widen(w.ffn_norm), widen(w.q_norm), widen(w.k_norm),
                         widen(w.q_bias), widen(w.k_bias), widen(w.v_bias)});
    }
    final_norm = widen(checkpoint.final_norm());
  }

  // out [rows][weight.rows] = x [rows][weight.cols] * weight^T, added to what `out` holds where
  // `accumulate`.
  void project(const model::Weight& weight, const float* x, int64_t rows, bool accumulate,
               float* out) {
    const cpu::ProductOperand a = {x, cpu::ElementType::kF32, weight.cols, 1};
    const std::span<std::byte> workspace(arena.slice<std::byte>(layout.product),
                                         static_cast<size_t>(plan.bookings[layout.product].bytes));
    if (const auto type = product_type(weight.type)) {
      const int64_t stride =
          weight.row_bytes / model::block_bytes(weight.type) * model::block_elements(weight.type);
      cpu::product({rows, weight.rows, weight.cols}, a, {weight.data, *type, 1, stride}, out,
                   weight.rows, accumulate, cpu::SumOrder::kBlocks, workspace, pool);
      return;
    }
    float* strip = arena.slice<float>(layout.strip);
    for (int64_t first = 0; first < weight.rows; first += kStripRows) {
      const int64_t n = std::min(kStripRows, weight.rows - first);
      pool.run(n, [&](int64_t row, int) {
        model::dequantize(weight, first + row, 0, weight.cols, strip + row * weight.cols);
      });
      cpu::product({rows, n, weight.cols}, a, {strip, cpu::ElementType::kF32, 1, weight.cols},
                   out + first, weight.rows, accumulate, cpu::SumOrder::kBlocks, workspace, pool);
    }
  }

  void norm_rows(const float* src, const float* weight, int64_t rows, float* dst) {
    const int64_t width = shape.config.d_model;
    pool.run(rows, [&](int64_t row, int) {
      rms_norm(src + row * width, weight, width, shape.config.rms_eps, dst + row * width);
    });
  }

  cpu::KeyValueCache cache(int64_t layer, int64_t kv_head) const {
    const model::Config& c = shape.config;
    const int64_t index = layer * c.h_kv + kv_head;
    return {
        arena.slice<float>(layout.keys) + index * cpu::key_cache_elements(shape.max_ctx, c.d_head),
        arena.slice<float>(layout.values) +
            index * cpu::value_cache_elements(shape.max_ctx, c.d_head)};
  }

  // Biases, norms and rotations of one row's heads; its keys and values enter the cache.
  void finish_row(int64_t layer, const LayerVectors& vector, int64_t row) {
    const model::Config& c = shape.config;
    float* query = arena.slice<float>(layout.query) + row * shape.q_width();
    float* key = arena.slice<float>(layout.key) + row * shape.kv_width();
    float* value = arena.slice<float>(layout.value) + row * shape.kv_width();
    if (vector.q_bias != nullptr) add_bias(vector.q_bias, shape.q_width(), query);
    if (vector.k_bias != nullptr) add_bias(vector.k_bias, shape.kv_width(), key);
    if (vector.v_bias != nullptr) add_bias(vector.v_bias, shape.kv_width(), value);
    const float* table = arena.slice<float>(layout.rope) + (position + row) * c.d_head;
    const auto place = [&](const float* norm, float* head) {
      if (norm != nullptr) rms_norm(head, norm, c.d_head, c.rms_eps, head);
      rotate(table, c.d_head, c.rope_pairs_adjacent, head);
    };
    for (int64_t h = 0; h < c.h_q; ++h) place(vector.q_norm, query + h * c.d_head);
    for (int64_t h = 0; h < c.h_kv; ++h) {
      place(vector.k_norm, key + h * c.d_head);
      cpu::store_key_value(cache(layer, h), position + row, c.d_head, key + h * c.d_head,
                           value + h * c.d_head);
    }
  }

  // Every query head of the rows over the positions up to its own; the result replaces the query.
  void attend_rows(int64_t layer, int64_t rows) {
    const model::Config& c = shape.config;
    const int64_t group = c.h_q / c.h_kv;
    const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.d_head)));
    // Rows of one kv head follow each other, so that its keys stay in the cache.
    pool.run(c.h_kv * rows, [&](int64_t task, int worker) {
      const int64_t kv_head = task / rows;
      const int64_t row = task % rows;
      float* scores =
          arena.slice<float>(layout.scores) + worker * cpu::round_up_to_key_block(shape.max_ctx);
      float* first =
          arena.slice<float>(layout.query) + row * shape.q_width() + kv_head * group * c.d_head;
      for (int64_t h = 0; h < group; ++h) {
        float* head = first + h * c.d_head;
        cpu::attend(head, cache(layer, kv_head), position + row + 1, c.d_head, scale, scores, head);
      }
    });
  }

  void run_layer(int64_t layer, int64_t rows) {
    const model::LayerWeights& weights = checkpoint.layers()[static_cast<size_t>(layer)];
    const LayerVectors& vector = vectors[static_cast<size_t>(layer)];
    auto* residual = arena.slice<float>(layout.residual);
    auto* normed = arena.slice<float>(layout.normed);
    auto* query = arena.slice<float>(layout.query);
    auto* gate = arena.slice<float>(layout.gate);
    auto* up = arena.slice<float>(layout.up);

    norm_rows(residual, vector.attn_norm, rows, normed);
    project(weights.q, normed, rows, false, query);
    project(weights.k, normed, rows, false, arena.slice<float>(layout.key));
    project(weights.v, normed, rows, false, arena.slice<float>(layout.value));
    pool.run(rows, [&](int64_t row, int) { finish_row(layer, vector, row); });
    attend_rows(layer, rows);
    project(weights.o, query, rows, true, residual);

    norm_rows(residual, vector.ffn_norm, rows, normed);
    project(weights.gate, normed, rows, false, gate);
    project(weights.up, normed, rows, false, up);
    const int64_t d_ff = shape.config.d_ff;
    pool.run(rows, [&](int64_t row, int) { swiglu(up + row * d_ff, d_ff, gate + row * d_ff); });
    project(weights.down, gate, rows, true, residual);
  }

  const model::Checkpoint& checkpoint;
  Shape shape;
  DecoderPlan plan;
  Layout layout;
  Arena arena;
  cpu::WorkerPool pool;
  std::vector<LayerVectors> vectors;
  const float* final_norm = nullptr;
  int64_t position = 0;
};

Decoder::Decoder(std::unique_ptr<State> state) : state_(std::move(state)) {}
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;
Decoder::~Decoder() = default;

Result<DecoderPlan> Decoder::plan(const model::Checkpoint& checkpoint,
                                  const DecoderOptions& options) {
  return plan_of(check(checkpoint.config(), options, needs_strips(checkpoint)));
}

Result<DecoderPlan> Decoder::plan(const model::Config& config, const DecoderOptions& options) {
  return plan_of(check(config, options, false));
}

Result<Decoder> Decoder::create(const model::Checkpoint& checkpoint,
                                const DecoderOptions& options) {
  auto shape = check(checkpoint.config(), options, needs_strips(checkpoint));
  auto plan = plan_of(shape);
  if (!plan) return plan.status();
  Layout layout(*shape);
  auto arena = Arena::create(layout.plan);
  if (!arena) return arena.status();
  try {
    return Decoder(std::make_unique<State>(checkpoint, *std::move(shape), *std::move(plan),
                                           std::move(layout), *std::move(arena)));
  } catch (const std::system_error& error) {
    return Status(
        kResidentDimensionTooLarge,
        "the system refuses " + std::to_string(options.n_threads) + " threads: " + error.what());
  }
}

Status Decoder::forward(std::span<const int32_t> tokens, float* hidden) {
  State& s = *state_;
  const model::Config& c = s.shape.config;
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  if (n_tokens > s.shape.max_ctx - s.position) {
    return {kResidentContextFull,
            std::to_string(n_tokens) + " tokens at position " + std::to_string(s.position) +
                " need more than max_ctx = " + std::to_string(s.shape.max_ctx)};
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= c.vocab) {
      return {kResidentDimensionTooLarge, "token id " + std::to_string(token) +
                                              " is outside the vocabulary of " +
                                              std::to_string(c.vocab)};
    }
  }
  auto* residual = s.arena.slice<float>(s.layout.residual);
  for (int64_t first = 0; first < n_tokens; first += s.shape.max_rows) {
    const int64_t rows = std::min(s.shape.max_rows, n_tokens - first);
    s.pool.run(rows, [&](int64_t row, int) {
      model::dequantize(s.checkpoint.embedding(), tokens[static_cast<size_t>(first + row)], 0,
                        c.d_model, residual + row * c.d_model);
    });
    for (int64_t layer = 0; layer < c.n_layers; ++layer) s.run_layer(layer, rows);
    if (hidden != nullptr) s.norm_rows(residual, s.final_norm, rows, hidden + first * c.d_model);
    s.position += rows;
  }
  return kResidentOk;
}

void Decoder::logits(const float* hidden, int64_t rows, float* logits) {
  State& s = *state_;
  for (int64_t first = 0; first < rows; first += s.shape.max_rows) {
    const int64_t n = std::min(s.shape.max_rows, rows - first);
    s.project(s.checkpoint.head(), hidden + first * s.shape.config.d_model, n, false,
              logits + first * s.shape.config.vocab);
  }
}

int64_t Decoder::position() const { return state_->position; }
void Decoder::reset() { state_->position = 0; }
const DecoderPlan& Decoder::plan() const { return state_->plan; }
cpu::WorkerPool& Decoder::pool() { return state_->pool; }

}  // namespace ullage::session
