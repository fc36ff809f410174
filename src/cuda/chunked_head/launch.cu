#include <algorithm>

#include "cuda/chunked_head/launch.h"
#include "cuda/chunked_head/matrix_kernels.cuh"
#include "cuda/cuda_status.h"

namespace ullage::lossk::cuda {
namespace {

using ullage::cuda::Cublas;
using ullage::cuda::ProductShape;

constexpr unsigned kThreads = 256;

unsigned blocks_of(int64_t items) {
  return static_cast<unsigned>((items + kThreads - 1) / kThreads);
}

std::byte* element_of(const Operand& matrix, DType dtype, int64_t element) {
  return static_cast<std::byte*>(matrix.data) + element * size_of(dtype);
}
Operand rows_from(const Operand& matrix, DType dtype, int64_t row) {
  return {element_of(matrix, dtype, row * matrix.stride), matrix.stride};
}

// Calls with a null pointer of the type.
template <class Call>
Status for_type(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kBF16:
      return call(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kF16:
      return call(static_cast<__half*>(nullptr));
    default:
      return call(static_cast<float*>(nullptr));
  }
}

// One run: a chunk's logits, then what follows from their gradient.
class Chunks {
 public:
  Chunks(const HeadParams& rows, std::span<const RowPass> passes, const ChunkedParams& p,
         const Cublas& blas, const ChunkedAlgorithms::Set& algorithms, cudaStream_t stream)
      : rows_(rows),
        passes_(passes),
        p_(p),
        layout_(p.layout),
        blas_(blas),
        algorithms_(algorithms),
        stream_(stream),
        logits_{p.logits, layout_.logits_stride},
        gradient_{p.gradient == nullptr ? p.logits : p.gradient, layout_.logits_stride},
        adapter_rows_{p.adapter_rows, layout_.rank_stride},
        adapter_row_gradient_{p.adapter_row_gradient, layout_.rank_stride} {}

  Status run() {
    ULLAGE_RETURN_IF_REFUSED(launch_census(rows_, stream_));
    const bool sequences = rows_.n_sequence_terms > 0 && layout_.n_tok > 0;
    if (sequences) {
      // A sequence's slope needs the log-probabilities of all its rows.
      for (int64_t first = 0; first < layout_.n_tok; first += layout_.chunk) {
        take_chunk(first);
        ULLAGE_RETURN_IF_REFUSED(make_logits());
        for (const RowPass& pass : passes_) {
          if (!pass.sequences && layout_.gradients()) continue;
          ULLAGE_RETURN_IF_REFUSED(reduce_rows(pass, false, false));
        }
      }
      ULLAGE_RETURN_IF_REFUSED(launch_sequences(rows_, stream_));
      rows_.slopes_ready = true;
    }
    const bool again = layout_.gradients() || !sequences;
    for (int64_t first = 0; first < layout_.n_tok && again; first += layout_.chunk) {
      take_chunk(first);
      const bool kept = sequences && layout_.n_chunks == 1;
      if (!kept) ULLAGE_RETURN_IF_REFUSED(make_logits());
      ULLAGE_RETURN_IF_REFUSED(reduce_chunk());
      ULLAGE_RETURN_IF_REFUSED(add_gradients());
    }
    for (const SummedGradient* each :
         {&p_.d_weight, &p_.d_bias, &p_.d_adapter_a, &p_.d_adapter_b}) {
      ULLAGE_RETURN_IF_REFUSED(finish(*each));
    }
    return launch_scalars(rows_, stream_);
  }

 private:
  void take_chunk(int64_t first) {
    rows_.first_row = first;
    rows_.n_rows = std::min(layout_.chunk, layout_.n_tok - first);
    hidden_ = layout_.copies_hidden() ? Operand{p_.hidden_rows, layout_.d_model}
                                      : rows_from(p_.hidden, layout_.dtype, first);
  }

