#include "runtime/session_plan.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "model/checkpoint.h"
#include "model/config_json.h"
#include "runtime/device_presence.h"
#include "runtime/functions.h"
#include "runtime/head_config_json.h"
#include "runtime/host.h"
#include "ullage/residentk/probe.h"

namespace ullage::runtime {
namespace {

using model::ElementType;
using nlohmann::ordered_json;

constexpr std::pair<std::string_view, ElementType> kTypes[] = {{"f32", ElementType::kF32},
                                                               {"f16", ElementType::kF16},
                                                               {"bf16", ElementType::kBF16},
                                                               {"q8_0", ElementType::kQ8_0},
                                                               {"q4_0", ElementType::kQ4_0}};

// `path` is a config.json, or a folder that has one and no weights.
std::optional<std::filesystem::path> lone_config(const std::filesystem::path& path) {
  std::error_code ignored;
  if (path.extension() == ".json") return path;
  if (!std::filesystem::is_directory(path, ignored)) return std::nullopt;
  for (const auto& entry : std::filesystem::directory_iterator(path, ignored)) {
    if (entry.path().string().find(".safetensors") != std::string::npos) return std::nullopt;
  }
  return path / "config.json";
}

Status malformed(std::string_view field, const nlohmann::json& value, std::string_view accepted) {
  return {kHeadBadConfig,
          std::string(field) + " is " +
              value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace).substr(0, 40) +
              "; accepted: " + std::string(accepted)};
}

}  // namespace

Result<SizedModel> open_sized_model(const std::string& path, ElementType weight_type) {
  if (const auto file = lone_config(path)) {
    std::ifstream stream(*file, std::ios::binary);
    if (!stream) return Status(kModelUnreadable, "cannot read '" + file->string() + "'");
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    auto config = model::parse_config_json(text, file->string());
    if (!config) return config.status();
    const auto folder = std::filesystem::absolute(*file).parent_path();
    auto weights = session::weight_sizes(*config, weight_type);
    return SizedModel{folder.filename().string(), *std::move(config), std::move(weights), true};
  }
  auto checkpoint = model::Checkpoint::open(path);
  if (!checkpoint) return checkpoint.status();
  return SizedModel{checkpoint->name(), checkpoint->config(), session::weight_sizes(*checkpoint),
                    false};
}

std::string session_plan_json(const SessionPlan& plan) {
  const auto& [subject, request, s] = plan;
  const model::Config& c = subject.config;
  const ordered_json out = {
      {"model", subject.name},
      {"shape",
       {{"family", model::name_of(c.family)},
        {"n_layers", c.n_layers},
        {"d_model", c.d_model},
        {"h_q", c.h_q},
        {"h_kv", c.h_kv},
        {"d_head", c.d_head},
        {"d_ff", c.d_ff},
        {"vocab", c.vocab},
        {"tied_head", c.tied_head},
        {"max_position", c.max_position}}},
      {"parameters", c.n_parameters()},
      {"weights",
       {{"type", subject.weights.type},
        {"assumed", subject.assumed},
        {"resident_bytes", subject.weights.resident_bytes},
        {"stored_bytes", subject.weights.stored_bytes},
        {"stored_elements", subject.weights.stored_elements}}},
      {"kv_cache",
       {{"type", model::name_of(request.kv_type)},
        {"context", request.context},
        {"bucket", s.bucket},
        {"bytes", s.kv_bytes},
        {"waste_bytes", s.bucket_waste_bytes},
        {"position_bytes", s.kv_position_bytes}}},
      {"resident_bytes", s.resident_bytes},
      {"memory_bytes", request.memory_bytes},
      {"fits", s.fits},
      {"largest_context", s.largest_context},
      {"memory_context", s.memory_context},
      {"token",
       {{"dispatches", s.dispatches},
        {"dispatches_deep", s.dispatches_deep},
        {"read_bytes", s.token_read_bytes}}},
      {"session",
       {{"status", static_cast<int>(s.session.code())}, {"reason", s.session.message()}}}};
  return out.dump();
}

Result<ElementType> element_type_from_name(std::string_view name) {
  std::string accepted;
  for (const auto& [known, type] : kTypes) {
    if (known == name) return type;
    accepted += (accepted.empty() ? "" : ", ") + std::string(known);
  }
  return {kHeadUnknownKind, "type is '" + std::string(name) + "'; accepted: " + accepted};
}

Result<SessionPlan> plan_session_from_json(std::string_view text) {
  const nlohmann::json document = nlohmann::json::parse(text, nullptr, false);
  if (!document.is_object()) {
    return {kHeadBadConfig, "the request is not a JSON object; accepted: one with model, context"};
  }
  static constexpr std::string_view kFields[] = {"model", "context", "kv_type", "weight_type",
                                                 "memory_bytes"};
  SessionPlan plan;
  std::string path, kv_type = "bf16", weight_type = "bf16";
  for (const auto& [name, value] : document.items()) {
    if (name == "model" || name == "kv_type" || name == "weight_type") {
      if (!value.is_string()) return malformed(name, value, "a string");
      (name == "model" ? path : name == "kv_type" ? kv_type : weight_type) = value;
    } else if (name == "context" || name == "memory_bytes") {
      if (!value.is_number_integer()) return malformed(name, value, "a whole number");
      (name == "context" ? plan.request.context : plan.request.memory_bytes) = value;
    } else {
      return unknown_field("the request", name, kFields);
    }
  }
  const auto kv = element_type_from_name(kv_type), stored = element_type_from_name(weight_type);
  if (!kv) return kv.status();
  if (!stored) return stored.status();
  plan.request.kv_type = *kv;
  if (plan.request.memory_bytes == 0) plan.request.memory_bytes = probe_host().memory_bytes;
  auto opened = open_sized_model(path, *stored);
  if (!opened) return opened.status();
  plan.model = *std::move(opened);
  auto sizing = session::size_session(plan.model.config, plan.model.weights, plan.request);
  if (!sizing) return sizing.status();
  plan.sizing = *std::move(sizing);
  return plan;
}

std::string probe_json() {
  const Host host = probe_host();
  const ordered_json out = {{"version", version()},
                            {"cpu", {{"name", host.cpu}, {"threads", host.n_threads}}},
                            {"instruction_sets", host.instruction_sets},
                            {"memory_bytes", host.memory_bytes},
                            {"available_bytes", host.available_bytes},
                            {"cuda",
                             {{"kernels_compiled", residentk::resident_gpu_kernels_compiled()},
                              {"devices", cuda_device_count()},
                              {"session_possible", residentk::resident_available()}}}};
  return out.dump();
}

}  // namespace ullage::runtime
