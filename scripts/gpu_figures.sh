#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures every GPU figure of docs/benchmarks.md on this host, one rank per GPU, and writes the JSON files, pages and traces
# into one folder. Takes about ten minutes on four GPUs. Fails if a measurement fails or a result differs from the oracle, but
# still runs the other measurements.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOF'
Usage: scripts/gpu_figures.sh [--tool FILE] [--out DIR] [--only REGEX] [--list]
  --tool FILE   the command line tool (build/cuda/bin/switchyard, which
                ./dev build --preset cuda --target switchyard_cli makes)
  --out DIR     where results go (figures/)
  --only REGEX  only the figures whose name matches
  --list        print names and commands, and stop
EOF
}
die() { printf 'gpu_figures: %s\n' "$*" >&2; exit 2; }

tool=build/cuda/bin/switchyard out=figures only=. list=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --tool) tool=${2:-}; [[ -n $tool ]] || die "--tool needs a file"; shift 2 ;;
    --out) out=${2:-}; [[ -n $out ]] || die "--out needs a folder"; shift 2 ;;
    --only) only=${2:-}; [[ -n $only ]] || die "--only needs a regular expression"; shift 2 ;;
    --list) list=1; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option '$1'" ;;
  esac
done
[[ -n $list || -x $tool ]] || die "$tool is missing: ./dev build --preset cuda --target switchyard_cli"
[[ -n $list ]] || mkdir -p "$out"

failed=0
# figure NAME COMMAND...: runs the command; its output is written to NAME.txt, progress and errors to NAME.log.
figure() {
  local name=$1 begin=$SECONDS rc=0
  shift
  [[ $name =~ $only ]] || return 0
  if [[ -n $list ]]; then printf '%-24s %s\n' "$name" "$*"; return 0; fi
  "$tool" "$@" >"$out/$name.txt" 2>"$out/$name.log" || rc=$?
  if [[ $rc -eq 0 ]]; then printf '%-24s ok, %d s\n' "$name" $((SECONDS - begin)); return 0; fi
  failed=1
  printf '%-24s FAILED with %d, see %s and .txt\n' "$name" "$rc" "$out/$name.log"
}
# measure NAME bench-options...
measure() {
  local name=$1
  shift
  figure "$name" bench --backend cuda "$@" --json "$out/$name.json"
}
# record NAME trace-options...: a small trace.
record() {
  local name=$1
  shift
  figure "trace_$name" trace --backend cuda "$@" --out "$out/trace_$name.json"
}

# cost NAME trace-options...: cost of recording, alternating with the same calls without it.
cost() {
  local name=$1
  shift
  figure "trace_cost_$name" trace --backend cuda "$@" --calls 50 --cost 21 --json --out /dev/null
  [[ ! -s $out/trace_cost_$name.txt ]] || mv "$out/trace_cost_$name.txt" "$out/trace_cost_$name.json"
}

# 1,2,4 on four GPUs: figures of ranks that share a GPU are not meaningful. Without GPUs (--list): as on four.
ranks_to_sweep() {
  local gpus=0 ranks=1
  if [[ -x $tool ]]; then gpus=$("$tool" doctor --json | grep -c '"name": "GPU [0-9]' || true); fi
  ((gpus > 0)) || gpus=4
  printf '%s' "$ranks"
  while ((ranks * 2 <= gpus)); do ranks=$((ranks * 2)) && printf ',%s' "$ranks"; done
}

readonly aligned=(--layout expert_major --alignment 128)
readonly tokens=1,8,32,64,128,256,512
measure normal --tokens 4096 --sweep sms=8,16,24,48,132
measure normal_fp8 --tokens 4096 --dtype fp8 --sms 24
measure normal_fp8_online --tokens 4096 --quantize f32 --sweep sms=24,48,132
measure normal_fp8_ue8m0 --tokens 4096 --quantize ue8m0 --sms 48
measure expert_major --tokens 4096 "${aligned[@]}" --sweep sms=48,96,132
measure expert_major_per_route --tokens 4096 "${aligned[@]}" --order per_route --sweep sms=96,132
measure normal_32768 --tokens 32768 --sms 48
measure normal_hidden --tokens 4096 --sms 24 --sweep hidden=2048,2880,4096,5120
measure normal_topk --tokens 4096 --sms 24 --sweep topk=1,2,4,6,10
measure normal_tokens --sms 24 --sweep tokens=128,512,2048,8192 --html "$out/normal_tokens.html"
measure normal_dtype --tokens 4096 --sms 24 --sweep dtype=bf16,f16,f32,fp8 --html "$out/normal_dtype.html"
measure normal_ranks --tokens 4096 --sms 24 --sweep "ranks=$(ranks_to_sweep)" --html "$out/normal_ranks.html"
measure normal_skew --tokens 4096 --sms 24 --sweep routing=uniform,zipf:1.2,group_limited,recorded --sweep dtype=bf16,fp8 \
  --html "$out/normal_skew.html"
