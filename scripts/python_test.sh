#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `./dev python-test`: runs the tests of python/tests against an installed wheel, as users have it. The first environment is new
# and has only the wheel, numpy and pytest. The second one, for the tests of foreign arrays, has torch, takes 5 GB and is kept.
# The last line is `N passed, N failed`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '==> %s\n' "$*" >&2; }

preset=release torch=1
while [[ $# -gt 0 ]]; do
  case $1 in
    --preset) preset=${2:?--preset needs a name}; shift 2 ;;
    --no-torch) torch=''; shift ;;
    --) shift; break ;;
    -h | --help) exec ./dev python-test --help ;;
    *) echo "python-test: unknown option '$1'; see ./dev python-test --help" >&2; exit 2 ;;
  esac
done

./dev wheel --preset "$preset" --deep-ep
wheels=(dist/switchyard_ep-*.whl)
uv=build/python/tools/bin/uv
unset SWITCHYARD_LIBRARY SWITCHYARD_LAYER_LIBRARY PYTHONPATH
# Tests of a whole layer use the library of the build tree, because wheels contain it only on request.
./dev build --preset "$preset" --target switchyard_layer_shared
export SWITCHYARD_LAYER_LIBRARY=$PWD/build/$preset/libswitchyard_layer.so

# Two test files at a time, because most files keep only one core busy. GPU tests run one by one, because they inspect the work
# on a GPU.
workers=0
[[ $preset == cuda || $(nproc) -lt 2 ]] || workers=2

# run_tests ENVIRONMENT pytest-arguments...: adds to `passed` and `failed`.
passed=0 failed=0
run_tests() {
  local environment=$1 log line counted
  shift
  log=$(mktemp)
  "$environment/bin/python" -c 'import switchyard as s; p = s.library_path(); print(p); assert "site-packages" in p, "not of the wheel"' >&2
  "$environment/bin/pytest" -q -n "$workers" --dist loadfile "$@" | tee "$log" || true
  line=$(tail -n 1 "$log")
  rm -f "$log"
  counted=$(grep -oE '[0-9]+ passed' <<<"$line" | cut -d' ' -f1 || true)
  [[ -n $counted ]] || { failed=$((failed + 1)); counted=0; }
  passed=$((passed + counted))
  while read -r counted _; do failed=$((failed + counted)); done < <(grep -oE '[0-9]+ (failed|error)' <<<"$line" || true)
}

mapfile -t with_torch < <(grep -rlF 'importorskip(' --include='test_*.py' python/tests | sort)
mapfile -t without < <(grep -rLF 'importorskip(' --include='test_*.py' python/tests | sort)
say "a new environment with numpy"
"$uv" venv -q --clear --python build/python/tools/bin/python build/python/clean
"$uv" pip install -q --python build/python/clean/bin/python "${wheels[0]}" 'pytest>=8' 'pytest-xdist>=3'
run_tests build/python/clean "${without[@]}" "$@"

if [[ -n $torch ]]; then
  say "an environment with torch"
  [[ -x build/python/torch/bin/python ]] || "$uv" venv -q --python build/python/tools/bin/python build/python/torch
  "$uv" pip install -q --python build/python/torch/bin/python --reinstall-package switchyard-ep "${wheels[0]}" 'pytest>=8' 'pytest-xdist>=3' 'torch>=2.4' ml_dtypes 'transformers==5.24.*' 'accelerate>=1.15' 'peft>=0.21' \
    -r python/tests/clients/requirements.txt
  say "the sources of clients"
  scripts/clients.sh build/python/tools/bin/pip
  export SWITCHYARD_CLIENTS=1
  run_tests build/python/torch "${with_torch[@]}" "$@"
  version_of() { build/python/torch/bin/python -c 'import importlib.metadata as m; print(m.version("transformers"))'; }
  pinned=$(version_of)
  "$uv" pip install -q --python build/python/torch/bin/python --upgrade transformers
  if [[ $(version_of) != "$pinned" ]]; then
    say "transformers $(version_of), the newest, besides $pinned; its failures are reported and not counted"
    build/python/torch/bin/pytest -q python/tests/with_torch/test_transformers.py python/tests/with_torch/test_all_experts.py >&2 ||
      say "transformers $(version_of) fails"
  fi
  say "torchrun on two hosts, as the page on several hosts has it"
  status=0
  tests/hosts/torchrun.sh build/python/torch/bin/torchrun >&2 || status=$?
  case $status in 0) passed=$((passed + 1)) ;; 77) ;; *) failed=$((failed + 1)) ;; esac  # 77: not supported on this machine
fi
say "type hints"
environment=$([[ -n $torch ]] && echo torch || echo clean)
if build/python/tools/bin/mypy --python-executable "build/python/$environment/bin/python" --ignore-missing-imports python/switchyard; then
  passed=$((passed + 1))
else
  failed=$((failed + 1))
fi
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
