/* The losses at the head, used from C and through the shared library alone. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ullage/head.h"
#include "ullage/ullage.h"

static int failures = 0;

static void expect(int held, const char* what) {
  if (held) return;
  fprintf(stderr, "FAILED: %s\n", what);
  ++failures;
}

/* A refused request: the code, and what the message must name. */
static void expect_refused(const char* request, int code, const char* named) {
  ullage_head_plan* plan = (ullage_head_plan*)1;
  char* message = NULL;
  expect(ullage_head_plan_create(request, &plan, &message) == code, request);
  expect(plan == NULL, "no plan on refusal");
  expect(message != NULL && strstr(message, named) != NULL, message ? message : "(no message)");
  ullage_string_free(message);
}

static ullage_vector vector_of(void* data, int64_t size, int32_t dtype) {
  ullage_vector view = {data, size, 1, dtype};
  return view;
}

/* z = [1, 2, 3], label 0, weights of a cross-entropy and a z-loss of 0.01 (R20 of the peers'
 * complaints). */
static void test_run(void) {
  const char* request =
      "{\"n_tok\": 2, \"vocab\": 3,"
      " \"config\": {\"losses\": [{\"kind\": \"cross_entropy\"}, {\"kind\": \"z_loss\", "
      "\"weight\": 0.01}]},"
      " \"request\": {\"d_logits\": true}, \"limits\": {\"n_threads\": 1}}";
  float logits[] = {1, 2, 3, NAN, NAN, NAN}, d_logits[6] = {0};
  int32_t labels[] = {0, -100};
  double total = 0, terms[2] = {0};
  int64_t n_valid = 0;
  ullage_head_plan* plan = NULL;
  char* message = NULL;
  expect(ullage_head_plan_create(request, &plan, &message) % 20 == 0, message ? message : "create");
  expect(message == NULL, "no message on success");
  if (!plan) return;
  expect(strstr(ullage_head_plan_json(plan), "\"mode\":\"from_logits\"") != NULL,
         ullage_head_plan_json(plan));
  const size_t bytes = (size_t)ullage_head_plan_workspace_bytes(plan);
  void* workspace = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);

  ullage_head_inputs inputs;
  ullage_head_outputs outputs;
  memset(&inputs, 0, sizeof inputs);
  memset(&outputs, 0, sizeof outputs);
  inputs.struct_size = sizeof inputs;
  outputs.struct_size = sizeof outputs;
  inputs.logits = (ullage_matrix){logits, 2, 3, 3, ULLAGE_F32};
  inputs.labels = vector_of(labels, 2, ULLAGE_I32);
  inputs.upstream = 1;
  outputs.total = vector_of(&total, 1, ULLAGE_F64);
  outputs.terms = vector_of(terms, 2, ULLAGE_F64);
  outputs.n_valid = vector_of(&n_valid, 1, ULLAGE_I64);
  outputs.d_logits = (ullage_matrix){d_logits, 2, 3, 3, ULLAGE_F32};
  int code = ullage_head_plan_run(plan, &inputs, &outputs, workspace, bytes, NULL, &message);
  expect(code % 20 == 0, message ? message : "run");
  expect(fabs(total - 2.523724) < 1e-6 && n_valid == 1, "total");
  expect(fabs(terms[0] - 2.407606) < 1e-6, "cross-entropy");
  expect(fabs(d_logits[0] + 0.903834) < 1e-6 && fabs(d_logits[2] - 0.710579) < 1e-6, "d_logits");
  expect(d_logits[3] == 0 && d_logits[5] == 0, "an ignored row has no gradient");
  expect(ullage_head_plan_check(plan, workspace, bytes, NULL, NULL) % 20 == 0, "check");
  ullage_filter_report report = {.kept = 7};
  code = ullage_head_plan_filter_report(plan, workspace, bytes, NULL, &report, &message);
  expect(code == 681 && message && strstr(message, "the cpu leaves nothing out"),
         message ? message : "681");
  ullage_string_free(message);
  expect(report.kept == 7, "a refusal writes no report");
  expect(ullage_head_plan_filter_report(plan, workspace, bytes, NULL, NULL, NULL) == 683,
         "nowhere to put a report");

  total = 7;
  labels[0] = 3;
  code = ullage_head_plan_run(plan, &inputs, &outputs, workspace, bytes, NULL, &message);
  expect(code == 586 && message && strstr(message, "labels[0] is 3"), message ? message : "586");
  ullage_string_free(message);
  labels[0] = 0;
  inputs.labels.dtype = ULLAGE_F32;
  code = ullage_head_plan_run(plan, &inputs, &outputs, workspace, bytes, NULL, &message);
  expect(code == 696 && message && strstr(message, "labels.dtype"), message ? message : "696");
  ullage_string_free(message);
  inputs.labels.dtype = ULLAGE_I32;
  inputs.struct_size = 8;
  expect(ullage_head_plan_run(plan, &inputs, &outputs, workspace, bytes, NULL, NULL) == 695,
         "a struct of another version");
  inputs.struct_size = sizeof inputs;
  expect(ullage_head_plan_run(plan, &inputs, &outputs, workspace, bytes, &total, NULL) == 695,
         "a stream on the cpu");
  expect(ullage_head_plan_run(plan, &inputs, &outputs, workspace, bytes - 1, NULL, NULL) == 582,
         "a short workspace");
  expect(ullage_head_plan_run(NULL, &inputs, &outputs, workspace, bytes, NULL, NULL) == 683,
         "no plan");
  expect(total == 7, "outputs are untouched on refusal");
  ullage_head_plan_destroy(plan);
  free(workspace);
}

