#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Starts a program of this bundle after checking that it can run on this machine.
#   ./switchyard VERB ...              the command line tool
#   ./switchyard --run PROGRAM ...     another program of bin/ (tests)
# SWITCHYARD_BUNDLE_GPU=1 also requires a GPU driver. The CPU backend does not need one.
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
needed_glibc=2.36
needed_driver=580

fail() {
  printf 'switchyard: %s\n' "$*" >&2
  exit 3
}

# at_least FOUND NEEDED: compares dotted versions.
at_least() {
  [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{print $2}')
[ -n "$glibc" ] || fail "this bundle needs glibc $needed_glibc or newer; found another C library"
at_least "$glibc" "$needed_glibc" || fail "this bundle needs glibc $needed_glibc or newer, found $glibc; use Debian 12, Ubuntu 24.04 or newer"

driver=$(cat /sys/module/nvidia/version 2>/dev/null)
if [ -n "$driver" ] && ! at_least "$driver" "$needed_driver"; then
  [ "${SWITCHYARD_BUNDLE_GPU:-0}" != 1 ] || fail "GPUs need driver $needed_driver or newer, found $driver"
  printf 'switchyard: driver %s is older than %s: only the CPU backend can be used\n' "$driver" "$needed_driver" >&2
fi
[ "${SWITCHYARD_BUNDLE_GPU:-0}" != 1 ] || [ -n "$driver" ] || fail "SWITCHYARD_BUNDLE_GPU=1, but no NVIDIA driver is loaded"

program=switchyard
if [ "${1:-}" = --run ]; then
  program=${2:-}
  if [ -z "$program" ] || [ ! -x "$here/bin/$program" ]; then fail "no program '$program' in $here/bin"; fi
  shift 2
fi
exec "$here/bin/$program" "$@"
