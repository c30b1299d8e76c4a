#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares `switchyard plan` with measured exchanges; the results are the table in
docs/concepts/prediction.md.

Usage: plan_validation.py PATH-OF-SWITCHYARD [--backend cpu|cuda] [--ranks 1,2] [--hosts NAMES]...
                          [--rounds 3] [--seconds 8] [--add HOSTS=FILE]... [--topology FILE]
                          [--json FILE]

In each round, `doctor --measure` writes a topology of this machine, and `bench` measures a dispatch
and a combine of 4096 bf16 tokens and a dispatch of 512 tokens quantized to fp8. With the last
number of ranks, it also measures a dispatch of 4096 such tokens. `plan` predicts the same calls
from that topology alone. The result of each figure is the median over rounds. With --hosts a,a,b,b,
four ranks on two named hosts are also measured, with one sum per host and with exact rows; their
rows cross this machine's loopback. With --add, other measurements are compared: FILE is the output
of `bench --json` for ranks on HOSTS hosts, and `--topology` describes those hosts (default: the
last topology measured here, as a test bed). Rounds on a busy machine are not meaningful, so the
load is printed and recorded.

The exit status is 0 if at least four in five figures are within 15 %.
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WITHIN = 0.15
SHAPES = [("bf16", 4096, "none", ("dispatch", "combine")), ("bf16 to fp8", 512, "f32", ("dispatch",))]
PREFILL = ("bf16 to fp8", 4096, "f32", ("dispatch",))
VARIANTS = {"per_host": "per_host", "per_rank": "hierarchical"}


def run(tool, *args, hosts=""):
    env = {**os.environ, **({"SWITCHYARD_HOST": hosts} if hosts else {})}
    done = subprocess.run([tool, *args], capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def planned(tool, topology, config, hosts):
    """The prediction for the exchange described by a run's config, on `hosts` hosts."""
    ranks = config["ranks"]
    args = ["--ranks", str(ranks), "--ranks-per-host", str(-(-ranks // hosts)), "--tokens", str(config["tokens_per_rank"])]
    for flag in ("hidden", "experts", "topk", "dtype", "quantize", "seed"):
        if flag in config:
            args += ["--" + flag, str(config[flag])]
    args += ["--routing", config["routing"].split(",")[0], "--variants", VARIANTS[config["order"]], "--json", "-"]
    return json.loads(run(tool, "plan", topology, *args))["points"][0]["variants"][0]


def measured_locally(tool, args, ranks, hosts="", shapes=()):
    """Yields (rows, calls, run) for each element of SHAPES and of the given shapes."""
    for order in ("per_host", "per_rank") if hosts else ("per_rank",):
        for rows, tokens, quantize, calls in [*SHAPES, *shapes]:
            if order != "per_rank" and quantize != "none":
                continue  # a dispatch has no order
            bench = ["--backend", args.backend, "--ranks", str(ranks), "--tokens", str(tokens), "--quantize", quantize, "--no-verify",
                     "--order", order, "--iterations", "20"] + (["--limit-ms", "1"] if args.backend == "cpu" else [])
            one = json.loads(run(tool, "bench", *bench, "--json", "-", hosts=hosts))["runs"][0]
            yield rows, ("combine",) if hosts and order == "per_rank" and quantize == "none" else calls, one


class Table:
    def __init__(self):
        self.figures = {}

    def add(self, hosts, rows, calls, run_of_bench, prediction):
        config = run_of_bench["config"]
        for call in calls:
            key = (hosts, config["ranks"], call, rows, config["tokens_per_rank"], config["order"])
            kept = self.figures.setdefault(key, {"measured": [], "least": [], "predicted": [], "bottleneck": ""})
            kept["measured"].append(run_of_bench[call]["p50_us"])
            kept["least"].append(run_of_bench[call]["min_us"])
            kept["predicted"].append(prediction[call]["us"])
            kept["bottleneck"] = prediction[call]["bottleneck"]

    def lines(self):
        """One dictionary per figure."""
        for (hosts, ranks, call, rows, tokens, order), kept in sorted(self.figures.items()):
            measured, predicted = statistics.median(kept["measured"]), statistics.median(kept["predicted"])
            yield {"hosts": hosts, "ranks": ranks, "call": call, "rows": rows, "tokens_per_rank": tokens, "order": order,
                   "measured_us": round(measured, 1), "measured_least_us": round(min(kept["least"]), 1),
                   "predicted_us": round(predicted, 1), "off": round(predicted / measured - 1, 4),
                   "within": abs(predicted / measured - 1) <= WITHIN, "bottleneck": kept["bottleneck"],
                   "rounds": {"measured_us": kept["measured"], "predicted_us": kept["predicted"]}}


def show(lines):
    print("| hosts | ranks | call | order | rows | tokens | measured us | predicted us | off | bound by |\n" + "|---" * 10 + "|")
    for n in lines:
        mark = "" if n["within"] else " **"
        print(f"| {n['hosts']} | {n['ranks']} | {n['call']} | {n['order']} | {n['rows']} | {n['tokens_per_rank']} | {n['measured_us']:.0f} "
              f"| {n['predicted_us']:.0f} | {100 * n['off']:+.0f} %{mark} | {n['bottleneck']} |")
    good = sum(n["within"] for n in lines)
    print(f"\n{good} of {len(lines)} within {100 * WITHIN:.0f} %")
    return good


def load():
    return round(os.getloadavg()[0], 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.replace("%", "%%"), usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--hosts", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--add", action="append", default=[])
    parser.add_argument("--topology")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.add and args.rounds == 0 and not args.topology:
        parser.error("--add without rounds needs --topology")
    tool, table, loads, topology = str(Path(args.tool).resolve()), Table(), [], {}
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    with tempfile.TemporaryDirectory() as folder:
        here = str(Path(folder, "here.json"))
        for _ in range(args.rounds):
            loads.append(load())
            run(tool, "doctor", "--measure", here, "--backend", args.backend, "--seconds", str(args.seconds))
            numbers = [int(r) for r in args.ranks.split(",")]
            for ranks in numbers:
                for rows, calls, one in measured_locally(tool, args, ranks, shapes=[PREFILL] if ranks == numbers[-1] else []):
                    table.add(1, rows, calls, one, planned(tool, here, one["config"], 1))
            for names in args.hosts:
                for rows, calls, one in measured_locally(tool, args, names.count(",") + 1, names):
                    hosts = one["network"]["hosts"]
                    table.add(hosts, rows, calls, one, planned(tool, here, one["config"], hosts))
        for added in args.add:
            hosts, _, path = added.partition("=")
            for one in json.loads(Path(path).read_text())["runs"]:
                config = one["config"]
                quantized = config["quantize"] != "none"
                calls = ("dispatch",) if quantized else ("dispatch", "combine")
                rows = config["dtype"] + (" to fp8" if quantized else "")
                table.add(int(hosts), rows, calls, one, planned(tool, args.topology or here, config, int(hosts)))
        if args.rounds > 0:
            topology = json.loads(Path(here).read_text())
    loads.append(load())
    lines = list(table.lines())
    good = show(lines)
    print(f"load of this machine before each round and at the end: {', '.join(map(str, loads))}")
    if args.json:
        version = run(tool, "--version").strip()
        configuration = {"ranks": args.ranks, "hosts": args.hosts, "rounds": args.rounds, "seconds": args.seconds}
        document = {"schema": "switchyard.plan_validation/1", "date": date, "version": version, "backend": args.backend,
                    "configuration": configuration, "loads": loads, "within": WITHIN, "figures": lines, "last_topology": topology}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0 if 5 * good >= 4 * len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
