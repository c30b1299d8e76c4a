#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`switchyard tune` and SWITCHYARD_TUNING from the user's perspective.

Usage: cli_tune_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import cli_test
from cli_bench_test import run_with_small_files
from cli_test import SMALL, run


class TuneUsage(unittest.TestCase):
    def expect(self, args, *texts):
        code, out, err = run(*args)
        self.assertEqual(code, 2, f"{args}: {out}{err}")
        self.assertEqual(out, "", "usage errors belong on stderr")
        for text in (*texts, "Try: switchyard tune --help"):
            self.assertIn(text, err)

    def test_wrong_usage(self):
        for mode in ("normal", "flat", "ledger"):
            self.expect(["tune", "--mode", mode], f"--mode: '{mode}' given with --backend cpu", "nothing to tune",
                        "Allowed: low_latency")
        self.expect(["tune", "--mode", "all"], "--mode: 'all' given with --backend cpu; normal has nothing to tune there",
                    "Allowed: low_latency")
        self.expect(["tune", "--mode", "flat,low_latency"], "--mode: 'flat,low_latency' given with --backend cpu; flat has")
        for flag in ("--commit", "--routing"):
            self.expect(["tune", flag, "a\nb"], f"{flag}: a text with a line break given; allowed: one line")
        self.expect(["tune", "--mode", "lowlatency"], "--mode: 'lowlatency' given", "Did you mean 'low_latency'?")
        self.expect(["tune", "--token", "3"], "--token: no such option of 'tune'", "Did you mean '--tokens'?")
        self.expect(["tune", "--tokens", "70000"], "--tokens: 70000 given", "at most 65535")
        self.expect(["tune", "--slack", "51"], "--slack: '51' given", "0 to 50")
        self.expect(["tune", "--out", "/nonexistent/x.tuning"], "--out: cannot write '/nonexistent/x.tuning'")
        with tempfile.TemporaryDirectory() as folder:
            out = ["tune", "--out", str(Path(folder, "x"))]
            self.expect([*out, "--json", "/nonexistent/x.json"], "--json: cannot write '/nonexistent/x.json'")
            self.expect([*out, "--json", str(Path(folder, "x"))], f"--json: '{folder}/x' given, to which another flag also writes")
            self.expect([*out, "--html", "/nonexistent/x.html"], "--html: cannot write '/nonexistent/x.html'")
            self.expect([*out, "--out", ""], "--out: '' given; allowed: the path of a file")
            self.assertEqual(os.listdir(folder), [])
            for args, text in ((["--hidden", "256,20"], "hidden = 20"), (["--topk", "8", "--experts", "4"], "--topk: 8 given, which exceeds --experts 4"),
                               (["--tokens", "8,65535", "--hidden", "100k", "--ranks", "64"], "need about"),
                               (["--routing", "unifrm"], "Did you mean 'uniform'?")):
                self.expect([*out, *args], text)
            self.assertEqual(os.listdir(folder), [], "shapes are checked before anything is measured")
        with tempfile.NamedTemporaryFile("w", suffix=".tuning") as broken:
            broken.write("switchyard-tuning 1\nmode=low_latency\n")
            broken.flush()
            self.expect(["tune", "--out", broken.name], f"--out: {broken.name}, line 2: device is missing", "Repair or remove it")
            env = {"SWITCHYARD_TUNING": broken.name}
            for verb in (["bench", *SMALL, "--mode", "low_latency"], ["verify", *SMALL], ["trace", *SMALL, "--out", "/dev/null"]):
                code, out, err = run(*verb, env=env)
                self.assertNotEqual(code, 0, verb)
                self.assertIn(f"SWITCHYARD_TUNING: {broken.name}, line 2: device is missing", out + err)


