// The small kernels around the row kernel: the census before it, the sequences between its two
// launches, the scalars after it. Sums are in float64, each thread over every so-many-th row of a
// part and then a tree, then the parts: an order fixed by n_tok.
#pragma once

#include "cuda/head_logits/row_terms.cuh"

namespace ullage::lossk::cuda {

inline constexpr int kScalarThreads = 1024;

// Calls use(row, load(row)) for this thread's rows of part `part` of `parts`, ascending, with
// kAhead loads under way: a block by itself waits for memory as often as it asks.
template <int kAhead, class Load, class Use>
__device__ inline void for_each_row(int64_t n, int part, int parts, const Load& load,
                                    const Use& use) {
  const int64_t step = int64_t{parts} * blockDim.x;
  int64_t row = int64_t{part} * blockDim.x + threadIdx.x;
  for (; row + (kAhead - 1) * step < n; row += kAhead * step) {
    decltype(load(row)) ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) ahead[k] = load(row + k * step);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) use(row + k * step, ahead[k]);
  }
#pragma unroll 1
  for (; row < n; row += step) use(row, load(row));
}

// The same with an index of each row.
template <int kAhead, class Use>
__device__ inline void for_each_index(const RowIndices& v, int64_t n, int part, int parts,
                                      const Use& use) {
  const auto walk = [&]<class Index>(const Index* data) {
    for_each_row<kAhead>(
        n, part, parts, [&](int64_t row) { return data[row * v.stride]; },
        [&](int64_t row, Index index) { use(row, static_cast<int64_t>(index)); });
  };
  v.id_bytes == 8 ? walk(static_cast<const long long*>(v.data))
                  : walk(static_cast<const int*>(v.data));
}

// All blocks of a launch of one cluster, or of one block, meet.
__device__ inline void blocks_sync() {
#if ULLAGE_SM90
  ullage::cuda::ptx::cluster_sync();
#else
  __syncthreads();
#endif
}

// The sum over the block; in every thread. `scratch`: one double a warp, shared.
__device__ inline double block_sum(double x, double* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += scratch[warp];
  return total;
}

// One cluster, or one block. Counts the rows that divisors count, refuses labels and segment ids
// out of range, and forms each term's gain.
__global__ void __launch_bounds__(kScalarThreads) census(const __grid_constant__ HeadParams p) {
  __shared__ double scratch[kScalarThreads / 32];
  ullage::cuda::ptx::let_next_kernel_start();
  Census& census = *p.census;
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread == 0) {
    census.fault = ~0ull;
    census.finished = 0;
    census.rows_taken = census.clusters_ended = 0;
  }
  for (int64_t s = thread; s < p.n_segments; s += gridDim.x * blockDim.x) p.segment_tokens[s] = 0;
  blocks_sync();

  const bool has_labels = p.labels.data != nullptr;
  const bool weighs = has_labels && p.class_weights.data != nullptr;
  for (int part = blockIdx.x; part < p.parts; part += gridDim.x) {
    int n_labelled = 0, n_masked = 0;
    double label_weights = 0;
    if (has_labels) {
      for_each_index<8>(p.labels, p.n_tok, part, p.parts, [&](int64_t row, int64_t label) {
        if (is_label(p, label)) {
          ++n_labelled;
          if (weighs) label_weights += float_at(p.class_weights, column_of_label(p, label), 1);
        } else if (label >= 0) {
          report(p, row, Fault::kLabel);
        }
      });
    }
    if (p.mask != nullptr) {
      for_each_row<8>(
          p.n_tok, part, p.parts, [&](int64_t row) { return p.mask[row]; },
          [&](int64_t, uint8_t mark) { n_masked += mark != 0; });
    }
    if (p.segments.data != nullptr) {
      for_each_index<8>(p.segments, p.n_tok, part, p.parts, [&](int64_t row, int64_t segment) {
        if (has_labels && !has_label(p, row)) return;
        if (segment < 0 || segment >= p.n_segments) {
          report(p, row, Fault::kSegment);
        } else {
          atomicAdd(&p.segment_tokens[segment], 1);
        }
      });
    }
    if (!weighs) label_weights = n_labelled;
    const Census::Part sums{block_sum(n_labelled, scratch), block_sum(n_masked, scratch),
                            block_sum(label_weights, scratch)};
    if (threadIdx.x == 0) census.parts[part] = sums;
  }
  blocks_sync();
  if (blockIdx.x != 0) return;
  double n_labelled = 0, n_masked = 0, label_weights = 0;
  for (int part = 0; part < p.parts; ++part) {
    const volatile Census::Part& sums = census.parts[part];
    n_labelled += sums.n_labelled;
    n_masked += sums.n_masked;
    label_weights += sums.label_weights;
  }
  if (!has_labels) n_labelled = static_cast<double>(p.n_tok);

  double all_class_weights = p.smoothed_columns;
  if (p.wants_smoothing && p.class_weights.data != nullptr) {
    double sum = 0;
    for (int64_t j = threadIdx.x; j < p.vocab; j += blockDim.x) {
      sum += p.class_weights.data[j * p.class_weights.stride];
    }
    all_class_weights = block_sum(sum, scratch);
  }
  for (int64_t pair = threadIdx.x; pair < p.n_pairs; pair += blockDim.x) {
    const int64_t chosen = index_at(p.pairs, 2 * pair), rejected = index_at(p.pairs, 2 * pair + 1);
    if (chosen < 0 || chosen >= p.n_segments || rejected < 0 || rejected >= p.n_segments ||
        chosen == rejected) {
      report(p, pair, Fault::kPair);
    }
  }
  if (threadIdx.x == 0) {
    census.n_labelled = static_cast<long long>(n_labelled);
    census.all_class_weights = all_class_weights;
    if (p.n_valid != nullptr) *p.n_valid = static_cast<int64_t>(n_labelled);
  }
  if (threadIdx.x < p.n_terms) {
    const TermParams& term = p.terms[threadIdx.x];
    double divisor = term.divisor;
    if (term.census_divisor) {
      divisor = term.kind == LossKind::kCrossEntropy ? label_weights
                : term.mask == RowMask::kLabels      ? n_labelled
                : term.mask == RowMask::kOwn         ? n_masked
                                                     : static_cast<double>(p.n_tok);
    }
    const double inverse = divisor == 0 ? 0 : 1 / divisor;
    census.inverse_divisor[threadIdx.x] = inverse;
    census.gain[threadIdx.x] = static_cast<float>(p.upstream * term.weight * inverse);
  }
}

