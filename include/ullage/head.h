/* The losses at the head of a language model, from C: plan, caller's memory, run. The terms,
 * inputs, outputs and policies are those of ullage/lossk/head.h and terms.h, where each field is
 * documented.
 *
 *   ullage_head_plan* plan;
 *   int code = ullage_head_plan_create(
 *       "{\"n_tok\": 2048, \"d_model\": 4096, \"vocab\": 151936,"
 *       " \"config\": {\"losses\": [{\"kind\": \"cross_entropy\"}]},"
 *       " \"request\": {\"d_hidden\": true, \"d_weight\": true},"
 *       " \"limits\": {\"budget_bytes\": 268435456}}", &plan, &message);
 *   ...
 *   code = ullage_head_plan_run(plan, &inputs, &outputs, workspace,
 * ullage_head_plan_workspace_bytes(plan), NULL, &message); ullage_head_plan_destroy(plan);
 *
 * Every call returns a status code of the ledger (ullage_status_name): a multiple of 20 is success.
 * On a refusal *message, where message is not null, says why; it is the caller's, to be freed with
 * ullage_string_free. It is null on success, and where there was no memory for it.
 *
 * Threads: plans may be made and destroyed from any thread; runs of one plan, from however many
 * threads, take turns on the CPU. A plan must outlive its runs.
 */
#ifndef ULLAGE_HEAD_H_
#define ULLAGE_HEAD_H_

#include <stddef.h>
#include <stdint.h>

#include "ullage/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Storage types. Vectors of ids are ULLAGE_I32 or ULLAGE_I64, masks ULLAGE_U8, everything else
 * floating point. */
enum {
  ULLAGE_F64 = 0,
  ULLAGE_F32 = 1,
  ULLAGE_BF16 = 2,
  ULLAGE_F16 = 3,
  ULLAGE_I32 = 4,
  ULLAGE_I64 = 5,
  ULLAGE_U8 = 6
};

/* Borrowed memory; a null data is "not given". Strides count elements. */
typedef struct ullage_matrix {
  void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride; /* >= cols; the columns of a row are adjacent */
  int32_t dtype;
} ullage_matrix;

typedef struct ullage_vector {
  void* data;
  int64_t size;
  int64_t stride; /* 0 repeats one value; 1 for masks and integer outputs */
  int32_t dtype;
} ullage_vector;

typedef struct ullage_head_teacher {
  ullage_matrix logits;    /* [n_tok][vocab] */
  ullage_matrix hidden;    /* [n_tok][d_model] */
  ullage_matrix weight;    /* [vocab][d_model] */
  ullage_vector ids;       /* [n_tok * k] */
  ullage_vector log_probs; /* [n_tok * k] */
} ullage_head_teacher;

/* struct_size is sizeof of the struct the caller was compiled with: fields may be added at the end.
 * Zero the rest. */
typedef struct ullage_head_inputs {
  size_t struct_size;
  ullage_matrix logits; /* [n_tok][vocab], or the next two */
  ullage_matrix hidden; /* [n_tok][d_model] */
  ullage_matrix weight; /* [vocab][d_model] */
  ullage_vector bias;   /* [vocab] */
  ullage_matrix adapter_a, adapter_b;
  ullage_vector labels; /* [n_tok], ids; negative: ignored */
  ullage_vector token_weights;
  ullage_vector class_weights;
  ullage_vector mask; /* [n_tok], ULLAGE_U8 */
  ullage_vector advantages;
  ullage_vector old_log_probs;
  ullage_vector reference_log_probs;
  ullage_vector segments; /* [n_tok], ids in [0, n_segments) */
  int64_t n_segments;
  ullage_vector pairs; /* [n_pairs * 2] ids of segments */
  const ullage_head_teacher* teachers;
  int64_t n_teachers;
  double upstream; /* the factor on every gradient: 1 for the gradients of the total */
  ullage_vector upstream_rows;
  ullage_vector group_shift, group_log_sum, group_label_log_prob; /* of a shard: lossk/group.h */
  ullage_vector group_distance, group_entropy;
} ullage_head_inputs;

/* lossk::PolicyMetrics. */
typedef struct ullage_policy_metrics {
  double old_log_probs, new_log_probs, ratio, kl, clipped, advantage, entropy;
  double ratio_sum, ratio_squared_sum, max_advantage, min_advantage;
  int64_t n_tokens, n_segments;
} ullage_policy_metrics;

/* Every output is optional; nothing is written on refusal. total and n_valid are one value each,
 * terms [n_terms], all ULLAGE_F64 but n_valid, ULLAGE_I64; argmax is ULLAGE_I64, correct ULLAGE_U8,
 * other rows f32 or f64. */
