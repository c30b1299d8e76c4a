#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Highway 1.0.3, as Debian 12 packages it: an empty program that includes <hwy/highway.h> does not compile with
# g++ 12 -march=sapphirerapids, and compiles with -march=icelake-server and the older AVX-512 targets.
#
# Expected: the header compiles for every x86 baseline that the compiler supports.
# Seen: #error "Logic error: best baseline should be included in dynamic targets" (hwy/detect_targets.h). With this option g++ defines
# __AVXVNNI__, so the baseline contains the target AVX3_DL. That target is attainable only with -DHWY_WANT_AVX3_DL or if it is in
# HWY_BASELINE, a macro that no header defines (the baseline is HWY_ENABLED_BASELINE), so attainable targets lack the baseline.
# HWY_WANT_AVX3_DL, or HWY_DISABLED_TARGETS with HWY_AVX3_DL, avoids the error.
# Needs apt-get (Debian 12) and g++-12; nothing is installed. Fails if the behavior changes.
set -euo pipefail
version=1.0.3-3+deb12u1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download "libhwy-dev=$version" >/dev/null 2>&1 || { echo "cannot download libhwy-dev=$version"; exit 2; }
dpkg -x libhwy-dev_*.deb root
printf '#include <hwy/highway.h>\nint main() { return 0; }\n' >empty.cpp
g++-12 --version | head -n 1
changed=0
for target in haswell skylake-avx512 cooperlake icelake-server sapphirerapids; do
  if g++-12 -std=c++17 -march="$target" -Iroot/usr/include -fsyntax-only empty.cpp 2>errors; then got=compiles; else got=fails; fi
  expected=compiles
  [[ $target != sapphirerapids ]] || expected=fails
  printf 'libhwy-dev %s, -march=%-15s %s %s\n' "$version" "$target:" "$got" "$(grep -m 1 -o '#error.*' errors || true)"
  [[ $got == "$expected" ]] || changed=1
done
if ((changed)); then echo "the behavior has changed"; exit 1; fi
