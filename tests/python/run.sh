#!/usr/bin/env bash
# The Python tests over build/lib/libullage.so, in a virtual environment of pinned packages that is kept in the cache.
# usage: tests/python/run.sh [PYTEST ARGUMENT...], or --python: names that environment's Python, where it has torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

torch=torch==2.13.0 # the smallest build PyPI has for Linux that custom_op needs, 502 MiB
key=$(cat tests/python/requirements.txt tools/cuda_stubs.py <(python3 -V) <(printf '%s' "$torch") | sha256sum | cut -c 1-16)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/ullage/venv-$key
pip=("$venv/bin/pip" --disable-pip-version-check --quiet install --no-deps)

if [ ! -f "$venv/complete" ]; then
  printf 'installing the Python tests'\'' packages into %s\n' "$venv" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  if ! "${pip[@]}" -r tests/python/requirements.txt; then
    printf 'SKIPPED: the Python tests: no packages to be had (no network?)\n' >&2
    rm -rf "$venv"
    [ "${1:-}" != --python ]
    exit
  fi
  # PyPI's torch is linked against CUDA libraries of 3 GB that these tests never call; stubs stand in for them.
  if [ "$(uname -m)" = x86_64 ] && "${pip[@]}" --no-cache-dir "$torch"; then
    "$venv/bin/python" tools/cuda_stubs.py "$(echo "$venv"/lib/python3*/site-packages)"
    touch "$venv/complete"
  else
    printf 'SKIPPED: the tests of ullage.torch: %s cannot be had here\n' "$torch" >&2
  fi
fi
if [ "${1:-}" = --python ]; then
  [ -f "$venv/complete" ]
  printf '%s\n' "$venv/bin/python"
  exit
fi
PYTHONPATH=python exec "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
