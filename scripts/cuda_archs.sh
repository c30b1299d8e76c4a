#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the device code of every .cu file of src/ for architectures that no preset builds: sm_80 (no bulk copies) and sm_100.
# cuda_archs.sh [BUILD_DIR]: a configured build folder, for its generated header (build/cuda). Needs nvcc 12.9 or later, no GPU.
# The code is not run: it is barely optimized, and kernels with tracing are excluded, because they use the ops of the other
# kernels and of sm_90a. Use of a feature that an architecture lacks is still an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
generated=${1:-build/cuda}/include
# Files that are not compiled here. Reason: wgmma exists only on sm_90a.
exceptions=(src/gemm/gpu/kernels_{bf16_nk,bf16_kn,f16_nk,f16_kn}.cu src/gemm/gpu/fp8/kernels{,_wide,_channel,_channel_wide}.cu src/gemm/gradients/weight_gradient_{bf16,f16}.cu
  src/exchange/fused/layer{,_fp8}.cu)

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# One file needs NCCL's headers, if CMake found them.
nccl=build/nccl/include  # created by ./dev setup nccl
[ -e "$nccl/nccl_device.h" ] || nccl=$(sed -n 's/^SWITCHYARD_NCCL_HEADERS:INTERNAL=//p' "${generated%/include}/CMakeCache.txt")
[ -n "$nccl" ] || exceptions+=(src/exchange/hosts/gin.cu)

mapfile -t sources < <(find src -name '*.cu' | LC_ALL=C sort)
[ ${#sources[@]} -gt 0 ] || { echo "no .cu file under src/" >&2; exit 1; }
for exception in "${exceptions[@]}"; do
  [ -e "$exception" ] || { echo "exception $exception does not exist" >&2; exit 1; }
done
# compile ARCH SOURCE
compile() {
  "$nvcc" -std=c++20 --Ofast-compile=max -DSWITCHYARD_UNTRACED_KERNELS --expt-relaxed-constexpr "-arch=sm_$1" -cubin ${nccl:+-I "$nccl"} -I src -I include -I "$generated" "$2" \
    -o "$out/sm_$1.${2//\//.}.cubin"
  echo "sm_$1 $2 compiles"
}
export -f compile
export nvcc generated nccl out
wanted=0
for arch in 80 100a; do
  for source in "${sources[@]}"; do
    case " ${exceptions[*]} " in *" $source "*) continue ;; esac
    printf '%s\0%s\0' "$arch" "$source" >>"$out/list"
    wanted=$((wanted + 1))
  done
done
xargs -0 -n 2 -P "$(nproc)" bash -ec 'compile "$@"' compile <"$out/list"
compiled=$(find "$out" -name '*.cubin' | wc -l)
[ "$compiled" -eq "$wanted" ] || { echo "only $compiled of $wanted compilations gave an object" >&2; exit 1; }
echo "$compiled compilations, ${#sources[@]} files, ${#exceptions[@]} exceptions"
