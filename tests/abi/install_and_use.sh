#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install_and_use.sh BUILD_DIR VERSION: installs the build into a scratch prefix, moves it (a package must be relocatable), and builds
# the consumer against it twice: through find_package and through pkg-config.
set -euo pipefail

build=$1 version=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/first" >"$scratch/install.log"
mv "$scratch/first" "$scratch/moved"
prefix=$scratch/moved

if grep -rl -e "$build" "$prefix"/lib*/cmake "$prefix"/lib*/pkgconfig "$prefix/include"; then
  echo "the files above name the build folder"
  exit 1
fi

cmake -S "$here/consumer" -B "$scratch/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release >"$scratch/configure.log" ||
  { cat "$scratch/configure.log"; exit 1; }
cmake --build "$scratch/consumer"
library_path=$(dirname "$(find "$prefix" -name 'libswitchyard.*' -print -quit)")
export LD_LIBRARY_PATH=$library_path
"$scratch/consumer/consumer" | tee "$scratch/output"
grep -q "PASS with Switchyard $version" "$scratch/output"

export PKG_CONFIG_PATH=$library_path/pkgconfig
[[ $(pkg-config --modversion switchyard) == "$version" ]]
read -ra flags <<<"$(pkg-config --cflags --libs switchyard)"
g++ -std=c++20 "$here/consumer/main.cpp" -o "$scratch/by_pkg_config" "${flags[@]}"
"$scratch/by_pkg_config"
