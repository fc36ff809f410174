#!/usr/bin/env bash
# Builds and runs every GPU test, in as many shards as there are processors. --sanitize: the bit
# tests again under compute-sanitizer's memcheck and racecheck.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
tools/gpu_build.sh || exit 1
logs=$(mktemp -d)
shards=$(($(nproc) < 12 ? $(nproc) : 12))
failed=0

for test in build-gpu/bin/cuda_*_test; do
  name=$(basename "$test")
  pids=()
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$test" >"$logs/$name.$shard" 2>&1 &
    pids+=($!)
  done
  for ((shard = 0; shard < shards; ++shard)); do
    if ! wait "${pids[$shard]}"; then
      failed=1
      grep -vE '^\[ +(OK|RUN)|^\[=|^\[-|^Note' "$logs/$name.$shard" | head -40
    fi
  done
  echo "$name: $(cat "$logs/$name".* | grep -c '^\[ *OK') passed," \
    "$(cat "$logs/$name".* | grep -c '^\[ *SKIPPED \].*ms') skipped," \
    "$(cat "$logs/$name".* | grep -c '^\[ *FAILED *\].*ms') failed"
  grep -h 'of its bound' "$logs/$name".* | sort -r | head -1
done

if [ "${1:-}" = --sanitize ]; then
  for tool in memcheck racecheck; do
    if ! compute-sanitizer --tool "$tool" --error-exitcode 9 build-gpu/bin/cuda_head_bits_test \
      --gtest_filter='*EqualTeacher*:*IgnoredRows*:*InAGraph*' >"$logs/$tool" 2>&1; then
      failed=1
      grep -E '=========|FAILED' "$logs/$tool" | head -40
    fi
    echo "$tool: $(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$logs/$tool" | tail -1)"
  done
fi

# The Python tests, and the peers' own tests against ours where LIGER and CCE name their checkouts.
if tools/gpu_wheel.sh; then
  export PYTHONPATH=$PWD/build-gpu/wheel
  python3 -m pytest -q -rs -p no:cacheprovider tests/python/test_cuda.py || failed=1
  python3 tests/python/peers/run.py || failed=1
fi
rm -rf "$logs"
exit $failed
