/* The C interface of Ullage. It needs nothing but a C99 compiler; no call prints, exits or throws.
 *
 *   char* out;
 *   int ran = ullage_execute("residentk.contract", "residentk_dispatch_budget", "[28]", &out);
 *   if (ran == ULLAGE_RAN) puts(out);  // {"module":...,"function":...,"result":171}
 *   ullage_string_free(out);
 *
 * Every call may be made from any thread. Strings are UTF-8 and end in a zero byte.
 */
#ifndef ULLAGE_ULLAGE_H_
#define ULLAGE_ULLAGE_H_

#include "ullage/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What ullage_execute returns. */
enum {
  ULLAGE_RAN = 0,       /* the function ran; a refusal is its result and counts as run */
  ULLAGE_NOT_RUN = 1,   /* *out says why, as {"error": {"kind", "message", "expected"}} */
  ULLAGE_NO_OUTPUT = 2, /* out is null, or there was no memory for its text: *out is null */
};

/* "0.1.0". */
ULLAGE_API const char* ullage_version(void);

/* Runs one contract function: docs/functions.md lists them. args_json is a JSON array of positional
 * arguments; null means "[]". A null module or function is an unknown one. *out is the caller's, to
 * be freed with ullage_string_free. */
ULLAGE_API int ullage_execute(const char* module, const char* function, const char* args_json,
                              char** out);

/* Frees what ullage_execute gave; null is fine. */
ULLAGE_API void ullage_string_free(char* text);

/* The name of a status code of any family, or "unknown_status". Never null, never to be freed. */
ULLAGE_API const char* ullage_status_name(int code);

/* The table of functions and constants as JSON: names, argument types, defaults, results,
 * documentation. Not to be freed; null where there was no memory for it. */
ULLAGE_API const char* ullage_functions_json(void);

/* What is on this machine, as JSON: version, cpu {name, threads}, instruction_sets, memory_bytes,
 * available_bytes, cuda {kernels_compiled, devices, session_possible}. Returns a multiple of 20, or
 * a status code and its message in *out, the caller's either way. */
ULLAGE_API int ullage_probe(char** out);

/* What a decode session of a model costs, as JSON: the fields of `ullage plan MODEL --json`, less
 * loss_head. request_json: model (a path: a .gguf file, a folder with config.json and safetensors,
 * or a config.json alone), context (positions, 512), kv_type and weight_type ("f32", "f16", "bf16",
 * "q8_0", "q4_0"; the second is for a config.json alone), memory_bytes (of the device; 0: this
 * machine's). Returns a multiple of 20, or a status code and its message in *out: 699 and 681 for
 * the request, 641 to 659 for the files, 601 and 602 for the context. *out is the caller's. */
ULLAGE_API int ullage_plan_session(const char* request_json, char** out);

#ifdef __cplusplus
}
#endif

#endif /* ULLAGE_ULLAGE_H_ */
