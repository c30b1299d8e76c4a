#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`switchyard plan` and `doctor --measure` from the user's perspective.

Usage: cli_plan_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

import cli_test
from cli_test import run

TOPOLOGIES = Path(__file__).resolve().parents[3] / "data" / "topologies"
H100 = str(TOPOLOGIES / "h100_8_400g.json")
SMALL = ["--tokens", "64", "--hidden", "256"]
VARIANTS = ["flat_per_route", "flat_per_rank", "hierarchical", "per_host"]


def changed(folder, name, **fields):
    """Writes the H100 topology with modified fields to `folder` and returns its path."""
    path = Path(folder, name)
    path.write_text(json.dumps({**json.loads(Path(H100).read_text()), **fields}))
    return str(path)


class PlanUsage(unittest.TestCase):
    def expect(self, args, *texts):
        code, out, err = run("plan", *args)
        self.assertEqual(code, 2, f"{args}: {out}{err}")
        self.assertEqual(out, "")
        for text in texts:
            self.assertIn(text, err)

    def test_flags(self):
        self.expect([], "TOPOLOGY", "switchyard plan --help")
        self.expect([H100, "--rank", "3"], "--rank: no such option of 'plan'", "Did you mean '--ranks'?")
        self.expect([H100, "--ranks", "2049"], "--ranks: '2049' given", "1 to 2048")
        self.expect([H100, "--ranks-per-host", "9"], "--ranks-per-host: 9 given", "at most 8")
        self.expect([H100, "--ranks-per-host", "2", "--ranks", "1024"], "--ranks: 1024 given", "256 hosts with 512 ranks")
        self.expect([H100, "--variants", "per_hosts"], "--variants: 'per_hosts' given", "Did you mean 'per_host'?")
        self.expect([H100, "--spare-slots", "-1"], "--spare-slots")
        self.expect([H100, "--spare-slots", "2"], "--spare-slots: 2 given with more than 64 ranks", "at most 64")
        self.expect([H100, "--routing", "unifrm"], "--routing: 'unifrm' given", "Did you mean 'uniform'?")
        self.expect([H100, "--routing", "all_to_one", "--topk", "4", "--ranks", "128"], "--routing: 'all_to_one' given with more than 64 ranks")
        self.expect([H100, "--dtype", "fp8", "--quantize", "f32"], "--quantize: fp8 rows are quantized already")
        self.expect([H100, "--hidden", "12"], "--hidden = 12")
        self.expect([H100, "--json", "/nonexistent/x.json"], "--json: cannot write '/nonexistent/x.json'")
        self.expect([H100, "--html", "/nonexistent/x.html"], "--html: cannot write '/nonexistent/x.html'")

    def test_files(self):
        self.expect(["/nonexistent.json"], "TOPOLOGY: '/nonexistent.json' given, which cannot be read", "doctor --measure")
        self.expect([str(TOPOLOGIES)], "which cannot be read")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "x.json")
            for text, problem in (("{", "is not JSON: line 1, column 2"), ("3", "is not a topology: the document is not an object"),
                                  ("{}", "is not a topology: format is null")):
                path.write_text(text)
                self.expect([str(path)], f"TOPOLOGY: '{path}' given, which {problem}")
            self.expect([changed(folder, "y.json", hosts=0)], "hosts is 0; allowed: 1 to 2048")
            self.expect([changed(folder, "y.json", host_s=1)], "host_s is not known", "Did you mean 'hosts'?")
            self.expect([changed(folder, "y.json", network=None)], "network is missing, and there are 256 hosts")

    def test_doctor(self):
        for args, text in ((["--hosts", "3"], "--hosts: given without --measure"),
                           (["--backend", "cuda"], "--backend: given without --measure"),
                           (["--measure", "/nonexistent/x.json"], "--measure: cannot write '/nonexistent/x.json'"),
                           (["--measure", "x.json", "--json"], "--json: given with --measure")):
            code, out, err = run("doctor", *args)
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn(text, err)


