#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs compute-sanitizer's memcheck over a subset of the Python tests on GPUs: a test per object and mode, two ranks as
# processes. Tests run concurrently, and all but those of graphs, layers and row memory run without torch's caching allocator, so that
# every tensor has bounds. Fails if the tool found an error or missed the planted one, or if a test failed. Needs a library with
# CUDA, torch and pytest.
#
#   python/tests/gpu/sanitize.sh [--logs DIR] [--jobs N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

readonly exact=(  # without the caching allocator
  'test_cuda.py::test_rank_major[dtype1-exact]'
  'test_cuda.py::test_expert_major[per_route]'
  'test_cuda.py::test_rows_of_the_caller[f32]'
  'test_cuda.py::test_gradients[expert_major]'
  'test_cuda.py::test_low_latency_of_the_caller'
  'test_cuda.py::test_grouped_gemm[expert_major]'
  'test_cuda.py::test_ledgers'
  'test_cuda_in_flight.py::test_a_low_latency_output_is_dropped[2-another_thread]'
  'test_cuda_in_flight.py::test_low_latency_rows_are_dropped[2-object_closed]'
  'test_cuda_in_flight.py::test_an_exchange_is_closed[2]'
  'test_cuda_in_flight.py::test_a_grouped_gemm_is_dropped'
  'test_cuda_in_flight.py::test_scales_are_read_in_the_callers_order[constructor]'
  'test_cuda_deep_ep.py::test_mixed'
)
readonly cached=(
  'test_cuda.py::test_low_latency[f32]'
  'test_cuda_in_flight.py::test_a_layer_is_dropped[separate]'  # cudaFree, which frees tensors otherwise, waits for the GPU
  'test_cuda_in_flight.py::test_a_layer_is_dropped[low_latency]'
  'test_cuda_in_flight.py::test_a_layer_is_dropped[fused]'
  'test_cuda_graphs.py::test_by_handle[expert_major]'
  'test_cuda_in_flight.py::test_a_graph_keeps_memory[2-after_capture]'
  'test_cuda_in_flight.py::test_row_memory_is_closed[2]'
)

logs=build/gpu_sanitize_python jobs=8
while [[ $# -gt 0 ]]; do
  case $1 in
    --logs) logs=${2:?--logs needs a folder}; shift 2 ;;
    --jobs) jobs=${2:?--jobs needs a number}; shift 2 ;;
    -h | --help) sed -n '3,8s/^# \?//p' "$0"; exit 0 ;;
    *) echo "sanitize.sh: unknown option '$1'; see --help" >&2; exit 2 ;;
  esac
done
mkdir -p "$logs"
: >"$logs/failed"
export SWITCHYARD_TEST_BUSY=${SWITCHYARD_TEST_BUSY:-60} PYTHONPATH=python:${PYTHONPATH:-}
memcheck=(compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 --print-limit 20)

# check TEST NOCACHE: runs one test; the log is named after it.
check() {
  local log=$logs/${1//[^a-zA-Z0-9_]/_}.log
  env ${2:+PYTORCH_NO_CUDA_MEMORY_CACHING=1} "${memcheck[@]}" python3 -m pytest -q -x -p no:cacheprovider "python/tests/gpu/$1" >"$log" 2>&1 \
    || echo "FAILED $1 (status $?, $log)"
  grep -qE '[1-9][0-9]* passed' "$log" || echo "FAILED $1: no test passed ($log)"
  grep -q 'ERROR SUMMARY' "$log" || echo "FAILED $1: no report ($log)"
}

planted=$logs/planted.log
PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${memcheck[@]}" python3 python/tests/gpu/planted_error.py >"$planted" 2>&1 || true
if ! grep -q 'Invalid __global__ write of size 4 bytes' "$planted"; then
  echo "memcheck: FAILED, it does not find the error that is planted in one of two ranks (see $planted)"
  exit 1
fi
for test in "${exact[@]}"; do
  while [[ $(jobs -rp | wc -l) -ge $jobs ]]; do wait -n || true; done
  check "$test" nocache >>"$logs/failed" &
done
for test in "${cached[@]}"; do
  while [[ $(jobs -rp | wc -l) -ge $jobs ]]; do wait -n || true; done
  check "$test" '' >>"$logs/failed" &
done
wait
cat "$logs/failed"
errors=$(cat "$logs"/test_*.log | sed -nE 's/.*ERROR SUMMARY: ([0-9]+) error.*/\1/p' | awk '{n += $1} END {print n + 0}')
total=$((${#exact[@]} + ${#cached[@]}))
echo "memcheck: $((total - $(cut -d' ' -f2 "$logs/failed" | sed 's/:$//' | sort -u | grep -c .))) of $total tests passed, $errors errors, the planted error was found"
[[ ! -s $logs/failed && $errors -eq 0 ]]
