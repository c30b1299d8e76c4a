#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the kernels for architectures that no preset builds: sm_80 (no bulk copies) and sm_100. Needs nvcc, no GPU, and a configured
# build/cuda (its generated header).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
generated=build/cuda/include
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for arch in 80 100a; do
  for kernel in plan dispatch combine ledger low_latency; do
    "$nvcc" -std=c++20 -O1 --expt-relaxed-constexpr "-gencode=arch=compute_$arch,code=sm_$arch" -I src -I include -I "$generated" \
      -c "src/exchange/cuda/$kernel.cu" -o "$out/$kernel.o"
    echo "sm_$arch $kernel.cu compiles"
  done
done
