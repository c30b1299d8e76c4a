#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install_and_use.sh BUILD_DIR VERSION: installs the build into a scratch prefix, moves it (a package must be relocatable), and
# builds consumers against it, each through find_package and through pkg-config: of the main library only, of the additional
# libraries, and of expert compute in C. Then builds and runs the examples as a project of their own.
set -euo pipefail

build=$1 version=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/first" >"$scratch/install.log"
mv "$scratch/first" "$scratch/moved"
prefix=$scratch/moved

if grep -rl -e "$build" "$prefix"/lib*/cmake "$prefix"/lib*/pkgconfig "$prefix/include"; then
  echo "the files above name the build folder"
  exit 1
fi

library=$(find "$prefix" -name 'libswitchyard.*' -print -quit)
library_path=$(dirname "$library")
export LD_LIBRARY_PATH=$library_path PKG_CONFIG_PATH=$library_path/pkgconfig

# The main library contains only the exchange: no routing input, no expert compute, no test-only code.
dynamic=()
[[ $library == *.a ]] || dynamic=(-D)
nm -C "${dynamic[@]}" "$library" >"$scratch/symbols" 2>/dev/null
grep -q 'switchyard::NormalExchange::dispatch' "$scratch/symbols"
if grep -E 'dnnl|RoutingFile|ExpertMlp|Gradient|sy_expert_(mlp|rows)|sy_grouped_gemm|_gradient|BasicCpu<true>' "$scratch/symbols"; then
  echo "the symbols above do not belong into $library"
  exit 1
fi

# use FOLDER PACKAGE...: builds and runs the consumer in FOLDER twice.
use() {
  local name=$1 flags
  shift
  cmake -S "$here/$name" -B "$scratch/$name" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release >"$scratch/configure.log" ||
    { cat "$scratch/configure.log"; exit 1; }
  cmake --build "$scratch/$name"
  "$scratch/$name/consumer" | tee "$scratch/output"
  grep -q "^consumer: PASS" "$scratch/output"
  [[ $(pkg-config --modversion "$1") == "$version" ]]
  read -ra flags <<<"$(pkg-config --cflags --libs "$@")"
  if [[ -e $here/$name/main.c ]]; then
    gcc -std=c11 -pedantic-errors "$here/$name/main.c" -o "$scratch/by_pkg_config" "${flags[@]}"
  else
    g++ -std=c++20 "$here/$name/main.cpp" -o "$scratch/by_pkg_config" "${flags[@]}"
  fi
  "$scratch/by_pkg_config"
}

# find_components CALL: configures a project that makes this call of find_package; the exit status is that of CMake, the log $scratch/find.log.
find_components() {
  rm -rf "$scratch/find"
  mkdir "$scratch/find"
  printf 'cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES CXX)\nfind_package(%s)\n' "$1" >"$scratch/find/CMakeLists.txt"
  # shellcheck disable=SC2016  # CMake expands them
  printf 'message(STATUS "layer: ${switchyard_layer_FOUND}${Switchyard_layer_FOUND}")\n' >>"$scratch/find/CMakeLists.txt"
  cmake -S "$scratch/find" -B "$scratch/find/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >"$scratch/find.log" 2>&1
}
fail_find() { cat "$scratch/find.log"; echo "find_package($1): $2"; exit 1; }

# A wrong component is named, with those of the installation, also where the package is not required.
for name in switchyard Switchyard; do
  for call in "$name REQUIRED COMPONENTS typo" "$name REQUIRED COMPONENTS layer typo" "$name COMPONENTS typo"; do
    if find_components "$call" && [[ $call == *REQUIRED* ]]; then fail_find "$call" "succeeds"; fi
    tr -s ' \n' ' ' <"$scratch/find.log" | grep -q "component 'typo' is not part of this installation; available: layer, workload " ||
      fail_find "$call" "does not name the components"
  done
  for call in "$name REQUIRED COMPONENTS layer" "$name REQUIRED OPTIONAL_COMPONENTS typo layer"; do
    { find_components "$call" && grep -q 'layer: TRUE' "$scratch/find.log"; } || fail_find "$call" "fails"
  done
done

use consumer switchyard
grep -q "PASS with Switchyard $version" "$scratch/output"
if ldd "$scratch/consumer/consumer" "$scratch/by_pkg_config" | grep dnnl; then
  echo "a user of the exchange alone needs oneDNN"
  exit 1
fi
use consumer_layer switchyard_workload switchyard_layer
use consumer_c switchyard_layer

examples=$here/../../examples
cmake -S "$examples" -B "$scratch/examples" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >"$scratch/configure.log" ||
  { cat "$scratch/configure.log"; exit 1; }
cmake --build "$scratch/examples"
count=0
for source in "$examples"/*.c "$examples"/*.cpp; do
  name=$(basename "${source%.*}")
  "$scratch/examples/example_$name" | tee "$scratch/output"
  grep -q PASS "$scratch/output" || { echo "example_$name did not pass"; exit 1; }
  count=$((count + 1))
done
[[ $count -ge 5 ]]
