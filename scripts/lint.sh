#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `./dev lint`. Runs every check; the last line contains the numbers of passed and failed checks.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. scripts/packages.sh

changed='' fix='' tidy=''
for option in "$@"; do
  case $option in
    --changed) changed=1 ;;
    --fix) fix=1 ;;
    --tidy) tidy=all ;;
    -h | --help) exec ./dev lint --help ;;
    *) echo "lint: unknown option '$option'; see ./dev lint --help" >&2; exit 2 ;;
  esac
done

if [[ -n $changed ]]; then
  mapfile -t files < <(git diff --name-only --diff-filter=d HEAD; git ls-files --others --exclude-standard)
else
  mapfile -t files < <(git ls-files)
fi
# select_files REGEX: prints the files that match.
select_files() { printf '%s\n' "${files[@]}" | grep -E "$1" || true; }

passed=0 failed=0
# check NAME COMMAND...
check() {
  local name=$1 start=$SECONDS
  shift
  if "$@"; then
    passed=$((passed + 1)); printf 'lint: %-12s ok (%d s)\n' "$name" $((SECONDS - start))
  else
    failed=$((failed + 1)); printf 'lint: %-12s FAILED (%d s)\n' "$name" $((SECONDS - start))
  fi
}

check_format() {
  local tool list
  # One fixed version, because each version formats slightly differently.
  tool=$(command -v clang-format-14 || { clang-format --version 2>/dev/null | grep -q 'version 14\.' && command -v clang-format; }) ||
    { echo "clang-format 14 not found: ./dev setup lint"; return 1; }
  mapfile -t list < <(select_files '\.(c|h|cpp|hpp|cu|cuh)$')
  [[ ${#list[@]} -gt 0 ]] || return 0
  if [[ -n $fix ]]; then
    "$tool" -i "${list[@]}"
  else
    "$tool" --dry-run -Werror "${list[@]}" 2>&1 | { grep -E 'error:' || true; } | sed -E 's/^([^:]+):.*/\1/' | sort | uniq -c |
      awk '{print $2 ": " $1 " places differ from .clang-format (./dev lint --fix)"; bad = 1} END {exit bad}'
  fi
}

check_shell() {
  local list
  mapfile -t list < <(select_files '(\.sh|^dev|^\.ci/run)$')
  [[ ${#list[@]} -eq 0 ]] || shellcheck -x "${list[@]}"
}

check_python() {
  local list
  mapfile -t list < <(select_files '\.py$')
  [[ ${#list[@]} -eq 0 ]] || python3 -c 'import ast, sys
for name in sys.argv[1:]: ast.parse(open(name).read(), name)' "${list[@]}"
}

check_names() {
  local list
  mapfile -t list < <(select_files '\.(c|h|cpp|hpp|cu|cuh|def|py)$')
  [[ ${#list[@]} -eq 0 ]] || python3 scripts/lint_names.py "${list[@]}"
}

check_results() {
  local list
  mapfile -t list < <(git ls-files bench/results)
  python3 scripts/result_lines.py --check "${list[@]}"
}

# From PyPI, because Debian's version takes several times as long for system headers.
check_tidy() {
  local tools=build/lint/tools list wanted
  wanted=$(packages_of lint_python)
  [[ -f build/release/compile_commands.json ]] || { echo "needs build/release: ./dev build"; return 1; }
  if [[ $(cat "$tools/installed" 2>/dev/null) != "$wanted" ]]; then
    python3 -m venv --clear "$tools" && "$tools/bin/pip" -q --disable-pip-version-check install "$wanted" || return 1
    echo "$wanted" >"$tools/installed"
  fi
  mapfile -t list < <(select_files '^(src|oracle|tools)/.*\.cpp$')
  [[ ${#list[@]} -gt 0 ]] || return 0
  python3 scripts/lint_tidy.py "$tools/bin/clang-tidy" build/release "${list[@]}" || [[ $? -eq 2 && -n $changed ]]
}

sizes=() text=()
[[ -z $changed ]] || { sizes=("${files[@]}"); text=("${files[@]}"); }
check format check_format
check sizes python3 scripts/lint_sizes.py "${sizes[@]}"
check text python3 scripts/lint_text.py "${text[@]}"
check names check_names
check sources python3 scripts/lint_sources.py
check layers python3 scripts/lint_layers.py
check protocol python3 scripts/lint_protocol.py
check interface python3 scripts/interface/generate.py --check
check results check_results
check shell check_shell
check python check_python
check pages python3 scripts/page_blocks.py --check
[[ -z $tidy ]] || check clang-tidy check_tidy
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