// The labels' log-probabilities under the term's softmax, [n].
__device__ inline const float* log_probs_of(const HeadParams& p, const TermParams& term) {
  return p.row_log_prob + term.pass * p.n_tok;
}

// A block a segment: for each sequence term the sums over its labelled rows.
__global__ void __launch_bounds__(kScalarThreads)
    sum_sequences(const __grid_constant__ HeadParams p) {
  __shared__ double scratch[kScalarThreads / 32];
  const int64_t segment = blockIdx.x;
  for (int t = 0; t < p.n_terms; ++t) {
    const TermParams& term = p.terms[t];
    if (term.sequence < 0) continue;
    const RowFloats& base = term.kind == LossKind::kDpo ? p.reference_log_probs : p.old_log_probs;
    const float* const log_prob = log_probs_of(p, term);
    double log_ratio = 0, advantage = 0;
    for_each_row<8>(
        p.n_tok, 0, 1, [&](int64_t row) { return index_bits_at(p.segments, row); },
        [&](int64_t row, uint64_t bits) {
          if (as_index(p.segments, bits) != segment || !has_label(p, row)) return;
          log_ratio += static_cast<double>(log_prob[row]) - float_at(base, row, 0);
          advantage += float_at(p.advantages, row, 0);
        });
    log_ratio = block_sum(log_ratio, scratch);
    advantage = block_sum(advantage, scratch);
    if (threadIdx.x == 0) {
      double* sums = p.segment_sums + term.sequence * 2 * p.n_segments;
      sums[segment] = log_ratio;
      sums[p.n_segments + segment] = advantage;
    }
  }
}

// A pair's margin: chosen minus rejected. False where the census refused the pair.
__device__ inline bool margin_of_pair(const HeadParams& p, const double* log_ratios, int64_t pair,
                                      int64_t& chosen, int64_t& rejected, double& margin) {
  chosen = index_at(p.pairs, 2 * pair), rejected = index_at(p.pairs, 2 * pair + 1);
  if (chosen < 0 || chosen >= p.n_segments || rejected < 0 || rejected >= p.n_segments ||
      chosen == rejected) {
    return false;
  }
  margin = log_ratios[chosen] - log_ratios[rejected];
  return true;
}

