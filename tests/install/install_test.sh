#!/usr/bin/env bash
# Installs a build into an empty prefix and uses it as a stranger would: install_test.sh BUILD_DIR CONSUMER_DIR.
set -euo pipefail
build=$1 consumer=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
expected='{"module":"residentk.contract","function":"residentk_dispatch_budget","result":171}'

# expect WHAT EXPECTED ACTUAL
expect() {
  [[ $2 == "$3" ]] || { echo "$1: expected $2, got $3" >&2; exit 1; }
}

cmake --install "$build" --prefix "$prefix" >"$work/install.log"

# find_package, from C and C++. The environment of a sanitised or cross build is not the stranger's.
cmake -S "$consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" >"$work/configure.log"
cmake --build "$work/consumer" >"$work/build.log"
expect "find_package, C" "$expected" "$("$work/consumer/from_c")"
"$work/consumer/from_cpp"

# pkg-config. The .pc file lies in lib or in lib/<triplet>, as CMake chose.
pc=$(find "$prefix" -name ullage.pc)
export PKG_CONFIG_PATH=${pc%/*}
flags=$(pkg-config --cflags --libs ullage)
libdir=$(pkg-config --variable=libdir ullage)
# shellcheck disable=SC2086  # the flags are words
${CC:-cc} -std=c99 "$consumer/from_c.c" -o "$work/from_c" $flags
expect "pkg-config, C" "$expected" "$(LD_LIBRARY_PATH=$libdir "$work/from_c")"

# The installed program finds its own library, if it needs one, without help.
expect "program" "$expected" "$(env -u LD_LIBRARY_PATH "$prefix/bin/ullage" exec residentk.contract residentk_dispatch_budget '[28]')"

# What is exported is what ULLAGE_API marks: no third-party symbol, no symbol of an inner floor.
library=$(find "$prefix" -name 'libullage.so')
leaked=$(nm -D --defined-only --demangle "$library" | grep -E 'nlohmann|CLI::|fmt::|hwy::|ullage::(reference|cpu|runtime|model|plan|session)::' || true)
expect "exported symbols" "" "$leaked"