  // c = alpha a b, or c += it, over the rows of the chunk.
  Status multiply(Product product, float alpha, const Operand& a, const Operand& b, bool adds,
                  const Operand& c) const {
    const VocabRole role = vocab_role(product);
    const bool whole = role == VocabRole::kNone;
    for (int part = whole ? 1 : 0; part < kVocabParts; ++part) {
      const Columns columns = vocab_part(layout_.vocab, part);
      if (!whole && columns.count == 0) continue;
      ProductShape shape = product_shape(layout_, product, rows_.n_rows, columns.count);
      shape.a_stride = a.stride;
      shape.b_stride = b.stride;
      shape.c_stride = c.stride;
      // Where the part begins: at a column or at a row.
      const int64_t column = whole ? 0 : columns.first;
      const int64_t a_at = role == VocabRole::kK || role == VocabRole::kM ? column : 0;
      const int64_t b_at = role == VocabRole::kN || role == VocabRole::kK ? column * b.stride : 0;
      const int64_t c_at = role == VocabRole::kN   ? column
                           : role == VocabRole::kM ? column * c.stride
                                                   : 0;
      ULLAGE_RETURN_IF_REFUSED(blas_.multiply(
          shape, algorithms_[static_cast<size_t>(product)][static_cast<size_t>(part)], alpha,
          element_of(a, shape.in, a_at), element_of(b, shape.in, b_at), adds ? 1.0f : 0.0f,
          element_of(c, shape.out, c_at), stream_));
      if (role == VocabRole::kK) adds = true;
    }
    return kCudaOk;
  }

  // The student's, small parts first so that the last and largest product rounds the sum, and those
  // of a teacher given by its hidden states.
  Status make_logits() {
    bool adds = layout_.bias;
    if (layout_.copies_hidden()) ULLAGE_RETURN_IF_REFUSED(copy_hidden());
    if (layout_.bias) ULLAGE_RETURN_IF_REFUSED(start_bias());
    if (layout_.rank > 0) {
      ULLAGE_RETURN_IF_REFUSED(multiply(Product::kAdapterRows, p_.adapter_scale, hidden_,
                                        p_.adapter_a, false, adapter_rows_));
      ULLAGE_RETURN_IF_REFUSED(
          multiply(Product::kAdapterLogits, 1, adapter_rows_, p_.adapter_b, adds, logits_));
      adds = true;
    }
    ULLAGE_RETURN_IF_REFUSED(multiply(Product::kLogits, 1, hidden_, p_.weight, adds, logits_));
    if (layout_.teacher_d_model == 0) return kCudaOk;
    const Operand hidden = rows_from(p_.teacher_hidden, layout_.teacher_dtype, rows_.first_row);
    return multiply(Product::kTeacherLogits, 1, hidden, p_.teacher_weight, false,
                    {p_.teacher_logits, layout_.logits_stride});
  }

  Status copy_hidden() const {
    const auto copy = [&]<class T>(T*) -> Status {
      chunked_hidden_rows<<<static_cast<unsigned>(rows_.n_rows), kThreads, 0, stream_>>>(
          rows_, static_cast<const T*>(p_.hidden.data), p_.hidden.stride, layout_.d_model,
          static_cast<T*>(p_.hidden_rows));
      ULLAGE_RETURN_IF_CUDA_FAILS("chunked_head hidden rows", cudaGetLastError());
      return kCudaOk;
    };
    return size_of(layout_.dtype) == 2 ? copy(static_cast<uint16_t*>(nullptr))
                                       : copy(static_cast<float*>(nullptr));
  }

  Status start_bias() const {
    return for_type(layout_.dtype, [&]<class T>(T*) -> Status {
      chunked_bias_rows<<<static_cast<unsigned>(rows_.n_rows), kThreads, 0, stream_>>>(
          p_.bias, layout_.vocab, static_cast<T*>(logits_.data), logits_.stride);
      ULLAGE_RETURN_IF_CUDA_FAILS("chunked_head bias", cudaGetLastError());
      return kCudaOk;
    });
  }

  // The chunk's losses and the gradient of its logits, which may take their place.
  Status reduce_chunk() const {
    bool adds = false;
    for (const RowPass& pass : passes_) {
      const bool gradient = pass.gradient && layout_.gradients();
      ULLAGE_RETURN_IF_REFUSED(reduce_rows(pass, gradient, adds));
      adds |= gradient;
    }
    return kCudaOk;
  }