// The slope of a sequence's loss in the log-probability of each of its labels, summed over the
// pairs it is in.
__device__ inline double preference_slope(const HeadParams& p, const TermParams& term,
                                          const double* log_ratios, int64_t segment) {
  double slope = 0;
  for (int64_t pair = 0; pair < p.n_pairs; ++pair) {
    int64_t chosen, rejected;
    double margin;
    if (!margin_of_pair(p, log_ratios, pair, chosen, rejected, margin)) continue;
    if (segment != chosen && segment != rejected) continue;
    const double of_margin = preference_loss(margin, static_cast<double>(term.beta)).slope;
    slope += segment == chosen ? of_margin : -of_margin;
  }
  return slope;
}

// A thread a row: the sequence terms' row losses and slopes.
__global__ void __launch_bounds__(256) slope_sequences(const __grid_constant__ HeadParams p) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= p.n_tok) return;
  const int64_t segment = has_label(p, row) ? segment_of(p, row) : -1;
  for (int t = 0; t < p.n_terms; ++t) {
    const TermParams& term = p.terms[t];
    if (term.sequence < 0) continue;
    const double* sums = p.segment_sums + term.sequence * 2 * p.n_segments;
    TokenLoss<double> token{0, 0};
    if (segment >= 0 && term.kind == LossKind::kDpo) {
      token.slope = preference_slope(p, term, sums, segment);
    } else if (segment >= 0) {
      const double n = p.segment_tokens[segment];
      token = clipped_ratio_loss(sums[segment] / n, sums[p.n_segments + segment] / n,
                                 static_cast<double>(term.epsilon_low),
                                 static_cast<double>(term.epsilon_high));
      if (term.kl_beta > 0) {
        const TokenLoss<double> penalty =
            k3_penalty(static_cast<double>(log_probs_of(p, term)[row]),
                       static_cast<double>(float_at(p.reference_log_probs, row, 0)));
        token.loss += term.kl_beta * penalty.loss;
        token.slope += term.kl_beta * penalty.slope;
      }
      if (term.per_segment_mean) token.loss /= n, token.slope /= n;
    }
    p.row_losses[t * p.n_tok + row] = static_cast<float>(token.loss);
    p.row_slopes[term.sequence * p.n_tok + row] = static_cast<float>(token.slope);
  }
}

// One term's metrics (head.h, PolicyMetrics), by one block.
__device__ inline void policy_metrics(const HeadParams& p, int t, double* scratch) {
  const TermParams& term = p.terms[t];
  const bool gspo = term.kind == LossKind::kGspo;
  const double low = 1 - static_cast<double>(term.epsilon_low);
  const double high = 1 + static_cast<double>(term.epsilon_high);
  const float* const log_prob = log_probs_of(p, term);
  const float* const entropy = p.row_entropy + term.pass * p.n_tok;
  PolicyMetrics sum{};
  double largest = -INFINITY, smallest = INFINITY;
  for (int64_t row = threadIdx.x; row < p.n_tok; row += blockDim.x) {
    if (!has_label(p, row)) continue;
    const int64_t segment = p.segments.data == nullptr ? 0 : segment_of(p, row);
    if (segment < 0) continue;
    const double n = p.segments.data == nullptr ? static_cast<double>(p.census->n_labelled)
                                                : static_cast<double>(p.segment_tokens[segment]);
    const double row_advantage = float_at(p.advantages, row, 0);
    const double old_log_prob = float_at(p.old_log_probs, row, 0);
    double log_ratio = log_prob[row] - old_log_prob, advantage = row_advantage;
    if (gspo) {
      const double* sums = p.segment_sums + term.sequence * 2 * p.n_segments;
      log_ratio = sums[segment] / n;
      advantage = sums[p.n_segments + segment] / n;
    }
    const double ratio = exp(log_ratio), weight = 1 / n, ratio_weight = gspo ? weight : 1;
    sum.old_log_probs += weight * old_log_prob;
    sum.new_log_probs += weight * log_prob[row];
    sum.ratio += weight * ratio;
    sum.kl += weight * (expm1(log_ratio) - log_ratio);
    sum.clipped += ratio < low || ratio > high ? weight : 0;
    sum.advantage += weight * advantage;
    sum.entropy += weight * entropy[row];
    sum.ratio_sum += ratio_weight * ratio;
    sum.ratio_squared_sum += ratio_weight * ratio * ratio;
    largest = fmax(largest, row_advantage);
    smallest = fmin(smallest, row_advantage);
  }
  double n_segments = 0;
  for (int64_t s = threadIdx.x; s < p.n_segments; s += blockDim.x) {
    n_segments += p.segment_tokens[s] > 0 ? 1 : 0;
  }
  if (p.segments.data == nullptr) {
    n_segments = threadIdx.x == 0 && p.census->n_labelled > 0 ? 1 : 0;
  }
  double* const fields[] = {
      &sum.old_log_probs,     &sum.new_log_probs, &sum.ratio,   &sum.kl,
      &sum.clipped,           &sum.advantage,     &sum.entropy, &sum.ratio_sum,
      &sum.ratio_squared_sum, &n_segments};
#pragma unroll
  for (double* field : fields) *field = block_sum(*field, scratch);
  // Extrema: a tree as well, in scratch.
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = fmax(largest, __shfl_xor_sync(~0u, largest, step));
    smallest = fmin(smallest, __shfl_xor_sync(~0u, smallest, step));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) largest = fmax(largest, scratch[warp]);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = smallest;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) smallest = fmin(smallest, scratch[warp]);
  if (threadIdx.x != 0) return;
  sum.max_advantage = largest;
  sum.min_advantage = smallest;
  sum.n_tokens = p.census->n_labelled;
  sum.n_segments = static_cast<int64_t>(n_segments);
  p.policy_metrics[t] = sum;
}

