#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs compute-sanitizer over a subset of the GPU suites, one process per rank. Prints one summary line per tool. Fails if a
# tool found an error or missed a planted one, a test failed, a filter selected no test, or a program has no report. See "GPU
# checks" in CONTRIBUTING.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOF'
Usage: scripts/gpu_sanitize.sh [--tool NAME]... [--bin DIR] [--deadline SECONDS] [--limit SECONDS]
                               [--logs DIR]
  --tool NAME         memcheck, racecheck or synccheck; default: all three
  --bin DIR           where the GPU suites are (build/cuda/bin; make them with
                      ./dev build --preset cuda --target switchyard_cuda)
  --deadline SECONDS  how long ranks wait for each other (600): kernels are slow under a tool
  --limit SECONDS     wall time of one program (3600)
  --logs DIR          keeps the tools' output (build/gpu_sanitize)
EOF
}
die() { printf 'gpu_sanitize: %s\n' "$*" >&2; exit 2; }

# The subset: program, filter and, if it differs from the tests' default, multiprocessors per rank. The subset covers all kinds
# of calls on two ranks: both layouts and stagings, cached calls, drops and padding, bulk copies of rows, quantized rows,
# weights and biases, ordinary, symmetric and registered memory; kernels that divide their blocks and push rows of combine
# per_route; followed by the other modes, the grouped GEMM and the fused layer.
readonly subset=(
  'gpu_acceptance_a_test */W2_*:-*A12*'
  'gpu_acceptance_b_test *B03*/W2_*:*B05*/W2_*:*B09*/W2_*:*B10*/W2_*:*B13*/W2_*'
  'gpu_acceptance_b_test *B07*/W2_*:*B10*/W2_* 48'
  'gpu_low_latency_test *C01*/W2_*:*C02*/W2_*:*C05*/W2_*:*C10*/W2_*'
  'gpu_flat_test *E15*/W2_*:*TypesAndOptions*/W2_*'
  'gpu_gemm_test *MaskedRows*:*CountsThatCannotBe*:*NoRowsAtAll*:*AsManyExperts*:*NanStays*:*NeighboursHaveNoInfluence*:*MlpGradients*:*RowsOfNobody*'
  'gpu_moe_layer_test *GiveTheBitsOfTheirCalls/fused_normal_all:*InGraphs/fused_normal_no_tokens'
  'gpu_ledger_test *D04*/W2_*:*D05*/W2_*:*D10*/W2_*:*D11*/W2_*'
)
# Excluded from racecheck, which does not recognize the order in which these tests reuse the scales of a stage
# (docs/design/0043).
readonly without_racecheck=(
  'gpu_gemm_test Fp8Gemm.QuantisedOutputsAreThoseOfBf16:Fp8Gemm.EveryFormOfTheScales:Fp8Gemm.BitsDependOnTheRowAlone'
)
# Two ranks that wait for each other in every call. If this test makes no progress under a tool, no other test can.
readonly proof='gpu_acceptance_b_test *B02_CombineOfDispatchedRows/W2_*'

# Errors planted in one of two ranks, one kind per tool. A tool that does not report its own kind detects nothing.
readonly planted=gpu_planted_errors

tools=() bin=build/cuda/bin deadline=600 limit=3600 logs=build/gpu_sanitize
while [[ $# -gt 0 ]]; do
  case $1 in
    --tool) [[ ${2:-} =~ ^(memcheck|racecheck|synccheck)$ ]] || die "--tool = '${2:-}': memcheck, racecheck or synccheck"; tools+=("$2"); shift 2 ;;
    --bin) bin=${2:-}; [[ -n $bin ]] || die "--bin needs a folder"; shift 2 ;;
    --deadline) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--deadline = '${2:-}': seconds, at least 1"; deadline=$2; shift 2 ;;
    --limit) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--limit = '${2:-}': seconds, at least 1"; limit=$2; shift 2 ;;
    --logs) logs=${2:-}; [[ -n $logs ]] || die "--logs needs a folder"; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option '$1'" ;;
  esac
done
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck synccheck)

sanitizer=''
for candidate in compute-sanitizer "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
  if command -v "$candidate" >/dev/null; then sanitizer=$candidate; break; fi
done
[[ -n $sanitizer ]] || die "compute-sanitizer not found in PATH or ${CUDA_HOME:-/usr/local/cuda}/bin; it comes with the CUDA toolkit"
for entry in "$planted all" "$proof" "${subset[@]}" "${without_racecheck[@]}"; do
  [[ -x $bin/${entry%% *} ]] || die "$bin/${entry%% *} is missing: ./dev build --preset cuda --target switchyard_cuda"
done
mkdir -p "$logs"
unset SWITCHYARD_GPU_OPTIONAL
export SWITCHYARD_TEST_DEADLINE_S=$deadline SWITCHYARD_TEST_RANKS=processes

# run TOOL ENTRY LOG: returns the program's exit status, or 9 if the tool found errors in it.
run() {
  local tool=$1 program filter sms
  read -r program filter sms <<<"$2"
  timeout "$limit" env ${sms:+SWITCHYARD_TEST_SMS="$sms"} "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 9 \
    --print-limit 20 "$bin/$program" --gtest_filter="$filter" >"$3" 2>&1
}
# sum PATTERN LOG: prints the sum of the first group over all matching lines.
sum() { sed -nE "s/.*$1.*/\1/p" "$2" | awk '{n += $1} END {print n + 0}'; }
passed_in() { sum '\[  PASSED  \] ([0-9]+) tests?\.' "$1"; }
errors_in() { sum 'SUMMARY: ([0-9]+) (error|hazard)' "$1"; }
# The last line of a report, covering a program with all its ranks.
readonly report='(ERROR SUMMARY: [0-9]+ error|RACECHECK SUMMARY: [0-9]+ hazard)'

failed=0
for tool in "${tools[@]}"; do
  log=$logs/$tool.planted.log
  timeout "$limit" "$sanitizer" --tool "$tool" --target-processes all "$bin/$planted" "$tool" >"$log" 2>&1 || true
  if [[ $(errors_in "$log") -eq 0 ]]; then
    echo "$tool: FAILED, it does not find an error that is there in one of two ranks (see $log)"
    failed=1
    continue
  fi
  log=$logs/$tool.proof.log
  if ! run "$tool" "$proof" "$log" || [[ $(passed_in "$log") -eq 0 ]]; then
    echo "$tool: FAILED, two ranks made no progress under the tool or it found errors (see $log)"
    failed=1
    continue
  fi
  entries=("${subset[@]}")
  [[ $tool == racecheck ]] || entries+=("${without_racecheck[@]}")
  tests=0 programs=0 errors=0 bad=0
  for number in "${!entries[@]}"; do
    entry=${entries[number]}
    log=$logs/$tool.$number.${entry%% *}.log
    run "$tool" "$entry" "$log" || bad=$((bad + 1))
    count=$(passed_in "$log")
    [[ $count -gt 0 ]] || bad=$((bad + 1))
    tests=$((tests + count))
    programs=$((programs + $(grep -cE "$report" "$log" || true)))
    errors=$((errors + $(errors_in "$log")))
  done
  [[ $programs -eq ${#entries[@]} ]] || bad=$((bad + 1))
  if [[ $bad -eq 0 && $errors -eq 0 ]]; then verdict=ok; else verdict=FAILED; failed=1; fi
  echo "$tool: $verdict, $tests tests passed, $programs programs checked, $errors errors (logs: $logs/$tool.*.log)"
done
exit "$failed"
