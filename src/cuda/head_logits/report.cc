#include "cuda/head_logits/report.h"

#include <string>

#include "contract/describe.h"
#include "cuda/head_logits/launch.h"

namespace ullage::lossk::cuda {

Status check_workspace(std::span<const std::byte> workspace, int64_t needed_bytes) {
  const auto given = static_cast<int64_t>(workspace.size());
  if (given < needed_bytes || (needed_bytes > 0 && workspace.data() == nullptr)) {
    return {kLossLengthMismatch, "workspace has " + describe(given) +
                                     " bytes; accepted: " + describe(needed_bytes) + " or more"};
  }
  if (reinterpret_cast<uintptr_t>(workspace.data()) % 256 != 0) {
    return {kHeadShapeMismatch, "workspace does not start at a multiple of 256 bytes"};
  }
  return kHeadOk;
}

Status report_census(const Census* device, const LabelRange& labels, CUstream_st* stream) {
  Census census{};
  if (Status status = read_census(device, census, stream); !status.ok()) return status;
  if (census.fault == ~0ull) return kCudaOk;
  const std::string row = describe(census.fault >> 8);
  switch (static_cast<Fault>(census.fault & 0xff)) {
    case Fault::kLabel:
      return {kLossTargetOutOfRange,
              "labels[" + row + "] is outside the vocabulary; accepted: " + describe(labels.first) +
                  " to " + describe(labels.last) + ", or negative to ignore the row"};
    case Fault::kSegment:
      return {kHeadBadSegments,
              "segments[" + row + "] is outside 0 to n_segments - 1, and the row has a label"};
    case Fault::kPair:
      return {kHeadBadPairs, "pair " + row + " does not name two existing segments"};
    case Fault::kTopK:
      return {kHeadBadTopK, "row " + row +
                                " of the top-k teacher has an id outside the vocabulary, an id "
                                "twice or a log-probability above 0"};
    default:
      return {kCudaNonFinite, "row " + row + " has a NaN or +inf logit"};
  }
}

}  // namespace ullage::lossk::cuda
