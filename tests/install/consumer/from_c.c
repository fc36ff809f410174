#include <stdio.h>
#include <ullage/ullage.h>

int main(void) {
  char* out;
  const int status =
      ullage_execute("residentk.contract", "residentk_dispatch_budget", "[28]", &out);
  if (status != ULLAGE_RAN) return 1;
  puts(out);
  ullage_string_free(out);
  return 0;
}
