#include "ullage/residentk/probe.h"

#include <gtest/gtest.h>

#include "runtime/device_presence.h"

namespace ullage::residentk {
namespace {

// Whatever this build and host are, the facts and the status must fit together.
TEST(Probe, TheAnswerFitsTheFacts) {
  const ResidentProbe probe = resident_session_probe(1024, 16, 8, 128, 3072, 28, 151936);
  EXPECT_EQ(probe.dispatch_budget, 171);
  EXPECT_EQ(probe.resident_f32_elems, 625410048);
  EXPECT_EQ(probe.kernels_compiled, resident_gpu_kernels_compiled());
  EXPECT_EQ(probe.session_possible, resident_available());
  EXPECT_EQ(resident_available(),
            resident_gpu_kernels_compiled() && runtime::cuda_device_count() > 0);
  EXPECT_EQ(probe.status, !resident_gpu_kernels_compiled() ? 604
                          : !resident_available()          ? 605
                                                           : 600);
#ifndef ULLAGE_ENABLE_CUDA
  EXPECT_EQ(probe.status, 604);
  EXPECT_FALSE(probe.device_present);
#endif
}

TEST(Probe, AShapeRefusalComesFirst) {
  const ResidentProbe probe = resident_session_probe(1024, 5, 2, 128, 3072, 2, 151936);
  EXPECT_EQ(probe.status, 603);
  EXPECT_FALSE(probe.session_possible);
}

}  // namespace
}  // namespace ullage::residentk
