#!/usr/bin/env bash
# Builds the GPU tests and benchmarks into build-gpu; where build-gpu/bin came here without its build tree, from a
# machine like this one, it stays as it is. GOOGLETEST: GoogleTest's sources, where it is not installed.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
if [ -d build-gpu/bin ] && [ ! -f build-gpu/CMakeCache.txt ]; then
  echo "build-gpu/bin has no build tree beside it: taken as it is"
  exit 0
fi
for tool in cmake ninja; do
  if ! command -v "$tool" >/dev/null; then
    echo "the C++ GPU tests and benchmarks need $tool to be built, and it is not in PATH" >&2
    exit 1
  fi
done
if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  echo "the C++ GPU tests and benchmarks need nvcc to be built, and it is not in PATH" >&2
  exit 1
fi
cmake -S tools/gpu -B build-gpu -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  ${GOOGLETEST:+-DULLAGE_GOOGLETEST_SOURCE="$GOOGLETEST"} >/dev/null
cmake --build build-gpu -- --quiet