typedef struct ullage_head_outputs {
  size_t struct_size;
  ullage_vector terms;
  ullage_vector total;
  ullage_vector n_valid;
  ullage_vector token_loss;
  ullage_vector lse;
  ullage_vector label_log_prob;
  ullage_vector entropy;
  ullage_vector argmax;
  ullage_vector correct;
  ullage_matrix d_logits; /* may be the logits themselves */
  ullage_matrix d_hidden;
  ullage_matrix d_weight;
  ullage_vector d_bias;
  ullage_matrix d_adapter_a, d_adapter_b;
  ullage_policy_metrics* policy_metrics; /* [n_policy_metrics], as many as there are terms */
  int64_t n_policy_metrics;
  int32_t accumulate;           /* not 0: gradients are added to what their buffers hold */
  ullage_vector shift, log_sum; /* lse = logits_scale * shift + log_sum */
  ullage_vector distance;
} ullage_head_outputs;

typedef struct ullage_head_plan ullage_head_plan;

/* request_json: n_tok, d_model (0 or absent: the logits are given), vocab; config (losses, teachers
 * and the head's options); request (input_dtype, weight_dtype, grad_dtype, d_weight_dtype: "f64",
 * "f32", "bf16", "f16"; d_logits, d_hidden, d_weight, d_bias, d_adapter, entropy, policy_metrics);
 * limits (budget_bytes, chunk, n_threads, implementation: "auto", "fused", "per_term"; for "cuda"
 * also accumulate and filter_tolerance); device: "cpu" or "cuda". Fields have the names and
 * defaults of lossk::Request, PlanLimits, CudaLinearHeadOptions and HeadConfig. Errors: 699 for a
 * malformed document, 681 for a name that is none, and those of lossk::plan; for "cuda", of
 * lossk::plan_cuda and plan_cuda_linear. A plan for CUDA needs no device and is then an H200's; on
 * a host with devices it is the current one's. *plan is null on refusal. */
ULLAGE_API int ullage_head_plan_create(const char* request_json, ullage_head_plan** plan,
                                       char** message);

/* Null is fine. */
ULLAGE_API void ullage_head_plan_destroy(ullage_head_plan* plan);

/* What the plan promises, as JSON: device, kernel, mode, chunk, n_chunks, bookings [{purpose,
 * bytes}], workspace_bytes, workspace_alignment, materialized_bytes, operations, rejections
 * [{candidate, reason}]. Lives as long as the plan. */
ULLAGE_API const char* ullage_head_plan_json(const ullage_head_plan* plan);

ULLAGE_API int64_t ullage_head_plan_workspace_bytes(const ullage_head_plan* plan);

/* The first bytes of the workspace after a run, all that ullage_head_plan_check reads: a caller who
 * hands the workspace on before he checks keeps a copy. Their first 8 are the status word, a signed
 * integer: negative where the run met nothing, so that of several runs the largest tells. 0 on
 * "cpu", where run itself has checked. */
ULLAGE_API int64_t ullage_head_plan_status_bytes(const ullage_head_plan* plan);

/* Allocates nothing. workspace: workspace_bytes of the plan's device or more, aligned to
 * workspace_alignment. On "cuda" every pointer is device memory and stream a cudaStream_t on which
 * the work is put; the call does not wait. On "cpu" stream must be null. Errors: those of
 * lossk::HeadPlan::run and, for CUDA, of lossk::CudaHeadPlan::run. */
ULLAGE_API int ullage_head_plan_run(const ullage_head_plan* plan, const ullage_head_inputs* inputs,
                                    const ullage_head_outputs* outputs, void* workspace,
                                    size_t workspace_bytes, void* stream, char** message);

/* On "cuda": waits for the stream and reports what the last run with this workspace met that only
 * the device could see (586 a label out of range, ...). workspace: status_bytes of the plan or
 * more, aligned as the workspace. On "cpu": success, since run has checked. */
ULLAGE_API int ullage_head_plan_check(const ullage_head_plan* plan, void* workspace,
                                      size_t workspace_bytes, void* stream, char** message);

/* What a run with a filter left out: lossk::FilterReport. */
typedef struct ullage_filter_report {
  double largest_share, largest_gradient, total_gradient, kept;
} ullage_filter_report;

/* On "cuda", of a plan with a filter_tolerance: waits for the stream and reports what the last run
 * with this workspace left out. workspace: all of it, as the run left it. Errors: 681 where the
 * plan leaves nothing out, 683 where plan or report is null, and those of check. */
ULLAGE_API int ullage_head_plan_filter_report(const ullage_head_plan* plan, void* workspace,
                                              size_t workspace_bytes, void* stream,
                                              ullage_filter_report* report, char** message);

/* Multiplies values of the device in place by *factor, one f64 of the device: gradients of a total
 * whose own gradient became known after them. Each product is formed in f32 (f64 for f64) and
 * rounded once; where the factor is 1 nothing is read or written. values: adjacent, stride 1. Puts
 * the work on stream, a cudaStream_t, and does not wait. Errors: 695, 696, 621 to 623. */
ULLAGE_API int ullage_scale_cuda(const ullage_vector* values, const double* factor, void* stream,
                                 char** message);

#ifdef __cplusplus
}
#endif

#endif /* ULLAGE_HEAD_H_ */
