// Runs a plan of the losses from hidden states, as a caller does or recorded in a CUDA graph.
#pragma once

#include <span>

#include "cuda/device_memory.h"
#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::test {

struct PlanRun {
  Status ran = kHeadOk, checked = kHeadOk;
};

// capture: through a graph, whose nodes are as many as the plan's launches.
inline PlanRun run_plan(const lossk::CudaLinearHeadPlan& plan, const lossk::Inputs& inputs,
                        const lossk::Outputs& outputs, std::span<std::byte> workspace,
                        bool capture) {
  PlanRun run;
  if (!capture) {
    run.ran = plan.run(nullptr, inputs, outputs, workspace);
    if (run.ran.ok()) run.checked = plan.check(nullptr, workspace);
    return run;
  }
  cudaStream_t stream;
  expect_cuda(cudaStreamCreate(&stream));
  expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run.ran = plan.run(stream, inputs, outputs, workspace);
  cudaGraph_t graph;
  expect_cuda(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  expect_cuda(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(static_cast<int>(nodes), plan.launches());
  cudaGraphExec_t executable;
  expect_cuda(cudaGraphInstantiate(&executable, graph, 0));
  expect_cuda(cudaGraphLaunch(executable, stream));
  run.checked = plan.check(stream, workspace);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return run;
}

}  // namespace ullage::test
