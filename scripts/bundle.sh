#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `./dev bundle`: a folder that runs on machines without any installed dependencies. Layout:
#   switchyard        start script: checks the machine, then runs bin/switchyard (or, with --run NAME, another program of bin/)
#   bin/ lib/         programs, and all shared libraries that they need except those of glibc and the GPU driver
#   data/ VERSION LICENSE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=release tests=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --tests) tests=1; shift ;;
    --preset) preset=${2:?--preset needs a name}; shift 2 ;;
    -h | --help) exec ./dev bundle --help ;;
    *) echo "bundle: unknown option '$1'; see ./dev bundle --help" >&2; exit 2 ;;
  esac
done

say() { printf '==> %s\n' "$*" >&2; }
name="switchyard-$(cat VERSION)-$(uname -m)"
out=dist/$name
build=build/$preset

if [[ -n $tests ]]; then
  ./dev setup test
  ./dev build --preset "$preset" --target all -- -DSWITCHYARD_TESTS=ON
else
  ./dev build --preset "$preset" --target switchyard_cli
fi

say "collecting $out"
rm -rf "$out" "$out.tar.gz"
mkdir -p "$out/bin" "$out/lib"
programs=("$build/bin/switchyard")
if [[ -n $tests ]]; then
  mapfile -t programs < <(find "$build/bin" -maxdepth 1 -type f -perm -u+x | sort)
fi
install -m 755 "${programs[@]}" "$out/bin/"
strip --strip-debug "$out"/bin/*

# Libraries provided by the machine: glibc and the GPU driver.
readonly host_libraries='^(linux-vdso|ld-linux|libc|libm|libdl|librt|libpthread|libresolv|libutil|libcuda|libnvidia-.*)(-[a-z0-9-]+)?\.so'
ldd "$out"/bin/* | awk '$2 == "=>" {print $1, $3} $0 ~ /not found/ {print $1, "missing"}' | sort -u | while read -r soname path; do
  [[ ! $soname =~ $host_libraries ]] || continue
  [[ $path != missing && $path != not ]] || { echo "bundle: $soname is not on this machine" >&2; exit 1; }
  install -m 644 "$(readlink -f "$path")" "$out/lib/$soname"
done

cp scripts/bundle_start.sh "$out/switchyard"
chmod 755 "$out/switchyard"
cp VERSION LICENSE "$out/"
[[ ! -d data ]] || cp -r data "$out/data"

# Verifies that every library is in the bundle or belongs to glibc, and that none requires a newer glibc than promised.
if ldd "$out"/bin/* | awk '$2 == "=>" {print $3}' | sort -u | grep -vE "^$PWD/$out/bin/\.\./lib/|/lib(c|m|dl|rt|pthread|resolv|util)\.so|/ld-linux|/libcuda|/libnvidia"; then
  echo "bundle: the libraries above would be taken from the machine" >&2
  exit 1
fi
newest=$(objdump -T "$out"/bin/* "$out"/lib/* | grep -oE 'GLIBC_2\.[0-9]+' | sort -uV | tail -n 1)
if [[ $(printf '%s\nGLIBC_2.36\n' "$newest" | sort -V | tail -n 1) != GLIBC_2.36 ]]; then
  say "note: built against a newer C library: needs ${newest/_/ }, not glibc 2.36; build on Debian 12 for that"
  sed -i "s/^needed_glibc=.*/needed_glibc=${newest#GLIBC_}/" "$out/switchyard"
fi
tar -C dist -czf "$out.tar.gz" "$name"
say "made $out ($(du -sh "$out" | cut -f1)) and $out.tar.gz ($(du -sh "$out.tar.gz" | cut -f1)); start it with $out/switchyard"