// A block a term and part of the rows; in the last to finish, the scalars and their total. Further
// blocks write the rows' token losses.
__global__ void __launch_bounds__(kScalarThreads) scalars(const __grid_constant__ HeadParams p) {
  __shared__ double scratch[kScalarThreads / 32];
  ullage::cuda::ptx::wait_for_previous_kernel();
  const int of_scalars = p.n_terms * p.parts, block = static_cast<int>(blockIdx.x);
  if (block >= of_scalars) {
    const int64_t row = int64_t{block - of_scalars} * blockDim.x + threadIdx.x;
    if (row >= p.n_tok) return;
    double loss = 0;
    for (int t = 0; t < p.n_terms; ++t) {
      if (p.terms[t].weight != 0) loss += p.terms[t].weight * p.row_losses[t * p.n_tok + row];
    }
    p.token_loss.data[row * p.token_loss.stride] = static_cast<float>(loss);
    return;
  }
  const int t = block / p.parts, part = block % p.parts;
  const TermParams& term = p.terms[t];
  double sum = 0;
  if (term.kind == LossKind::kDpo) {
    const double* log_ratios = p.segment_sums + term.sequence * 2 * p.n_segments;
    for (int64_t pair = threadIdx.x; part == 0 && pair < p.n_pairs; pair += blockDim.x) {
      int64_t chosen, rejected;
      double margin;
      if (!margin_of_pair(p, log_ratios, pair, chosen, rejected, margin)) continue;
      sum += preference_loss(margin, static_cast<double>(term.beta)).loss;
    }
  } else {
    const float* const losses = p.row_losses + t * p.n_tok;
    for_each_row<16>(
        p.n_tok, part, p.parts, [&](int64_t row) { return losses[row]; },
        [&](int64_t, float loss) { sum += loss; });
  }
  sum = block_sum(sum, scratch);
  if (term.wants_metrics && part == 0) policy_metrics(p, t, scratch);
  if (threadIdx.x != 0) return;
  Census& census = *p.census;
  census.scalar_parts[t][part] = sum;
  __threadfence();
  if (atomicAdd(&census.finished, 1u) + 1 != of_scalars) return;
  __threadfence();
  double total = 0;
  for (int i = 0; i < p.n_terms; ++i) {
    const volatile double* const sums = census.scalar_parts[i];
    double whole = 0;
    for (int each = 0; each < p.parts; ++each) whole += sums[each];
    const double inverse = census.inverse_divisor[i];
    const double scalar = inverse == 0 ? 0 : whole * inverse;
    if (p.term_scalars != nullptr) p.term_scalars[i] = scalar;
    if (p.terms[i].weight != 0) total += p.terms[i].weight * scalar;
  }
  if (p.total != nullptr) *p.total = total;
}

}  // namespace ullage::lossk::cuda