  Status reduce_rows(const RowPass& pass, bool gradient, bool adds) const {
    HeadParams window = pass.params;
    window.first_row = rows_.first_row;
    window.n_rows = rows_.n_rows;
    window.slopes_ready = rows_.slopes_ready;
    window.logits = logits_.data;
    window.logits_stride = window.gradient_stride = layout_.logits_stride;
    window.gradient = gradient ? gradient_.data : nullptr;
    window.accumulate = adds;
    if (window.teacher != nullptr) {
      window.teacher = static_cast<const std::byte*>(window.teacher) +
                       rows_.first_row * window.teacher_stride * size_of(layout_.dtype);
    } else if (has_teacher(pass.launch.family)) {
      window.teacher = p_.teacher_logits;
      window.teacher_stride = layout_.logits_stride;
    }
    return launch_rows(window, pass.launch, stream_);
  }

  Status add_gradients() const {
    const float unscaled = 1 / p_.gradient_scale;
    if (has_product(layout_, Product::kAdapterRowGradient)) {
      ULLAGE_RETURN_IF_REFUSED(multiply(Product::kAdapterRowGradient, p_.adapter_scale, gradient_,
                                        p_.adapter_b, false, adapter_row_gradient_));
    }
    if (layout_.d_hidden) ULLAGE_RETURN_IF_REFUSED(make_hidden_gradient(unscaled));
    const struct {
      Product product;
      const SummedGradient& gradient;
      const Operand &a, &b;
    } sums[] = {{Product::kWeightGradient, p_.d_weight, gradient_, hidden_},
                {Product::kAdapterAGradient, p_.d_adapter_a, adapter_row_gradient_, hidden_},
                {Product::kAdapterBGradient, p_.d_adapter_b, gradient_, adapter_rows_}};
    for (const auto& each : sums) {
      if (!has_product(layout_, each.product)) continue;
      ULLAGE_RETURN_IF_REFUSED(multiply(each.product, unscaled, each.a, each.b,
                                        keeps_old(each.gradient), summed_in(each.gradient)));
    }
    return layout_.d_bias ? add_bias_gradient(unscaled) : Status(kCudaOk);
  }

  Status make_hidden_gradient(float unscaled) const {
    const Operand out = rows_from(p_.d_hidden, p_.d_hidden_dtype, rows_.first_row);
    const bool rounds = p_.d_hidden_sum != nullptr;
    const Operand to = rounds ? Operand{p_.d_hidden_sum, layout_.d_model} : out;
    bool adds = !rounds && p_.accumulate;
    if (layout_.rank > 0) {
      ULLAGE_RETURN_IF_REFUSED(multiply(Product::kAdapterHiddenGradient, unscaled,
                                        adapter_row_gradient_, p_.adapter_a, adds, to));
      adds = true;
    }
    ULLAGE_RETURN_IF_REFUSED(
        multiply(Product::kHiddenGradient, unscaled, gradient_, p_.weight, adds, to));
    return rounds
               ? round_rows(p_.d_hidden_sum, rows_.n_rows, layout_.d_model, out, p_.d_hidden_dtype)
               : Status(kCudaOk);
  }

  Status add_bias_gradient(float unscaled) const {
    const Operand to = summed_in(p_.d_bias);
    return for_type(layout_.dtype, [&]<class T>(T*) -> Status {
      chunked_column_sums<<<blocks_of(layout_.vocab), kThreads, 0, stream_>>>(
          static_cast<const T*>(gradient_.data), gradient_.stride, rows_.n_rows, layout_.vocab,
          unscaled, keeps_old(p_.d_bias), static_cast<float*>(to.data), to.stride);
      ULLAGE_RETURN_IF_CUDA_FAILS("chunked_head d_bias", cudaGetLastError());
      return kCudaOk;
    });
  }

