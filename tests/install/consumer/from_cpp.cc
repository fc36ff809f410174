#include <ullage/lossk/contract.h>
#include <ullage/lossk/cross_entropy.h>
#include <ullage/residentk/contract.h>
#include <ullage/residentk/probe.h>
#include <ullage/status.h>

#include <cmath>
#include <vector>

int main() {
  using namespace ullage;
  const std::vector<double> logits(9, 0.25);
  const std::vector<int64_t> targets = {4};
  const auto ce = lossk::ce_from_logits_flat(logits, targets, 1, 9);
  const auto probe = residentk::resident_session_probe(1024, 5, 2, 128, 3072, 2, 151936);
  const bool ok = ce.mean_loss == std::log(9.0) && probe.status == kResidentHeadGeometry &&
                  lossk::loss_chunk_check(2048, 151936) == kLossBadChunk &&
                  residentk::residentk_dispatch_budget(28) == 171 &&
                  !Status(kLossBadChunk, "2048").to_string().empty();
  return ok ? 0 : 1;
}
