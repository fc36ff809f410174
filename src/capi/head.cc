#include "ullage/head.h"

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/head_device.h"
#include "capi/head_request.h"
#include "capi/head_views.h"
#include "cuda/scale.h"

using ullage::Status;

struct ullage_head_plan {
  std::unique_ptr<const ullage::capi::HeadOnDevice> head;
  std::string json;
  int64_t workspace_bytes = 0;
  int64_t status_bytes = 0;

  mutable std::mutex
      turn;  // of runs; guards `inputs`, kept so that its list of teachers is allocated once
  mutable ullage::lossk::Inputs inputs;
};

namespace {

// Runs `body`, which returns a Status, and reports it through the C ABI.
template <class Body>
int reported(char** message, Body body) {
  if (message) *message = nullptr;
  const auto say = [message](const char* text) {
    if (message) *message = strdup(text);
  };
  try {
    const Status status = body();
    if (!status.ok()) say(status.message().c_str());
    return status.code();
  } catch (const std::exception& error) {
    say(error.what());
    return ullage::kHeadBadConfig;
  }
}

std::string described(const ullage::capi::HeadOnDevice& head, const std::string& device) {
  nlohmann::ordered_json out = {{"device", device}};
  const ullage::capi::HeadPromise promise = head.promise();
  out["kernel"] = promise.kernel;
  out["mode"] = promise.mode;
  out["chunk"] = promise.chunk;
  out["n_chunks"] = promise.n_chunks;
  out["bookings"] = nlohmann::ordered_json::array();
  for (const auto& [purpose, bytes] : promise.bookings) {
    out["bookings"].push_back({{"purpose", purpose}, {"bytes", bytes}});
  }
  out["workspace_bytes"] = promise.workspace_bytes;
  out["workspace_alignment"] = promise.workspace_alignment;
  out["materialized_bytes"] = promise.materialized_bytes;
  out["operations"] = promise.operations;
  out["rejections"] = nlohmann::ordered_json::array();
  for (const auto& [candidate, reason] : promise.rejections) {
    out["rejections"].push_back({{"candidate", candidate}, {"reason", reason}});
  }
  return out.dump();
}

Status create(const char* request_json, ullage_head_plan** plan) {
  if (!plan) return {ullage::kHeadMissingInput, "plan is null; accepted: where to put the plan"};
  *plan = nullptr;
  auto request = ullage::capi::head_request_from_json(request_json ? request_json : "");
  if (!request) return request.status();
  auto head = ullage::capi::plan_on_device(*request);
  if (!head) return head.status();
  auto made = std::make_unique<ullage_head_plan>();
  made->head = *std::move(head);
  made->json = described(*made->head, request->device);
  made->workspace_bytes = made->head->promise().workspace_bytes;
  made->status_bytes = made->head->promise().status_bytes;
  made->inputs.teachers.reserve(request->config.teachers.size());
  *plan = made.release();
  return ullage::kHeadOk;
}

Status run(const ullage_head_plan& plan, const ullage_head_inputs& inputs,
           const ullage_head_outputs& outputs, std::span<std::byte> workspace, void* stream) {
  const std::lock_guard lock(plan.turn);
  std::vector<ullage::lossk::TeacherInputs> teachers = std::move(plan.inputs.teachers);
  plan.inputs = {};
  plan.inputs.teachers = std::move(teachers);
  ullage::lossk::Outputs out;
  if (Status status = ullage::capi::read_inputs(inputs, plan.inputs); !status.ok()) return status;
  if (Status status = ullage::capi::read_outputs(outputs, out); !status.ok()) return status;
  return plan.head->run(plan.inputs, out, workspace, stream);
}

std::span<std::byte> block(void* workspace, size_t bytes) {
  return {static_cast<std::byte*>(workspace), bytes};
}

}  // namespace

extern "C" {

int ullage_head_plan_create(const char* request_json, ullage_head_plan** plan, char** message) {
  return reported(message, [&] { return create(request_json, plan); });
}

void ullage_head_plan_destroy(ullage_head_plan* plan) { delete plan; }

const char* ullage_head_plan_json(const ullage_head_plan* plan) {
  return plan ? plan->json.c_str() : nullptr;
}

int64_t ullage_head_plan_workspace_bytes(const ullage_head_plan* plan) {
  return plan ? plan->workspace_bytes : 0;
}

int64_t ullage_head_plan_status_bytes(const ullage_head_plan* plan) {
  return plan ? plan->status_bytes : 0;
}

int ullage_head_plan_run(const ullage_head_plan* plan, const ullage_head_inputs* inputs,
                         const ullage_head_outputs* outputs, void* workspace,
                         size_t workspace_bytes, void* stream, char** message) {
  return reported(message, [&]() -> Status {
    if (!plan || !inputs || !outputs) {
      return {ullage::kHeadMissingInput, "plan, inputs or outputs is null"};
    }
    return run(*plan, *inputs, *outputs, block(workspace, workspace_bytes), stream);
  });
}

int ullage_head_plan_check(const ullage_head_plan* plan, void* workspace, size_t workspace_bytes,
                           void* stream, char** message) {
  return reported(message, [&]() -> Status {
    if (!plan) return {ullage::kHeadMissingInput, "plan is null"};
    return plan->head->check(block(workspace, workspace_bytes), stream);
  });
}

int ullage_head_plan_filter_report(const ullage_head_plan* plan, void* workspace,
                                   size_t workspace_bytes, void* stream,
                                   ullage_filter_report* report, char** message) {
  return reported(message, [&]() -> Status {
    if (!plan || !report) return {ullage::kHeadMissingInput, "plan or report is null"};
    auto found = plan->head->filter_report(block(workspace, workspace_bytes), stream);
    if (!found) return found.status();
    *report = {found->largest_share, found->largest_gradient, found->total_gradient, found->kept};
    return ullage::kHeadOk;
  });
}

int ullage_scale_cuda(const ullage_vector* values, const double* factor, void* stream,
                      char** message) {
  return reported(message, [&]() -> Status {
    if (!values || !factor) return {ullage::kHeadMissingInput, "values or factor is null"};
    ullage::MutableVectorView view;
    if (Status status = ullage::capi::read_values(*values, view); !status.ok()) return status;
    return ullage::cuda::scale(view.data, view.size, view.dtype, factor,
                               static_cast<CUstream_st*>(stream));
  });
}

}  // extern "C"
