#!/usr/bin/env bash
# Builds and runs the GPU benchmarks, and through PyTorch the peers that LIGER and CCE name; records go to FOLDER/*.json. usage: gpu_bench.sh FOLDER [--sweep]
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
folder=${1:?usage: gpu_bench.sh FOLDER [--sweep]}
mkdir -p "$folder"
tools/gpu_build.sh
build-gpu/bin/bench_head_logits --json "$folder/head_logits.json" "${@:2}"
build-gpu/bin/bench_linear_head --json "$folder/linear_head.json"
if tools/gpu_wheel.sh; then
  PYTHONPATH=build-gpu/wheel python3 bench/gpu/peers_torch.py --output "$folder/python.json"
fi
