# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Packages by purpose. The names are the same in Debian 12 and Ubuntu 24.04. Sourced by ./dev.

# packages_of GROUP...: prints names, one per line.
packages_of() {
  local group
  for group in "$@"; do
    case $group in
      # compiler and build tools; SIMD and GEMM of the library; argument parsing, text and JSON of the tools
      build) printf '%s\n' g++ cmake ninja-build pkg-config libhwy-dev libdnnl-dev libcli11-dev libfmt-dev nlohmann-json3-dev ;;
      test) printf '%s\n' libgtest-dev libbenchmark-dev python3 libopenmpi-dev openmpi-bin iproute2 ;;
      # for machines with a GPU but without nvcc: pip, and the packages that it installs
      toolkit) printf '%s\n' python3-pip ;;
      toolkit_python) printf '%s\n' 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' ;;
      # source of NCCL's headers: code compiled with them works with libraries of this or a later version
      nccl_python) printf '%s\n' 'nvidia-nccl-cu13==2.30.7' ;;
      # environments for the Python package; all its other dependencies come from PyPI
      python) printf '%s\n' python3 python3-venv ;;
      lint) printf '%s\n' clang-14 clang-format-14 shellcheck python3 python3-venv ;;
      # bare systems in which CI runs the release lane (scripts/bare.sh)
      bare) printf '%s\n' debootstrap ;;
      lint_python) printf '%s\n' 'clang-tidy==23.1.4' ;;
      *) echo "packages_of: no group '$group'" >&2; return 1 ;;
    esac
  done
}