class Plan(unittest.TestCase):
    def test_committed_topologies(self):
        paths = sorted(TOPOLOGIES.glob("*.json"))
        self.assertIn(Path(H100), paths)
        for path in paths:
            code, out, err = run("plan", str(path), *SMALL)
            self.assertEqual(code, 0, f"{path}: {err}")
            self.assertIn("per_host", out)

    def test_replicas_level_the_load(self):
        loads = {}
        for spare in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                code, out, err = run("plan", H100, "--ranks", "8,32", "--tokens", "256", "--routing", "zipf:1.2", "--spare-slots", str(spare),
                                     "--variants", "per_host", "--json", "p.json", cwd=folder)
                self.assertEqual(code, 0, err)
                loads[spare] = [point["load"] for point in json.loads(Path(folder, "p.json").read_text())["points"]]
        for before, after in zip(loads[0], loads[2]):
            self.assertEqual(set(before), {"busiest"})
            self.assertEqual(after["busiest"], before["busiest"])
            self.assertGreater(before["busiest"], 1.5)
            self.assertLess(after["busiest_with_replicas"], 1.03)
            self.assertGreater(after["weights_to_move"], 0)
        self.assertIn(f"{loads[2][1]['busiest']:.2f} > {loads[2][1]['busiest_with_replicas']:.2f}", out)

    def test_points_and_page(self):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("plan", H100, *SMALL, "--json", "p.json", "--html", "p.html", "--commit", "abc", cwd=folder)
            self.assertEqual(code, 0, err)
            document = json.loads(Path(folder, "p.json").read_text())
            page = Path(folder, "p.html").read_text()
            code, _, _ = run("plot", "p.json", "--html", "again.html", cwd=folder)
            self.assertEqual((code, Path(folder, "again.html").read_text()), (0, page))
        self.assertEqual((document["schema"], document["commit"]), ("switchyard.plan/1", "abc"))
        self.assertEqual([p["ranks"] for p in document["points"]], [2 ** i for i in range(12)])
        self.assertEqual([p["hosts"] for p in document["points"]], [1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128, 256])
        for point in document["points"]:
            self.assertEqual([v["variant"] for v in point["variants"]], VARIANTS)
            for entry in point["variants"]:
                self.assertEqual(entry["memory"]["continued"], point["ranks"] > 64)
                for call in ("dispatch", "combine"):
                    phases = entry[call]["phases"]
                    overlapped = max((p["us"] for p in phases if p["overlaps"]), default=0)
                    self.assertAlmostEqual(entry[call]["us"], overlapped + sum(p["us"] for p in phases if not p["overlaps"]))
                    self.assertIn(entry[call]["bottleneck"], [p["name"] for p in phases])
                    self.assertEqual(entry[call]["bytes"]["network_all"] > 0, point["hosts"] > 1)
            route, rank, exact, sums = ([v["dispatch"]["bytes"]["network_out"] for v in point["variants"]])
            self.assertEqual(exact, sums)
            self.assertLessEqual(rank, route)
        self.assertIn("a group has at most 64 ranks today", out)
        self.assertIn("a group has at most 64 ranks today", page)

    def test_only_what_was_asked_for(self):
        code, out, err = run("plan", H100, *SMALL, "--ranks", "12,16", "--ranks-per-host", "4", "--variants", "per-host",
                             "--routing", "recorded", "--quantize", "f32", "--json", "-")
        self.assertEqual(code, 0, err)
        document = json.loads(out)
        self.assertEqual([(p["ranks"], p["hosts"]) for p in document["points"]], [(12, 3), (16, 4)])
        self.assertEqual([len(p["variants"]) for p in document["points"]], [1, 1])
        self.assertIn("quantise", json.dumps(document))
        self.assertIn("recorded on", document["shape"]["routing"])
        self.assertIn("per_host", err, "the table is on stderr")

    def test_many_tokens_are_counted_in_part(self):
        code, out, err = run("plan", H100, "--hidden", "256", "--tokens", "1m", "--ranks", "64", "--variants", "per_host")
        self.assertEqual(code, 0, err)
        self.assertIn("rows were counted over the first 262,144 tokens of each rank", out)


class Measure(unittest.TestCase):
    def test_what_doctor_writes_can_be_planned_with(self):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("doctor", "--measure", "here.json", "--seconds", "1", "--hosts", "3", cwd=folder)
            self.assertEqual(code, 0, err)
            for text in ("copy", "empty dispatch", "planning", "network", "written to here.json", "Next: switchyard plan here.json"):
                self.assertIn(text, out)
            topology = json.loads(Path(folder, "here.json").read_text())
            code, out, err = run("plan", "here.json", *SMALL, "--ranks", "1,2,4", "--ranks-per-host", "2", "--json", "-", cwd=folder)
            self.assertEqual(code, 0, err)
        self.assertEqual((topology["hosts"], topology["one_machine"]), (3, True))
        self.assertEqual(sorted(topology["measured"]), ["calls", "copy", "link", "network", "planning", "quantize", "sum"])
        self.assertEqual([p["hosts"] for p in json.loads(out)["points"]], [1, 1, 2])

    @unittest.skipIf(os.path.exists("/dev/nvidia0"), "there are GPUs")
    def test_without_gpus(self):
        with tempfile.TemporaryDirectory() as folder:
            code, _, err = run("doctor", "--measure", "here.json", "--backend", "cuda", cwd=folder)
            self.assertEqual(code, 2)
            self.assertIn("--backend: 'cuda' given", err)
            self.assertEqual(os.listdir(folder), [])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
