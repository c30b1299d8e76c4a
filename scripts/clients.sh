#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clients.sh [PIP...]: fetches the wheels of python/tests/clients/versions.txt and unpacks their Python sources to build/clients/
# for the tests in python/tests/clients. PIP is the command of a pip (default: pip). Wheels with other hashes are refused.
# Needs about 400 MB; wheels that are there already are not fetched again. The wheels are those for Python 3.12 on x86-64,
# whatever runs the tests: only sources that run on any machine are loaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || set -- pip
versions=python/tests/clients/versions.txt
into=build/clients
platforms=()
for libc in 2_34 2_28 2_24; do platforms+=(--platform "manylinux_${libc}_x86_64"); done
mkdir -p "$into/wheels"
timeout 240 "$@" download -q --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: --python-version 3.12 \
  "${platforms[@]}" --platform any -d "$into/wheels" --find-links "$into/wheels" -r "$versions"
python3 - "$into" <<'PYTHON'
import pathlib
import sys
import zipfile

into = pathlib.Path(sys.argv[1])
for wheel in sorted((into / "wheels").glob("*.whl")):
    name, version = wheel.name.split("-")[:2]
    folder = into / f"{name}-{version}"
    if folder.exists():
        continue
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [each for each in archive.namelist() if each.endswith((".py", ".json", "METADATA", "entry_points.txt"))])
PYTHON
