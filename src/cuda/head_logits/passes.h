// Which terms one pass over the rows takes: those of one student's softmax and of one teacher's,
// and in textbook distillation, whose student is tempered where its labels' is not, those of two of
// the student's. Most configurations are one pass; of several, each adds its part to the gradient.
#pragma once

#include <vector>

#include "cuda/head_logits/params.h"

namespace ullage::lossk::cuda {

struct Pass {
  double scale = 1;           // a = scale * softcap(z)
  double student_scale = 1;   // beside the teacher; in Family::kTempered another
  int teacher = -1;           // of the head's; -1: none
  double teacher_scale = 1;   // of its logits
  double beta = -1;           // of its Jensen-Shannon terms; -1: none
  std::vector<size_t> terms;  // of the head's, ascending; may be empty of the first pass
};

// The first is of the head's own softmax, which the outputs of rows are of, and has no terms where
// none takes that one.
std::vector<Pass> passes_of(const HeadConfig& config);

// Passes that leave a gradient.
int64_t n_gradients(const std::vector<Pass>& passes);

// The passes' terms alone say what a pass sums.
Family family_of(const HeadConfig& config, const Pass& pass);
// s where a pass's scales differ by 2^s, as they do at the usual temperatures, up to
// kMostSquarings: e^(scale z) is then e^(student_scale z), squared s times, and costs no
// exponential. 0 of others.
inline constexpr int kMostSquarings = 3;
int squarings_of(const Pass& pass);
bool is_sequence_pass(const HeadConfig& config, const Pass& pass);

}  // namespace ullage::lossk::cuda
