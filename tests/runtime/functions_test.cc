#include "runtime/functions.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/function_table.h"
#include "runtime/near_name.h"

namespace ullage::runtime {
namespace {

using nlohmann::json;

// The text of the result, which must have run.
std::string result_text(std::string_view module, std::string_view function, std::string_view args) {
  const Execution execution = execute(module, function, args);
  EXPECT_TRUE(execution.ran) << execution.json;
  const std::string head = "{\"module\":\"" + std::string(module) + "\",\"function\":\"" +
                           std::string(function) + "\",\"result\":";
  EXPECT_TRUE(execution.json.starts_with(head)) << execution.json;
  return execution.json.substr(head.size(), execution.json.size() - head.size() - 1);
}

json result(std::string_view module, std::string_view function, std::string_view args) {
  return json::parse(result_text(module, function, args));
}

json error(std::string_view module, std::string_view function, std::string_view args) {
  const Execution execution = execute(module, function, args);
  EXPECT_FALSE(execution.ran) << execution.json;
  const json error = json::parse(execution.json)["error"];
  EXPECT_EQ(error.size(), 3u) << "kind, message, expected";
  return error;
}

TEST(Execute, PrintsTheWorkedValuesOfTheContract) {
  EXPECT_EQ(result_text("lossk.cross_entropy", "ce_peak_logit_cells", "[2048, 151936, 256]"),
            R"({"chunked_cells":38895616.0,"materialized_cells":311164928.0,"ratio":8.0,)"
            R"("n_chunks":8,"status":580})");
  EXPECT_EQ(result_text("residentk.contract", "residentk_dispatch_budget", "[28]"), "171");
  EXPECT_EQ(result_text("lossk.contract", "loss_dims_check", "[2048, 4096, 151936]"), "580");
  EXPECT_EQ(result_text("lossk.contract", "loss_chunk_check", "[2048, 151936]"), "587");
  EXPECT_EQ(result_text("lossk.contract", "loss_chunk_check", "[256, 151936]"), "580");
  EXPECT_EQ(result_text("lossk.contract", "loss_logit_cells", "[256, 151936]"), "38895616.0");
  EXPECT_EQ(result_text("lossk.contract", "loss_logit_cells", "[0, 151936]"), "-1.0");
  EXPECT_EQ(result_text("lossk.contract", "loss_status_name", "[587]"),
            "\"chunk_exceeds_logit_budget\"");
  EXPECT_EQ(result_text("lossk.contract", "loss_targets_in_range", "[[0, 3, -1], 2, 9]"), "true");
  EXPECT_EQ(result_text("residentk.contract", "residentk_cache_elements", "[28, 8, 128, 512]"),
            "29360128");
  EXPECT_EQ(result_text("residentk.contract", "residentk_cache_elements", "[28, 8, 128, 65536]"),
            "3758096384");
  EXPECT_EQ(result_text("residentk.contract", "residentk_dims_check", "[1024, 16, 8, 128, 3072]"),
            "600");
  EXPECT_EQ(result_text("residentk.contract", "residentk_splitk_policy", "[128, 40, 16]"), "40");
  EXPECT_EQ(result_text("residentk.contract", "residentk_splitk_policy", "[1000, 40, 16]"), "80");
  EXPECT_EQ(result_text("residentk.contract", "residentk_splitk_max_n_splits", "[40, 16]"), "80");
  EXPECT_EQ(result_text("residentk.contract", "residentk_prefill_gemm_use_narrow_tile", "[5]"),
            "true");
  EXPECT_EQ(result_text("residentk.contract", "residentk_prefill_gemm_use_narrow_tile", "[256]"),
            "false");
  EXPECT_EQ(result_text("residentk.contract", "residentk_context_bucket", "[768]"),
            R"({"bucket":1024,"wasted_positions":256,"waste_fraction":0.25,"status":600})");
  EXPECT_EQ(result_text("residentk.probe", "resident_session_probe",
                        "[1024, 5, 2, 128, 3072, 2, 151936]"),
            R"({"kernels_compiled":false,"device_present":false,"session_possible":false,)"
            R"("dispatch_budget":0,"resident_f32_elems":0,"status":603})");
}

TEST(Execute, UniformLogits) {
  json args = {std::vector<double>(54, 0.25), {0, 3, 6, 0, 3, 6}, 6, 9};
  const json out = result("lossk.cross_entropy", "ce_from_logits_flat", args.dump());
  EXPECT_EQ(out["mean_loss"].get<double>(), std::log(9.0));
  EXPECT_EQ(out["token_losses"].size(), 6u);
  EXPECT_EQ(out["status"], 580);
}

TEST(Execute, ARefusalKeepsEveryField) {
  EXPECT_EQ(result_text("lossk.cross_entropy", "fused_linear_ce_flat", "[[1],[1,1],[-1],1,1,2,1]"),
            R"({"mean_loss":0.0,"total_loss":0.0,"token_losses":[],"peak_logit_cells":0.0,)"
            R"("n_chunks":0,"status":586})");
  EXPECT_EQ(result_text("lossk.cross_entropy", "ce_from_logits_flat", "[[],[],1,1]"),
            R"({"mean_loss":0.0,"total_loss":0.0,"token_losses":[],"status":582})");
  EXPECT_EQ(result_text("lossk.cross_entropy", "fused_linear_ce_bwd_flat", "[[],[],[],0,1,1]"),
            R"({"d_hidden":[],"d_weight":[],"mean_loss":0.0,"status":581})");
  EXPECT_EQ(
      result_text("lossk.cross_entropy", "ce_chunk_invariance_flat", "[[1],[1,1],[2],1,1,2]"),
      R"({"max_abs_delta":0.0,"mean_loss_chunk_one":0.0,"mean_loss_chunk_all":0.0,"status":586})");
}

TEST(Execute, DefaultsFillTheTail) {
  const std::string shape = "1024, 16, 8, 128, 3072, 28, 151936";
  EXPECT_EQ(result("residentk.contract", "residentk_weight_elems", "[" + shape + "]"), 625410048);
  EXPECT_EQ(result("residentk.contract", "residentk_weight_elems", "[" + shape + ", 512]"),
            625410048);
  EXPECT_EQ(result("residentk.contract", "residentk_weight_elems", "[" + shape + ", 1024]"),
            625410048 + 29360128);
}

TEST(Execute, WholeFloatsAreIntsAndNothingElseIs) {
  const auto budget = [](std::string_view args) {
    return execute("residentk.contract", "residentk_dispatch_budget", args);
  };
  EXPECT_EQ(budget("[28.0]").json, budget("[28]").json);
  EXPECT_EQ(budget("[2.8e1]").json, budget("[28]").json);
  EXPECT_TRUE(budget("[9223372036854775807]").ran);
  EXPECT_TRUE(budget("[-9223372036854775808]").ran);
  EXPECT_TRUE(budget("[9007199254740992.0]").ran);
  for (const char* bad : {"[28.5]", "[true]", "[\"28\"]", "[null]", "[[28]]", "[{}]", "[NaN]",
                          "[9223372036854775808]", "[-9223372036854775809]", "[1e19]",
                          "[99999999999999999999999999]", "[9007199254740994.0]"}) {
    const json e = error("residentk.contract", "residentk_dispatch_budget", bad);
    EXPECT_EQ(e["kind"], "type") << bad;
    EXPECT_NE(e["message"].get<std::string>().find("n_layers"), std::string::npos) << bad;
  }
}

TEST(Execute, NonFiniteFloatsCanBeSaid) {
  for (const char* word : {"NaN", "Infinity", "-Infinity", "\"nan\"", "\"inf\"", "\"-inf\"",
                           "\"NaN\"", "\"Infinity\"", "\"-Infinity\""}) {
    EXPECT_EQ(result("lossk.contract", "loss_scalars_ok", "[" + std::string(word) + "]"), false);
    const std::string args = "[[0, " + std::string(word) + "], [0], 1, 2]";
    EXPECT_EQ(result("lossk.cross_entropy", "ce_from_logits_flat", args)["status"], 585) << word;
  }
  EXPECT_EQ(result("residentk.contract", "residentk_scalars_ok", "[NaN, 1]"), false);
  EXPECT_EQ(result_text("lossk.contract", "loss_tol_for", "[1.7e308, 9223372036854775807]"),
            "\"inf\"");
  for (const char* bad : {"[\"-nan\"]", "[\"one\"]", "[true]", "[nan]", "[\"a NaN \\\" NaN\"]"}) {
    EXPECT_FALSE(execute("lossk.contract", "loss_scalars_ok", bad).ran) << bad;
  }
}

TEST(Execute, NamesWhatWasExpected) {
  json e = error("losk.contract", "loss_dims_check", "[1,1,1]");
  EXPECT_EQ(e["kind"], "unknown_module");
  EXPECT_NE(e["message"].get<std::string>().find("did you mean 'lossk.contract'"),
            std::string::npos);
  EXPECT_EQ(e["expected"],
            "one of lossk.contract, lossk.cross_entropy, residentk.contract, residentk.probe");

  e = error("lossk.contract", "loss_dim_check", "[1,1,1]");
  EXPECT_EQ(e["kind"], "unknown_function");
  EXPECT_NE(e["message"].get<std::string>().find("'loss_dims_check'"), std::string::npos);

  e = error("lossk.contract", "residentk_dims_check", "[1,1,1]");
  EXPECT_NE(e["message"].get<std::string>().find("'residentk.contract residentk_dims_check'"),
            std::string::npos);

  for (const char* args : {"[]", "[1,2]", "[1,2,3,4]"}) {
    e = error("lossk.contract", "loss_dims_check", args);
    EXPECT_EQ(e["kind"], "arity");
    EXPECT_EQ(e["expected"], "loss_dims_check(n_tok: int, d_model: int, vocab: int)");
  }
  e = error("residentk.contract", "residentk_weight_elems", "[1]");
  EXPECT_EQ(e["message"], "residentk_weight_elems takes 7 to 8 arguments, got 1");

  e = error("lossk.contract", "loss_targets_in_range", "[[0, 1, 2.5], 3, 9]");
  EXPECT_EQ(e["kind"], "type");
  EXPECT_NE(e["message"].get<std::string>().find("targets[2]"), std::string::npos);
  EXPECT_EQ(error("lossk.contract", "loss_targets_in_range", "[0, 3, 9]")["expected"],
            "a list of int");
}

TEST(Execute, MalformedTextIsAnErrorNotACrash) {
  for (const std::string& args :
       {std::string(), std::string("["), std::string("{}"), std::string("28"), std::string("[1,]"),
        std::string("[1e400]"), std::string("[\"\\"), std::string("[\"\xff\xfe\"]"),
        std::string("[Na"), std::string(100000, '['), "[" + std::string(100000, '[') + "]",
        std::string("[\0]", 3)}) {
    EXPECT_EQ(error("residentk.contract", "residentk_dispatch_budget", args)["kind"], "json")
        << args.substr(0, 20);
  }
  const std::string deep = "[" + std::string(100000, '[') + std::string(100000, ']') + "]";
  EXPECT_EQ(error("residentk.contract", "residentk_dispatch_budget", deep)["kind"], "type");
  EXPECT_EQ(error("\xff\xfe", "f", "[]")["kind"], "unknown_module");
  EXPECT_EQ(error(std::string(10000, 'x'), "f", "[]")["kind"], "unknown_module");
}

RC_GTEST_PROP(ExecuteProperty, FloatsReadBackToTheSameBits, (uint64_t bits)) {
  const double value = std::bit_cast<double>(bits);
  RC_PRE(std::isfinite(value));
  // tol_for is linear in a magnitude above 1 and is the one function that returns an arbitrary
  // float.
  json args = {value, 1};
  const json out = result("lossk.contract", "loss_tol_for", args.dump());
  const double expected = std::max(1.0, std::abs(value)) * (1e-9 + 0x1p-52);
  RC_ASSERT(std::bit_cast<uint64_t>(out.get<double>()) == std::bit_cast<uint64_t>(expected));
}

// Random text never crashes, and always gives a JSON object with one of the two shapes.
RC_GTEST_PROP(ExecuteProperty, AnyTextGetsAnAnswer, (std::string text)) {
  for (const Module& module : modules()) {
    const Execution execution = execute(module.name, module.functions.back().name, text);
    RC_ASSERT(json::parse(execution.json).contains(execution.ran ? "result" : "error"));
  }
}

TEST(FunctionTable, HoldsEveryFunctionOfTheContract) {
  std::vector<std::pair<std::string_view, size_t>> sizes;
  for (const Module& module : modules()) sizes.emplace_back(module.name, module.functions.size());
  EXPECT_EQ(sizes, (decltype(sizes){{"lossk.contract", 8},
                                    {"lossk.cross_entropy", 5},
                                    {"residentk.contract", 13},
                                    {"residentk.probe", 3}}));
}

TEST(FunctionTable, EveryEntryIsDocumentedAndRunsOnItsOwnTypes) {
  for (const Module& module : modules()) {
    for (const Function& function : module.functions) {
      EXPECT_FALSE(function.doc.empty()) << function.name;
      EXPECT_FALSE(function.returns.empty()) << function.name;
      json args = json::array();
      for (const Parameter& parameter : function.parameters) {
        EXPECT_FALSE(parameter.doc.empty()) << function.name << ' ' << parameter.name;
        const bool list =
            parameter.type == ValueType::kIntList || parameter.type == ValueType::kFloatList;
        args.push_back(list ? json::array({0}) : json(1));
      }
      EXPECT_TRUE(execute(module.name, function.name, args.dump()).ran) << function.name;
    }
  }
}

TEST(FunctionTable, DescribesItselfAsJson) {
  const json table = json::parse(functions_json());
  EXPECT_EQ(table["version"], version());
  EXPECT_EQ(table["modules"].size(), 4u);
  const json weight_elems = table["modules"][2]["functions"][6];
  EXPECT_EQ(weight_elems["function"], "residentk_weight_elems");
  EXPECT_EQ(weight_elems["parameters"][7]["default"], 512);
  EXPECT_EQ(weight_elems["parameters"][7]["type"], "int");
  EXPECT_EQ(weight_elems["returns"]["type"], "int");
  const json fused = table["modules"][1]["functions"][1];
  EXPECT_EQ(fused["parameters"][0]["type"], "list of float");
  EXPECT_EQ(fused["returns"]["fields"]["token_losses"], "list of float");
  EXPECT_EQ(table["constants"][0]["name"], "LOSS_MAX_WORK_CELLS");
  EXPECT_EQ(table["constants"][0]["value"], 70368744177664);
}

TEST(NearName, SuggestsOnlyWhatIsNear) {
  const std::string_view names[] = {"exec", "functions", "plan"};
  EXPECT_EQ(near_name("function", names), "functions");
  EXPECT_EQ(near_name("exce", names), "");
  EXPECT_EQ(near_name("exe", names), "exec");
  EXPECT_EQ(near_name("zzzz", names), "");
  EXPECT_EQ(near_name("", names), "");
  EXPECT_EQ(near_name(std::string(1000, 'e'), names), "");
}

}  // namespace
}  // namespace ullage::runtime
