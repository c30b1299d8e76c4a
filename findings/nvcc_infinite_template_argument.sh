#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nvcc 13.0.88 and 13.5.37: a launch of a kernel whose template argument is an infinite or NaN float or double does not compile.
#
# Expected: the program compiles with -std=c++20. Template arguments may have floating-point type since C++20; g++ accepts these values
# for the same template without __global__, and nvcc accepts the finite ones for kernels.
# Seen: nvcc writes the value into the host code that it generates (*.cudafe1.stub.c) as kernel<(float)inf>, kernel<(float)-inf> or
# kernel<(float)nan>. The host compiler finds no name inf, and nan is the function of the C library.
# std::numeric_limits and __builtin_inff() behave alike; templates that are only __device__ compile. A type with a static constexpr member
# as template argument, or the bits of the value as an integer, avoids the error.
# Needs Python 3 with venv, network access, 800 MB of disk and g++ that nvcc supports (seen with 12.2), no GPU; nothing is installed
# outside a temporary folder. Fails if the behavior changes.
set -euo pipefail
export LC_ALL=C
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
g++ --version | head -n 1
changed=0
for version in 13.0.88 13.5.37; do
  venv/bin/pip -q install --target "$version" nvidia-{cuda-nvcc,cuda-crt,nvvm,cuda-runtime}=="$version" ||
    { echo "cannot install nvcc $version"; exit 2; }
  while IFS='|' read -r type value spelled error; do
    start="#include <limits>\ntemplate <$type>"
    printf '%b void kernel() {}\nint main() { kernel<%s>(); }\n' "$start" "$value" >host.cpp
    printf '%b __global__ void kernel() {}\nint main() { kernel<%s><<<1, 1>>>(); }\n' "$start" "$value" >kernel.cu
    if g++ -std=c++20 -fsyntax-only host.cpp; then host=compiles; else host=fails; fi
    if "$version/nvidia/cu13/bin/nvcc" -std=c++20 -c kernel.cu -o kernel.o >errors 2>&1; then got=compiles; else got=fails; fi
    expected=compiles
    [[ -z $spelled ]] || expected=fails
    message=$(grep -m 1 -o 'error: .*' errors || true)
    echo "$type $value: g++ $host, nvcc $version $got${message:+: $message}"
    [[ $host == compiles && $got == "$expected" && $message == "$error"* ]] || changed=1
    [[ -z $spelled ]] || grep -qF "kernel<($type)$spelled>" errors || changed=1
  done <<'CASES'
float|1.5f||
float|std::numeric_limits<float>::max()||
float|std::numeric_limits<float>::infinity()|inf|error: 'inf' was not declared in this scope
float|-std::numeric_limits<float>::infinity()|-inf|error: 'inf' was not declared in this scope
float|__builtin_inff()|inf|error: 'inf' was not declared in this scope
float|std::numeric_limits<float>::quiet_NaN()|nan|error: invalid cast from type 'double (*)(const char*) noexcept'
double|std::numeric_limits<double>::infinity()|inf|error: 'inf' was not declared in this scope
CASES
done
if ((changed)); then echo "the behavior has changed"; exit 1; fi
