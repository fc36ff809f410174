// The document ullage_head_plan_create takes.
#pragma once

#include <string>
#include <string_view>

#include "ullage/lossk/head.h"
#include "ullage/status.h"

namespace ullage::capi {

struct HeadRequest {
  lossk::Shape shape;
  lossk::HeadConfig config;
  lossk::Request request;
  lossk::PlanLimits limits;
  bool accumulate = false;      // of limits; read on cuda alone
  double filter_tolerance = 0;  // of limits; 0 on the CPU
  std::string device = "cpu";
};

// Errors: 699 for a malformed document, 681 for a name that is none, naming the field.
Result<HeadRequest> head_request_from_json(std::string_view text);

}  // namespace ullage::capi
