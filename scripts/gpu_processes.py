#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the mode suites on GPUs with ranks as processes under CUDA's Multi-Process Service, several programs at once. Without
the service, processes that share a GPU take turns on it, and a test takes 16 s instead of about 1 s. A job is one program with
one number of ranks and one assignment of ranks to hosts. If a program runs out of GPU memory, it is restarted, and fewer programs
run at once."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

HOSTS_SUITES = ("acceptance_a", "acceptance_b", "delivery", "low_latency", "slots", "balance", "selecting_calls")
SUITES = (*HOSTS_SUITES, "flat", "ledger")
WORLDS = (4, 3, 2, 5, 8, 1)


@dataclass
class Job:
    program: str
    hosts: str  # "": all ranks are on one host
    world: int
    tries: int = 0
    begin: float = 0
    output: TextIO | None = None
    process: subprocess.Popen | None = None
    failed: set = field(default_factory=set)
    passed: int = 0
    selected: int = 0
    skipped: int = 0

    @property
    def name(self) -> str:
        return f"{self.program}.{self.hosts.replace(',', '') or 'one_host'}.W{self.world}"


def spans_hosts(hosts: str, world: int) -> bool:
    names = hosts.split(",")
    return len({names[r % len(names)] for r in range(world)}) > 1


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    jobs = []
    for world in WORLDS:
        if world not in arguments.worlds:
            continue
        for hosts in arguments.hosts:
            if hosts and not spans_hosts(hosts, world):
                continue
            suites = HOSTS_SUITES if hosts else SUITES
            jobs += [Job(f"gpu_{suite}_test", hosts, world) for suite in suites if suite in arguments.suites]
    return jobs


def start(job: Job, arguments: argparse.Namespace) -> None:
    environment = dict(os.environ, SWITCHYARD_TEST_RANKS="processes")
    if job.hosts:
        environment.update(SWITCHYARD_HOST=job.hosts, NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    job.tries += 1
    job.begin = time.monotonic()
    job.output = open(arguments.logs / f"{job.name}.log", "w")
    job.process = subprocess.Popen(
        [arguments.bin / job.program, f"--gtest_filter=*/W{job.world}_*"],
        env=environment,
        stdout=job.output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def read_output(job: Job, arguments: argparse.Namespace) -> str:
    job.output.close()
    text = (arguments.logs / f"{job.name}.log").read_text(errors="replace")
    job.passed = len(re.findall(r"^\[       OK", text, re.M))
    job.skipped = len(set(re.findall(r"^\[  SKIPPED \] (\S+/W\S+)", text, re.M)))
    job.failed = set(re.findall(r"^\[  FAILED  \] ([^\s,]+/W[^\s,]+)", text, re.M))
    job.selected = sum(int(n) for n in re.findall(r"^\[=+\] Running (\d+) test", text, re.M))
    return text


def report(job: Job, text: str, cut: bool) -> int:
    """Prints the result of a job and returns its number of failures, plus one if it ended early or selected no test."""
    code = job.process.returncode
    failed = len(job.failed)
    complete = job.passed + job.skipped + failed == job.selected and job.selected > 0
    if not complete or (code != 0 and failed == 0):
        failed += 1
    how = "time limit" if cut else f"exit code {code}"
    skipped = f", {job.skipped} skipped" if job.skipped else ""
    print(f"{job.name}: {job.passed} of {job.selected} passed{skipped}, {how}, {time.monotonic() - job.begin:.0f} s", flush=True)
    if failed:
        lines = [line[:300] for line in text.splitlines() if re.search("Failure|FAILED|rror|out of step", line)]
        print("\n".join("  " + line for line in lines[:8]), flush=True)
    return failed


def run(arguments: argparse.Namespace) -> tuple[int, int]:
    waiting, running, passed, failed, at_once = jobs_of(arguments), [], 0, 0, arguments.jobs
    end = time.monotonic() + arguments.limit
    while waiting or running:
        late = time.monotonic() > end
        while waiting and len(running) < at_once and not late:
            running.append(waiting.pop(0))
            start(running[-1], arguments)
        for job in list(running):
            cut = late and job.process.poll() is None
            if cut:
                os.killpg(job.process.pid, 9)
                job.process.wait()
            if job.process.poll() is None:
                continue
            running.remove(job)
            text = read_output(job, arguments)
            if "out of memory" in text and job.tries < 3 and not late:
                at_once = max(1, at_once - 2)
                waiting.insert(0, job)
                print(f"{job.name}: out of memory, restarted; from now on, {at_once} programs at once", flush=True)
                continue
            failed += report(job, text, cut)
            passed += job.passed
        if late:
            failed += len(waiting)
            for job in waiting:
                print(f"{job.name}: not started before the time limit", flush=True)
            break
        time.sleep(0.2)
    return passed, failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=Path, default=Path("build/cuda/bin"), help="folder of the GPU suites (%(default)s)")
    parser.add_argument("--logs", type=Path, default=Path("build/gpu_processes"), help="folder for their output (%(default)s)")
    parser.add_argument(
        "--hosts",
        nargs="*",
        default=["a,b", "a,a,b,b"],
        help="assignments of ranks to hosts, as in SWITCHYARD_HOST; '' is one host. Each host has its own GPU (%(default)s)",
    )
    parser.add_argument("--suites", nargs="*", choices=SUITES, default=SUITES, help="over hosts: " + ", ".join(HOSTS_SUITES))
    parser.add_argument("--worlds", nargs="*", type=int, choices=sorted(WORLDS), default=WORLDS, help="numbers of ranks (all)")
    parser.add_argument("--jobs", type=int, default=4, help="programs at once (%(default)s)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds in total (%(default)g)")
    arguments = parser.parse_args()
    programs = {job.program for job in jobs_of(arguments)}
    if not programs:
        parser.error("these hosts, suites and numbers of ranks select no tests")
    if missing := sorted(program for program in programs if not (arguments.bin / program).exists()):
        parser.error(f"{arguments.bin} lacks {missing[0]}: ./dev build --preset cuda --target switchyard_cuda")
    return arguments


def main() -> int:
    arguments = parse()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"gpu_processes: the Multi-Process Service does not start: {error}", file=sys.stderr)
            return 2
        try:
            passed, failed = run(arguments)
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", timeout=30, check=False)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
