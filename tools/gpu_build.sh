#!/usr/bin/env bash
# Builds the GPU tests and benchmarks into build-gpu. GOOGLETEST: GoogleTest's sources, where it is
# not installed.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
cmake -S tools/gpu -B build-gpu -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  ${GOOGLETEST:+-DULLAGE_GOOGLETEST_SOURCE="$GOOGLETEST"} >/dev/null
cmake --build build-gpu -- --quiet