class Tune(unittest.TestCase):
    SHAPE = ["--ranks", "2", "--tokens", "5", "--hidden", "512", "--experts", "8", "--topk", "2", "--iterations", "20"]
    KEY = 'device="cpu" mode=low_latency ranks=2 hidden=512 tokens='

    def entries(self, path):
        return [line for line in Path(path).read_text().splitlines() if line.startswith("device=")]

    def test_file_and_json(self):
        with tempfile.TemporaryDirectory() as folder:
            old = 'switchyard-tuning 1\n# kept\ndevice="x" mode=flat ranks=1 hidden=1 tokens=1 sms=3\n\n# goes\n' + self.KEY + "5 pieces=4\n"
            out_path, json_path = Path(folder, "my.tuning"), Path(folder, "tune.json")
            out_path.write_text(old)
            code, out, err = run("tune", *self.SHAPE, "--processes", "--out", str(out_path), "--json", str(json_path), "--commit", "abc123",
                                 "--html", str(Path(folder, "tune.html")))
            self.assertEqual(code, 0, out + err)
            text, entries, result = out_path.read_text(), self.entries(out_path), json.loads(json_path.read_text())
            for path in Path(folder).iterdir():
                self.assertIn(path.name, ("my.tuning", "tune.json", "tune.html"))
            self.assertEqual(run("plot", "tune.json", "--html", "again.html", cwd=folder), (0, "written to again.html\n", ""))
            self.assertEqual(Path(folder, "again.html").read_text(), Path(folder, "tune.html").read_text())
            self.assertEqual(len(entries), 2)
            self.assertEqual(entries[0], 'device="x" mode=flat ranks=1 hidden=1 tokens=1 sms=3')
            self.assertRegex(entries[1], "^" + self.KEY + r"5( pieces=[234])?$")
            self.assertIn("# kept", text)
            self.assertNotIn("# goes", text)
            self.assertRegex(text, r"# \d{4}-\d\d-\d\dT.*, switchyard \d.*, commit abc123: 2 ranks as processes.*copy limit [\d.]+ GB/s")
            self.assertIn(f"export SWITCHYARD_TUNING={out_path}", out)
            self.assertIn("What it gains", out)
            self.assertEqual(result["schema"], "switchyard.tune/1")
            self.assertEqual(result["commit"], "abc123")
            self.assertGreater(result["machine"]["usable_cores"], 0)
            self.assertGreater(result["copy_limit"]["gb_per_s"], 0)
            self.assertEqual([c["entry"] for c in result["chosen"]], entries[1:])
            tried = [r["what"] for r in result["runs"] if r["what"].startswith("pieces")]
            self.assertEqual(tried, ["pieces 1", "pieces 2", "pieces 3", "pieces 4"])
            self.assertEqual([r["config"]["pieces"] for r in result["runs"] if r["what"].startswith("pieces")], [0, 2, 3, 4])
            for one in result["runs"]:
                self.assertTrue(one["verified"])
                self.assertEqual(one["config"]["ranks_are"], "processes")
            self.assertIn("pieces 1", err)  # in the progress
            trials = result["chosen"][0]["trials"]
            self.assertEqual([(t["name"], t["value"]) for t in trials], [("pieces", n) for n in (1, 2, 3, 4)])
            self.assertEqual((sum(t["chosen"] for t in trials), sum(t["usual"] for t in trials)), (1, 1))
            chosen = result["chosen"][0]
            self.assertEqual([g["of"] for g in chosen["gains"]],
                             ["dispatch", "combine_per_route", "combine_per_rank", "both_per_route", "both_per_rank"])
            worth = "pieces=" in chosen["entry"]
            self.assertEqual(worth, "No candidate is better here" not in out)
            if worth:
                self.assertNotIn("dropped", chosen)
                self.assertTrue(all(g["tuned_us"] <= 1.03 * g["untuned_us"] for g in chosen["gains"]), chosen)
                self.assertTrue(any(g["tuned_us"] * 1.03 < g["untuned_us"] for g in chosen["gains"]), chosen)
            page = Path(folder, "tune.html").read_text()
            self.assertEqual(page.count("<rect"), 4)
            self.assertIn("low_latency, 2 ranks, 5 tokens, hidden 512", page)
            self.assertIn(f"written to {out_path}, {json_path}, {Path(folder, 'tune.html')}\n", out)

    def test_what_was_tuned_before_a_failure_is_written(self):
        with tempfile.TemporaryDirectory() as folder:
            tune = ["tune", *self.SHAPE, "--processes", "--out", "x", "--json", "x.json"]
            done = run_with_small_files(*tune, "--tokens", "5,5,8000,6", cwd=folder)
            self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
            self.assertIn("the file size limit is", done.stderr.splitlines()[-1])
            self.assertIn("What it gains", done.stdout)
            self.assertEqual([e.split(" pieces")[0] for e in self.entries(Path(folder, "x"))], [self.KEY + "5"])
            result = json.loads(Path(folder, "x.json").read_text())
            self.assertEqual(len(result["chosen"]), 1)
            self.assertIn("the file size limit is", result["stopped"])

    def test_the_default_is_that_of_the_routing(self):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "x.json"))
            code, out, err = run("tune", "--ranks", "2", "--tokens", "513", "--hidden", "528", "--experts", "8", "--iterations", "20",
                                 "--out", str(Path(folder, "x")), "--json", path)
            self.assertEqual(code, 0, out + err)
            runs = json.loads(Path(path).read_text())["runs"]
        self.assertEqual({r["config"]["topk"] for r in runs}, {8})
        asked = {r["what"]: r["config"]["pieces"] for r in runs if r["what"].startswith("pieces")}
        self.assertEqual(asked, {"pieces 1": 0, "pieces 2": 2, "pieces 3": 3, "pieces 4": 4})

    def test_a_value_that_is_given_twice_is_one_shape(self):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("tune", *self.SHAPE, "--tokens", "5,5", "--out", str(Path(folder, "x")))
            self.assertEqual(code, 0, out + err)
            self.assertEqual(len(self.entries(Path(folder, "x"))), 1)

    def test_an_interrupt_leaves_no_file(self):
        with tempfile.TemporaryDirectory() as folder:
            with subprocess.Popen([cli_test.TOOL, "tune", *self.SHAPE, "--iterations", "1m", "--out", str(Path(folder, "x"))],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tune:
                tune.stdout.readline()  # the files have been checked by then
                tune.send_signal(signal.SIGINT)
                self.assertNotEqual(tune.wait(60), 0)
            self.assertEqual(os.listdir(folder), [])

    def pieces_received(self, tuning, *args):
        """Number of parts into which a dispatch divides its rows, according to its trace."""
        env = {"SWITCHYARD_TUNING": tuning} if tuning else {}
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("trace", "--mode", "low_latency", "--ranks", "2", "--tokens", "5", "--hidden", "1024", "--experts", "8",
                                 "--topk", "2", "--calls", "1", "--events", "4096", "--json", "--out", str(Path(folder, "t.json")),
                                 *args, env=env)
            self.assertEqual(code, 0, out + err)
            return sum(p["count"] for p in json.loads(out)["phases"] if p["phase"] == "place_rows")

    def test_a_file_is_in_force(self):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "a.tuning"))
            Path(path).write_text("switchyard-tuning 1\n" + self.KEY + "5 pieces=4\n")
            rows = self.pieces_received(None, "--pieces", "1")
            self.assertGreaterEqual(rows, 10)
            self.assertEqual(self.pieces_received(None), 2 * rows)
            self.assertEqual(self.pieces_received(path), 4 * rows)
            self.assertEqual(self.pieces_received(path, "--pieces", "8"), 8 * rows)
            code, out, err = run("verify", *SMALL, "--mode", "low_latency,flat", "--hidden", "1024", "--processes",
                                 "--routing", "uniform", "--dtype", "bf16", env={"SWITCHYARD_TUNING": path})
            self.assertEqual(code, 0, out + err)
            code, out, err = run("bench", *SMALL, "--mode", "low_latency", "--iterations", "20", env={"SWITCHYARD_TUNING": path})
            self.assertEqual(code, 0, out + err)
            code, out, _ = run("doctor", env={"SWITCHYARD_TUNING": path})
            self.assertEqual(code, 0)
            self.assertIn(f"{path}: 1 of 1 entries for cpu", out)
            Path(path).write_text("switchyard-tuning 1\nhello\n")
            code, out, _ = run("doctor", env={"SWITCHYARD_TUNING": path})
            self.assertEqual(code, 1)
            self.assertIn(f"{path}, line 2: 'hello' given: must be KEY=VALUE", out)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
