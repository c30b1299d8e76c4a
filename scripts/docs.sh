#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `./dev docs`: the documents as a site in build/site. Its tools are installed from PyPI into build/python/docs, in the versions
# of scripts/site/requirements.txt. Warnings are failures: a missing page, or a link or anchor without a target.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '==> %s\n' "$*" >&2; }

serve=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --serve) serve=1; shift ;;
    -h | --help) exec ./dev docs --help ;;
    *) echo "docs: unknown option '$1'; see ./dev docs --help" >&2; exit 2 ;;
  esac
done

./dev setup python
environment=build/python/docs
wanted=scripts/site/requirements.txt
if ! cmp -s "$wanted" "$environment/installed.txt" || ! "$environment/bin/python" -c 'import mkdocs' 2>/dev/null; then
  say "installing MkDocs and what it needs into $environment"
  python3 -m venv --clear "$environment"
  "$environment/bin/pip" -q --disable-pip-version-check install -r "$wanted"
  cp "$wanted" "$environment/installed.txt"
fi

# Otherwise the theme advertises its successor at every start.
export NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1
if [[ -n $serve ]]; then exec "$environment/bin/mkdocs" serve --quiet --dev-addr 127.0.0.1:8000; fi
# Without --quiet, because it would prevent warnings from being counted.
log=build/docs.log
if ! "$environment/bin/mkdocs" build --strict --clean >"$log" 2>&1; then
  grep -vE '^(INFO|  - )' "$log" >&2
  exit 1
fi
pages=$(find build/site -name '*.html' | wc -l)
say "made build/site/index.html and $((pages - 1)) other pages"
