// The scalar half of the algebra: from a row's few numbers to its loss and to the slope of that
// loss in lp, the label's log-probability. Every label-family gradient is slope * ([j = y] - q_j),
// so a term adds
//   P -= gain * slope,  L -= gain * slope   to   grad_j = P q_j - L [j = y].
// Shared by the CPU and the CUDA kernels; the float64 oracle has its own spelling and the tests
// hold the two together.
#pragma once

#ifdef __CUDACC__
#define ULLAGE_HOST_DEVICE __host__ __device__
#else
#include <cmath>
#define ULLAGE_HOST_DEVICE
#endif

namespace ullage::lossk {

template <class T>
struct TokenLoss {
  T loss;
  T slope;  // d loss / d lp
};

// -min(r A, clip(r) A) with r = e^(lp - lp_old), clip to [1 - epsilon_low, 1 + epsilon_high]. The
// slope is that of the active branch; the comparisons are inclusive: a ratio at the clip bound
// itself still has a slope.
template <class T>
ULLAGE_HOST_DEVICE TokenLoss<T> clipped_ratio_loss(T log_ratio, T advantage, T epsilon_low,
                                                   T epsilon_high) {
  const T low = T(1) - epsilon_low, high = T(1) + epsilon_high;
  const T ratio = exp(log_ratio);
  const T clipped = ratio < low ? low : (ratio > high ? high : ratio);
  const T free_gain = ratio * advantage, clipped_gain = clipped * advantage;
  const bool active = advantage >= T(0) ? ratio <= high : ratio >= low;
  return {-(free_gain < clipped_gain ? free_gain : clipped_gain), active ? -free_gain : T(0)};
}

// -clip(r) A lp with clip(r) held constant (https://arxiv.org/abs/2506.13585, equation 4).
template <class T>
ULLAGE_HOST_DEVICE TokenLoss<T> clipped_weight_loss(T lp, T log_ratio, T advantage, T epsilon_low,
                                                    T epsilon_high) {
  const T low = T(1) - epsilon_low, high = T(1) + epsilon_high;
  const T ratio = exp(log_ratio);
  const T weight = (ratio < low ? low : (ratio > high ? high : ratio)) * advantage;
  return {-weight * lp, -weight};
}

// k3 = e^d - d - 1 with d = lp_reference - lp: an unbiased, non-negative estimate of KL(q |
// reference) (http://joschu.net/blog/kl-approx.html). expm1 keeps small d exact.
template <class T>
ULLAGE_HOST_DEVICE TokenLoss<T> k3_penalty(T lp, T lp_reference) {
  const T d = lp_reference - lp;
  const T grown = expm1(d);
  return {grown - d, -grown};
}

// -ln sigmoid(beta * margin), margin = (chosen - rejected) of policy minus reference; slope in the
// margin.
template <class T>
ULLAGE_HOST_DEVICE TokenLoss<T> preference_loss(T margin, T beta) {
  const T x = beta * margin;
  const T e = exp(x < T(0) ? x : -x);  // in (0, 1]: neither branch overflows
  const T loss = log1p(e) + (x < T(0) ? -x : T(0));
  const T sigmoid_minus = x < T(0) ? T(1) / (T(1) + e) : e / (T(1) + e);
  return {loss, -beta * sigmoid_minus};
}

}  // namespace ullage::lossk
