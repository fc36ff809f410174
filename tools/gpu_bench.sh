#!/usr/bin/env bash
# Runs the GPU benchmarks, and through PyTorch the peers that LIGER, CCE and QUACK name; records go to FOLDER/*.json. One
# that fails, takes longer than ten minutes or cannot be run says so and loses no other. usage: gpu_bench.sh FOLDER [--sweep]
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
folder=${1:?usage: gpu_bench.sh FOLDER [--sweep]}
mkdir -p "$folder"
ran=0 failed=0

# bench NAME COMMAND...
bench() {
  echo "== $1"
  if timeout 600 "${@:2}"; then
    ran=$((ran + 1))
  else
    echo "FAILED: $1 ended with $?; what it had written stays in $folder"
    failed=$((failed + 1))
  fi
}

if tools/gpu_build.sh; then
  bench head_logits build-gpu/bin/bench_head_logits --json "$folder/head_logits.json" "${@:2}"
  bench linear_head build-gpu/bin/bench_linear_head --json "$folder/linear_head.json"
  bench chunked_head build-gpu/bin/bench_linear_head --kernel linear_head_sm80_chunked_products \
    --json "$folder/chunked_head.json"
else
  echo "SKIPPED: the C++ benchmarks: they could not be built"
fi
if tools/gpu_wheel.sh; then
  export PYTHONPATH=build-gpu/wheel${PYTHONPATH:+:$PYTHONPATH}
  bench python python3 bench/gpu/peers_torch.py --output "$folder/python.json"
  bench python_host python3 bench/python_host_time.py --device cuda --eager --output "$folder/python_host.json"
  bench logits_python python3 bench/gpu/peers_logits.py --output "$folder/logits_python.json"
else
  echo "SKIPPED: the Python benchmarks"
fi
echo "$ran benchmarks ran, $failed failed; records in $folder"
[ "$ran" -gt 0 ] && [ "$failed" -eq 0 ]
