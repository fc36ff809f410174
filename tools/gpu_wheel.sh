#!/usr/bin/env bash
# The Python package with CUDA in build-gpu/wheel, for the Python tests and benchmarks: what is there already, or
# built where a machine has what a wheel needs. Fails, with the command, where neither is so.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
if ! python3 -c 'import torch, numpy' 2>/dev/null; then
  echo "the Python package on a GPU: no PyTorch for python3"
  exit 1
fi
[ -f build-gpu/wheel/ullage/lib/libullage.so ] && exit 0
if pip wheel -q . --no-deps --no-build-isolation -w build-gpu -C build-dir=build-gpu/wheel-build >build-gpu/wheel.log 2>&1; then
  python3 -m zipfile -e build-gpu/ullage-*.whl build-gpu/wheel && exit 0
fi
echo "the Python package on a GPU: no wheel here, and none could be built (build-gpu/wheel.log). Where there are"
echo "nvcc and the libraries docs/python.md names:"
echo "  pip wheel . --no-deps -w build-gpu && python3 -m zipfile -e build-gpu/ullage-*.whl build-gpu/wheel"
exit 1
