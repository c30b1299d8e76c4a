#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares builds of the tool: runs the same `switchyard bench` with each in turn, several times.

  bench/compare_builds.py --build before=OLD/bin/switchyard --build after=NEW/bin/switchyard \\
      --json ratios.json -- --mode layer --backend cuda --quantize f32 --order per_rank

In each round, every build runs once, in reverse order in every second round, so that drifts of
clocks and temperature affect all builds. For each point and time that all builds report in all
rounds, prints the median of each build's p50 (microseconds) over the rounds and its ratio to that
of the first build. `spread` is the largest difference between rounds of a build, relative to the
median. Times of 0 are left out.

Exit status: 0; 1 if a run failed, a result differed from the oracle, or the builds have no time in
common; 2 for wrong usage; 130 after an interrupt.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Names in each row of the result besides those of the builds.
_COLUMNS = ("point", "time")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", required=True, metavar="NAME=TOOL", help="a build's name and its tool; at least two")
    parser.add_argument("--rounds", type=int, default=3, help="how often each build runs (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="writes the medians and the conditions")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for one run (default: 600)")
    parser.add_argument("bench", nargs="+", metavar="OPTION", help="options of `switchyard bench`, after --; without --json")
    given = parser.parse_args()
    builds = {}
    for each in given.build:
        name, _, tool = each.partition("=")
        if not name or not Path(tool).is_file() or not os.access(tool, os.X_OK):
            parser.error(f"--build {each}: must be NAME=TOOL, where TOOL is a file that can be executed")
        if name in builds or name in _COLUMNS:
            parser.error(f"--build {each}: two {'builds' if name in builds else 'columns of the result'} have this name")
        builds[name] = os.path.abspath(tool)  # a name without a slash would be searched for in PATH
    if len(builds) < 2:
        parser.error("--build: at least two are needed")
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: must be at least 1")
    if not 0 < given.limit < math.inf:
        parser.error(f"--limit {given.limit:g}: must be a number above 0")
    if given.json and not Path(given.json).resolve().parent.is_dir():
        parser.error(f"--json {given.json}: its folder does not exist")
    if any(each.split("=")[0] == "--json" for each in given.bench):
        parser.error("--json is an option of this program, not of bench")
    return given, builds


def run(tool, options, limit):
    """Returns the output of one bench as an object, and its times. Raises RuntimeError if it fails or prints something else."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "bench.json")
        try:
            done = subprocess.run([tool, "bench", *options, "--json", str(result)], stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, errors="replace", timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end in {limit:g} s") from None
        except OSError as error:
            raise RuntimeError(str(error)) from None
        if done.returncode != 0 or not result.is_file():
            raise RuntimeError(f"exit status {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
        try:
            output = json.loads(result.read_text(encoding="utf-8"))
            return output, times_of(output)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RuntimeError(f"its --json is not that of a bench: {error!r}") from None


def times_of(output):
    """Returns {(point, time): p50 in microseconds}, where `point` contains the settings that differ between the runs."""
    found, configs = {}, [each["config"] for each in output["runs"]]
    keys = dict.fromkeys(key for config in configs for key in config)
    varied = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    for each in output["runs"]:
        point = ", ".join(f"{key} {each['config'].get(key)}" for key in varied)
        for name, value in each.items():
            time_us = value.get("p50_us") if isinstance(value, dict) else None
            if isinstance(time_us, (int, float)) and 0 < time_us < math.inf:
                found[point, name] = time_us
    return found


def summary(rounds, first):
    """rounds: for each build, the results of times_of(). Returns one row per point and time that all results contain."""
    every = [times for results in rounds.values() for times in results]
    rows = []
    for key in every[0]:
        if not all(key in times for times in every):
            continue
        row = {"point": key[0], "time": key[1]}
        base = statistics.median(times[key] for times in rounds[first])
        for name, results in rounds.items():
            values = [times[key] for times in results]
            middle = statistics.median(values)
            row[name] = {"p50_us": middle, "ratio": middle / base, "spread": (max(values) - min(values)) / middle}
        rows.append(row)
    return rows


def show(rows, names):
    print(f"{'point':<28} {'time':<20}" + "".join(f" {name[:10]:>10} {'ratio':>6} {'spread':>6}" for name in names))
    for row in rows:
        print(f"{row['point'][:28]:<28} {row['time'][:20]:<20}" +
              "".join(f" {row[n]['p50_us']:>10.1f} {row[n]['ratio']:>6.3f} {row[n]['spread']:>6.3f}" for n in names))


def main():
    given, builds = arguments()
    rounds, about = {name: [] for name in builds}, {}
    for number in range(given.rounds):
        for name in list(builds)[::-1 if number % 2 else 1]:
            begin = time.monotonic()
            try:
                output, times = run(builds[name], given.bench, given.limit)
            except RuntimeError as error:
                print(f"round {number + 1}, {name}: {error}", file=sys.stderr)
                return 1
            rounds[name].append(times)
            about[name] = {key: output[key] for key in ("commit", "version", "machine", "gpus") if key in output}
            print(f"round {number + 1} of {given.rounds}, {name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    rows = summary(rounds, next(iter(builds)))
    show(rows, list(builds))
    if not rows:
        print("the builds have no time in common", file=sys.stderr)
        return 1
    if given.json:
        Path(given.json).write_text(json.dumps({"schema": "switchyard.compare/1", "date": time.strftime("%Y-%m-%d"), "bench": given.bench,
                                                "rounds": given.rounds, "builds": about, "runs": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
