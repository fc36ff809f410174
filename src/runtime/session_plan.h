// What a decode session of a model costs, from its files alone: for the command line, C and Python.
#pragma once

#include <string>

#include "model/config.h"
#include "model/weight.h"
#include "session/sizing.h"
#include "ullage/status.h"

namespace ullage::runtime {

// A model as far as its size goes.
struct SizedModel {
  std::string name;
  model::Config config;
  session::WeightSizes weights;
  bool assumed = false;  // no weights at hand: sized as if all were of one type
};

// path: a .gguf file, a folder with config.json and safetensors, or, without weights, a config.json
// or a folder that has one; those are sized as if stored as weight_type. Errors: 641 to 659.
Result<SizedModel> open_sized_model(const std::string& path, model::ElementType weight_type);

struct SessionPlan {
  SizedModel model;
  session::SizingRequest request;
  session::Sizing sizing;
};

// The fields of `ullage plan MODEL --json`, less the loss head's.
std::string session_plan_json(const SessionPlan& plan);

// "f32", "f16", "bf16", "q8_0", "q4_0". Errors: 681.
Result<model::ElementType> element_type_from_name(std::string_view name);

// {"model": path, "context": 512, "kv_type": "bf16", "weight_type": "bf16", "memory_bytes": 0 (this
// machine's)}. Errors: 699 for a malformed document, 681 for a type that is none, and those of
// open_sized_model and size_session.
Result<SessionPlan> plan_session_from_json(std::string_view text);

// What is on this machine, as `ullage probe --json` prints it.
std::string probe_json();

}  // namespace ullage::runtime