  Operand summed_in(const SummedGradient& g) const {
    return g.sum == nullptr ? g.out : Operand{g.sum, g.cols};
  }
  // Whether this chunk is added to what lies there.
  bool keeps_old(const SummedGradient& g) const {
    return rows_.first_row > 0 || (p_.accumulate && g.sum == nullptr);
  }

  // Sums to the caller's type; zeros where no row was added.
  Status finish(const SummedGradient& g) const {
    if (g.out.data == nullptr) return kCudaOk;
    if (layout_.n_tok == 0) {
      if (p_.accumulate) return kCudaOk;
      const auto size = static_cast<size_t>(size_of(g.dtype));
      ULLAGE_RETURN_IF_CUDA_FAILS(
          "chunked_head gradients of no rows",
          cudaMemset2DAsync(g.out.data, static_cast<size_t>(g.out.stride) * size, 0,
                            static_cast<size_t>(g.cols) * size, static_cast<size_t>(g.rows),
                            stream_));
      return kCudaOk;
    }
    return g.sum == nullptr ? Status(kCudaOk) : round_rows(g.sum, g.rows, g.cols, g.out, g.dtype);
  }

  Status round_rows(const float* sums, int64_t rows, int64_t cols, const Operand& to,
                    DType dtype) const {
    return for_type(dtype, [&]<class T>(T*) -> Status {
      chunked_round_rows<<<static_cast<unsigned>(rows), kThreads, 0, stream_>>>(
          sums, cols, static_cast<T*>(to.data), to.stride, p_.accumulate);
      ULLAGE_RETURN_IF_CUDA_FAILS("chunked_head rounding", cudaGetLastError());
      return kCudaOk;
    });
  }

  HeadParams rows_;
  const std::span<const RowPass> passes_;
  const ChunkedParams& p_;
  const ChunkedLayout& layout_;
  const Cublas& blas_;
  const ChunkedAlgorithms::Set& algorithms_;
  cudaStream_t stream_;
  const Operand logits_, gradient_, adapter_rows_, adapter_row_gradient_;
  Operand hidden_;  // the chunk's rows, as its products read them
};

// While a stream is captured, calls that a capture forbids (a handle takes device memory) are
// allowed on this thread.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

Status ChunkedAlgorithms::choose(const ChunkedLayout& layout, const Cublas*& blas,
                                 const Set*& set) {
  const RelaxedCapture relaxed;
  int device = 0;
  const Result<const Cublas*> found = Cublas::of_current_device(device);
  if (!found) return found.status();
  blas = *found;
  const std::lock_guard lock(mutex_);
  auto at = sets_.find(device);
  if (at == sets_.end()) {
    Set chosen;
    for (int i = 0; i < kProducts * kVocabParts && layout.n_tok > 0; ++i) {
      const auto product = static_cast<Product>(i / kVocabParts);
      const int part = i % kVocabParts;
      const int64_t columns = vocab_part(layout.vocab, part).count;
      const bool whole = vocab_role(product) == VocabRole::kNone;
      if (!has_product(layout, product) || (whole ? part == 0 : columns == 0)) continue;
      ProductShape shapes[4];
      const auto rows = reference_rows(layout, product);
      std::transform(rows.begin(), rows.end(), shapes,
                     [&](int64_t n) { return product_shape(layout, product, n, columns); });
      const auto algorithm = blas->choose(shapes);
      if (!algorithm) return algorithm.status();
      chosen[static_cast<size_t>(product)][static_cast<size_t>(part)] = *algorithm;
    }
    at = sets_.emplace(device, chosen).first;
  }
  set = &at->second;
  return kCudaOk;
}

Status launch_chunked_head(const HeadParams& rows, std::span<const RowPass> passes,
                           const ChunkedParams& chunked, ChunkedAlgorithms& algorithms,
                           CUstream_st* stream) {
  const Cublas* blas = nullptr;
  const ChunkedAlgorithms::Set* set = nullptr;
  ULLAGE_RETURN_IF_REFUSED(algorithms.choose(chunked.layout, blas, set));
  return Chunks(rows, passes, chunked, *blas, *set, stream).run();
}

}  // namespace ullage::lossk::cuda