measure normal_ring --tokens 4096 --staging ring --sweep sms=24,48,132
# decode NAME low-latency options...: sweeps over tokens, with a plot; enough replays for a p99.
decode() {
  local name=$1
  shift
  measure "$name" --mode low_latency "$@" --iterations 400 --sweep "tokens=$tokens" --html "$out/$name.html"
}
decode low_latency_fp8 --quantize f32
decode low_latency_bf16
decode low_latency_fp8_rows --dtype fp8
decode low_latency_per_route --quantize f32 --sending per_route
# Whole layers with hidden 7168, intermediate 2048, top-8; and decode-sized layers.
measure layer --mode layer --tokens 4096 --sweep experts=64,128,256 --html "$out/layer.html"
measure layer_8192 --mode layer --tokens 8192 --experts 128
measure layer_fp8 --mode layer --quantize f32 --tokens 4096 --sweep experts=64,128,256 --html "$out/layer_fp8.html"
measure layer_fp8_channel --mode layer --quantize f32 --scaling per_channel --intermediate-scaling per_row --tokens 4096 --sweep experts=64,128,256
measure layer_per_route --mode layer --tokens 4096 --experts 128 --order per_route
measure layer_short_rows --mode layer --tokens 8192 --hidden 2048 --intermediate 768 --experts 128 --order per_route
measure layer_many_short_rows --mode layer --tokens 32768 --hidden 1536 --intermediate 480 --experts 64 --order per_route \
  --iterations 60
readonly few=(--sweep "tokens=1,8,32,128")
measure layer_decode --mode layer --exchange low_latency --sweep experts=64,128 "${few[@]}" --html "$out/layer_decode.html"
measure layer_decode_fp8 --mode layer --exchange low_latency --quantize f32 --sweep experts=64,128 "${few[@]}" \
  --html "$out/layer_decode_fp8.html"
# All other kernels of the mode, at both ends of the range.
readonly orders=(--sweep "scale-order=row_major,column_major") sendings=(--sweep "sending=per_rank,per_route")
readonly ends=(--sweep "tokens=1,128")
measure low_latency_scales --mode low_latency --sweep quantize=f32,ue8m0 "${orders[@]}" "${sendings[@]}" "${ends[@]}"
measure low_latency_fp8_rows_scales --mode low_latency --dtype fp8 "${orders[@]}" "${sendings[@]}" "${ends[@]}"
measure low_latency_dtype --mode low_latency --sweep dtype=bf16,f16,f32 "${sendings[@]}" "${ends[@]}"
measure low_latency_overlap --mode low_latency --quantize f32 --iterations 400 --sweep tokens=1,32,128 --compute 50
# Time of a call after all ranks have entered, if one enters late.
readonly late=(--sweep "late-us=0,5,20,100,1000,5000")
measure low_latency_late --mode low_latency --quantize f32 --tokens 128 "${late[@]}"
measure flat_late --mode flat --tokens 128 "${late[@]}"
measure normal_late --tokens 4096 --sweep late-us=0,1000,5000
measure flat_contest --mode flat --contest
# ledger NAME verify-ledger-options...: the published fixture.
ledger() {
  local name=$1
  shift
  figure "$name" verify ledger --backend cuda --ranks 2 --tokens 64 --hidden 7168 --topk 8 --experts 4 "$@" --json
  [[ ! -s $out/$name.txt ]] || mv "$out/$name.txt" "$out/$name.json"
}
ledger ledger --iterations 200
ledger ledger_late --late-us 20
record normal --tokens 512 --sms 24 --warmup 3 --calls 1
record low_latency --mode low_latency --tokens 128 --quantize f32 --warmup 3 --calls 1
record low_latency_1 --mode low_latency --tokens 1 --quantize f32 --warmup 3 --calls 1
record flat --mode flat --tokens 128 --warmup 3 --calls 1
record ledger --mode ledger --tokens 64 --dtype f16 --warmup 3 --calls 1
record layer --mode layer --tokens 2048 --experts 128 --events 1024 --warmup 3 --calls 1
record ring --tokens 512 --sms 24 --staging ring --warmup 3 --calls 1
cost normal --tokens 4096 --sms 24
cost expert_major --tokens 4096 --sms 48 "${aligned[@]}"
cost ring --tokens 4096 --sms 24 --staging ring
cost low_latency --mode low_latency --tokens 128 --quantize f32
cost low_latency_1 --mode low_latency --tokens 1 --quantize f32
cost flat --mode flat --tokens 128
cost layer --mode layer --tokens 4096 --experts 128
cost ledger --mode ledger --tokens 64 --dtype f16
exit "$failed"
