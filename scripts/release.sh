#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `./dev release`: checks the tree, then makes the artifacts of a release in dist/ and prints the tag command. Uploads and tags nothing.
# --check only makes the checks of the first section, without a build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=release check=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --preset) preset=${2:?--preset needs a name}; shift 2 ;;
    --check) check=1; shift ;;
    -h | --help) exec ./dev release --help ;;
    *) echo "release: unknown option '$1'; see ./dev release --help" >&2; exit 2 ;;
  esac
done

say() { printf '==> %s\n' "$*" >&2; }
version=$(<VERSION)
problems=()

# The changelog's section of this version, without its heading.
notes() { awk -v heading="## [$version]" 'index($0, heading) == 1 {inside = 1; next} /^## / {inside = 0} inside' CHANGELOG.md; }

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || problems+=("VERSION: '$version' is not MAJOR.MINOR.PATCH")
[[ -z $(git status --porcelain) ]] || problems+=("the working tree has changes that are not committed")
heading=$(grep -F "## [$version]" CHANGELOG.md || true)
if [[ -z $heading ]]; then
  problems+=("CHANGELOG.md: no section '## [$version] - YYYY-MM-DD'")
elif ! [[ $heading =~ ^"## [$version] - "[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]]; then
  problems+=("CHANGELOG.md: '$heading' has no date; expected '## [$version] - YYYY-MM-DD'")
elif [[ -z $(notes | tr -d '[:space:]') ]]; then
  problems+=("CHANGELOG.md: the section of $version is empty")
fi
entries=$(notes | grep -c '^- ' || true)
((entries <= 60)) || problems+=("CHANGELOG.md: the section of $version has $entries entries; at most 60")
tagged=$(git rev-parse -q --verify "refs/tags/v$version^{commit}" || true)
[[ -z $tagged || $tagged == $(git rev-parse HEAD) ]] || problems+=("the tag v$version names another commit ($tagged)")
if ((${#problems[@]})); then
  printf 'release: %s\n' "${problems[@]}" >&2
  exit 1
fi
say "version $version, $entries changelog entries: ready to build"
[[ -z $check ]] || exit 0

rm -rf dist
./dev lint
./dev test --preset "$preset"
./dev bundle --preset "$preset"
./dev wheel --preset "$preset" --deep-ep
rm -rf "dist/switchyard-$version-$(uname -m)"  # the archive stays
notes >dist/RELEASE_NOTES.md
(cd dist && sha256sum ./*.tar.gz ./*.whl RELEASE_NOTES.md >SHA256SUMS && cat SHA256SUMS)
say "in dist/: archive, wheels, RELEASE_NOTES.md and SHA256SUMS of $(git rev-parse --short HEAD)"
say "to tag: git tag -a v$version -F dist/RELEASE_NOTES.md"