/* A plan for CUDA needs no device; what a run would need is refused by code. */
static void test_cuda_without_a_device(void) {
  ullage_head_plan* plan = NULL;
  char* message = NULL;
  int code = ullage_head_plan_create(
      "{\"n_tok\": 4, \"vocab\": 9, \"device\": \"cuda\","
      " \"config\": {\"losses\": [{\"kind\": \"cross_entropy\"}]}}",
      &plan, &message);
  expect(code % 20 == 0, message ? message : "plan for cuda");
  if (!plan) return;
  const int64_t status_bytes = ullage_head_plan_status_bytes(plan);
  expect(status_bytes >= 8 && status_bytes <= ullage_head_plan_workspace_bytes(plan), "status");
  expect(ullage_head_plan_check(plan, NULL, 7, NULL, &message) == 582 && message &&
             strstr(message, "7 bytes"),
         message ? message : "582");
  ullage_string_free(message);
  ullage_filter_report report;
  expect(ullage_head_plan_filter_report(plan, NULL, 0, NULL, &report, NULL) == 681, "from logits");
  ullage_head_plan_destroy(plan);
  for (int filtered = 0; filtered < 2; ++filtered) {
    code = ullage_head_plan_create(
        filtered ? "{\"n_tok\": 4, \"d_model\": 8, \"vocab\": 9, \"device\": \"cuda\","
                   " \"config\": {\"losses\": [{\"kind\": \"cross_entropy\"}]},"
                   " \"request\": {\"d_hidden\": true, \"input_dtype\": \"bf16\","
                   " \"weight_dtype\": \"bf16\", \"grad_dtype\": \"bf16\"},"
                   " \"limits\": {\"filter_tolerance\": 0.01}}"
                 : "{\"n_tok\": 4, \"d_model\": 8, \"vocab\": 9, \"device\": \"cuda\","
                   " \"config\": {\"losses\": [{\"kind\": \"cross_entropy\"}]},"
                   " \"request\": {\"input_dtype\": \"bf16\", \"weight_dtype\": \"bf16\"}}",
        &plan, &message);
    expect(code % 20 == 0, message ? message : "plan for cuda from hidden states");
    if (!plan) return;
    expect(ullage_head_plan_filter_report(plan, NULL, 7, NULL, &report, NULL) == 582,
           "a short workspace");
    ullage_head_plan_destroy(plan);
  }
  double factor = 1;
  ullage_vector values = vector_of(&factor, 1, ULLAGE_I64);
  expect(ullage_scale_cuda(NULL, &factor, NULL, NULL) == 683, "no values");
  expect(ullage_scale_cuda(&values, &factor, NULL, NULL) == 696, "integers");
  values = vector_of(&factor, 2, ULLAGE_F64);
  values.stride = 2;
  expect(ullage_scale_cuda(&values, &factor, NULL, NULL) == 695, "values apart");
}

int main(void) {
  test_run();
  test_cuda_without_a_device();
  expect_refused("{", 699, "not JSON");
  expect_refused("[]", 699, "an object");
  expect_refused(NULL, 699, "not JSON");
  expect_refused("{\"vocab\": 3, \"n_tok\": 1.5}", 699, "n_tok is 1.5");
  expect_refused("{\"vocab\": 3, \"n_token\": 1}", 699, "did you mean 'n_tok'");
  expect_refused("{\"vocab\": 3, \"n_tok\": 1, \"device\": \"tpu\"}", 681, "cpu, cuda");
  expect_refused("{\"vocab\": 3, \"n_tok\": 1, \"config\": {\"losses\": []}}", 699,
                 "terms is empty");
  expect_refused("{\"vocab\": 3, \"n_tok\": 1, \"config\": {\"losses\": [{\"kind\": \"cross\"}]}}",
                 681, "cross_entropy");
  expect_refused("{\"vocab\": 3, \"n_tok\": 1, \"request\": {\"input_dtype\": \"f8\"}}", 681, "f8");
  expect_refused("{\"vocab\": 0, \"n_tok\": 1, \"config\": {\"losses\": [{\"kind\": \"z_loss\"}]}}",
                 581, "vocab");
  ullage_head_plan_destroy(NULL);
  expect(ullage_head_plan_json(NULL) == NULL && ullage_head_plan_workspace_bytes(NULL) == 0 &&
             ullage_head_plan_status_bytes(NULL) == 0,
         "null");
  return failures == 0 ? 0 : 1;
}
