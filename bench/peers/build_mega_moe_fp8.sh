#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the benchmark mega_moe_fp8 (see mega_moe_fp8.cu) for Hopper GPUs from the headers in the wheel of sgl-deep-gemm 0.2.5.
#
#     bench/peers/build_mega_moe_fp8.sh WHEEL_DIR OUT
#
# WHEEL_DIR: the unpacked wheel; if it does not exist, pip downloads the wheel and checks its hash, and this script unpacks it.
# NVCC and PYTHON replace the programs nvcc and python3. Needs CUDA 13.0 or later and GCC, no GPU; takes some minutes.
set -euo pipefail
(($# == 2)) || { sed -n '3,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
wheel=$1 out=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}

if [[ ! -d $wheel ]]; then
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  hash=e13778e53f682b806dd2c799b5ad81701114d9346044643a8df7589a845f34e6
  echo "sgl-deep-gemm==0.2.5 --hash=sha256:$hash" >"$download/wanted"
  "$python" -m pip -q --disable-pip-version-check download --no-deps --only-binary=:all: --require-hashes -d "$download" \
    -r "$download/wanted"
  "$python" -m zipfile -e "$download"/sgl_deep_gemm-0.2.5-*.whl "$wheel"
fi
header=$wheel/deep_gemm/include/deep_gemm/impls/sm90_fp8_mega_moe.cuh
[[ -f $header ]] || { echo "$header is missing" >&2; exit 1; }

# The peer compiles its kernels at run time with the same options for optimization and registers.
"${NVCC:-nvcc}" -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Xptxas --register-usage-level=10,--verbose \
  --expt-relaxed-constexpr --expt-extended-lambda -diag-suppress 39,128,161,174,177,186,940 \
  -Xcompiler -O3,-Wno-deprecated-declarations,-Wno-abi -cudart static -lpthread -ldl -I "$here" -I "$wheel/deep_gemm/include" \
  "$here"/mega_moe_fp8{,_data,_peer}.cu -o "$out"
