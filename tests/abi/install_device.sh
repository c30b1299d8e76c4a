#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install_device.sh BUILD_DIR NVCC: installs a build with CUDA into a scratch prefix and builds a project with its own row
# function against it, to check that the installed device headers are complete. Needs nvcc, no GPU.
set -euo pipefail

build=$1 nvcc=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/prefix" >"$scratch/install.log"
cmake -S "$here/consumer_device" -B "$scratch/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$scratch/prefix" -DCMAKE_CUDA_COMPILER="$nvcc" \
  -DCMAKE_CUDA_ARCHITECTURES=90a-real -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_FLAGS=--Ofast-compile=max >"$scratch/configure.log" 2>&1 ||
  { cat "$scratch/configure.log"; exit 1; }
cmake --build "$scratch/consumer"
"$scratch/consumer/consumer" | tee "$scratch/output"
grep -q "^PASS" "$scratch/output"
