/* The C interface, used from C and through the shared library alone. */
#include <stdio.h>
#include <string.h>

#include "ullage/ullage.h"

static int failures = 0;

static void expect(int held, const char* what) {
  if (held) return;
  fprintf(stderr, "FAILED: %s\n", what);
  ++failures;
}

static void expect_execute(const char* module, const char* function, const char* args, int status,
                           const char* output) {
  char* out = NULL;
  expect(ullage_execute(module, function, args, &out) == status, args ? args : "(null)");
  expect(out != NULL && strstr(out, output) != NULL, out ? out : "(null)");
  ullage_string_free(out);
}

int main(void) {
  expect_execute("residentk.contract", "residentk_dispatch_budget", "[28]", ULLAGE_RAN,
                 "\"result\":171");
  expect_execute("lossk.contract", "loss_chunk_check", "[2048, 151936]", ULLAGE_RAN,
                 "\"result\":587");
  expect_execute("residentk.probe", "resident_gpu_kernels_compiled", NULL, ULLAGE_RAN,
                 "\"result\":");
  expect_execute("residentk.contract", "residentk_dispatch_budget", NULL, ULLAGE_NOT_RUN,
                 "\"kind\":\"arity\"");
  expect_execute(NULL, NULL, NULL, ULLAGE_NOT_RUN, "\"kind\":\"unknown_module\"");
  expect_execute("lossk.contract", NULL, NULL, ULLAGE_NOT_RUN, "\"kind\":\"unknown_function\"");
  expect_execute("lossk.contract", "loss_dims_check", "[1,", ULLAGE_NOT_RUN, "\"kind\":\"json\"");
  expect(ullage_execute("lossk.contract", "loss_dims_check", "[1,1,1]", NULL) == ULLAGE_NO_OUTPUT,
         "a null out is refused");
  ullage_string_free(NULL);

  expect(strcmp(ullage_status_name(603), "resident_head_geometry_unsupported") == 0, "name of 603");
  expect(strcmp(ullage_status_name(12345), "unknown_status") == 0, "name of 12345");
  expect(strcmp(ullage_version(), ULLAGE_EXPECTED_VERSION) == 0, "version");
  expect(strstr(ullage_functions_json(), "residentk_weight_elems") != NULL, "table");
  expect(ullage_functions_json() == ullage_functions_json(), "one table");

  char* out = NULL;
  expect(ullage_probe(&out) % 20 == 0 && out && strstr(out, "\"available_bytes\":"), "probe");
  ullage_string_free(out);
  expect(ullage_plan_session("{\"model\": \"no/such\"}", &out) == 641 && strstr(out, "no/such"),
         "641");
  ullage_string_free(out);
  expect(
      ullage_plan_session("{\"modl\": \"x\"}", &out) == 699 && strstr(out, "did you mean 'model'"),
      "699");
  ullage_string_free(out);
  expect(ullage_plan_session(NULL, NULL) == 699, "a null out");
  return failures == 0 ? 0 : 1;
}
