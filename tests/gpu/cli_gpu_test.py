#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command-line tool on GPUs: every verb succeeds, checks its results, and writes files that other programs can read.

Usage: cli_gpu_test.py PATH-OF-SWITCHYARD [unittest arguments]
SWITCHYARD_TEST_BACKEND=cpu runs the same tests on the CPU backend, as a check of this file. About sixty processes create their
CUDA contexts one after the other, which takes minutes on GPUs (ctest allows 15). A test's name is printed before the test runs
and its time afterwards, so an interrupted run shows its position.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "tool"))
import cli_test  # noqa: E402
from cli_test import run  # noqa: E402

BACKEND = os.environ.get("SWITCHYARD_TEST_BACKEND", "cuda")
ON = ["--backend", BACKEND]
SMALL = [*ON, "--tokens", "16", "--hidden", "512", "--experts", "16", "--topk", "4"]
MODES = ("normal", "low_latency", "flat", "ledger", "layer")


class Demo(unittest.TestCase):
    """Uses more ranks than most hosts have GPUs, so ranks share GPUs."""

    SIZE = [*cli_test.Demo.SIZE, *ON]
    check = cli_test.Demo.check
    check_report = cli_test.Demo.check_report
    check_trace = cli_test.Demo.check_trace

    def test_eight_ranks(self):
        data, out = self.check("--ranks", "8")
        self.assertIn("backend   " + BACKEND, out)
        self.assertEqual(sum(data["experts"]["counts"]), 8 * 16 * 8 * 2)
        self.check_fused(data, 8)

    def check_fused(self, data, world):
        """On GPUs, the layer also runs as one kernel, and the page shows the activity of its warps."""
        same = [check for check in data["checks"] if "fused" in check["name"]]
        if BACKEND == "cpu":
            return self.assertEqual((same, data["fused"]), ([], []))
        self.assertEqual([check["passed"] for check in same], [True])
        self.assertEqual([rank["rank"] for rank in data["fused"]], list(range(world)))
        for rank in data["fused"]:
            self.assertTrue(0 <= rank["hidden_share"] <= 1, rank)
            self.assertGreater(rank["up_share"], 0, rank)

    def test_as_it_comes(self):
        """Default sizes: plans with several blocks, and ranks that use their entire share of the GPU."""
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("demo", *ON, "--out", folder)
            self.assertEqual(code, 0, out + err)
            self.assertEqual(out.splitlines()[-1], "PASS")

    def test_gate(self):
        data, _ = self.check("--ranks", "2", "--routing", "gate", "--experts", "16", "--topk", "4")
        self.assertIn("gate", {s[2] for s in data["timeline"]["slices"]})
        self.check_fused(data, 2)

    def test_processes(self):
        data, out = self.check("--ranks", "2", "--processes")
        self.assertIn("2 processes", out)
        self.check_fused(data, 2)


class Verify(unittest.TestCase):
    def expect_pass(self, *args):
        code, out, err = run("verify", *args)
        self.assertEqual(code, 0, out + err)
        return out

    def test_all_modes(self):
        self.expect_pass(*SMALL, "--ranks", "1,2,4", "--dtype", "bf16,fp8", "--routing", "uniform,drops")

    def test_layer(self):
        """Covers dropped routes, ranks without tokens, ranks without experts, skew, and GEMMs of ranks that share a GPU."""
        out = self.expect_pass(*ON, "--mode", "layer", "--ranks", "1,2,4", "--tokens", "0,1,33,200", "--hidden", "512", "--experts", "16",
                               "--topk", "4", "--intermediate", "136", "--routing", "uniform,zipf,drops,duplicates,all_to_one")
        if BACKEND == "cuda":
            self.assertRegex(out, r"layer, fused, per_route, bits of separate calls +[1-9]")
            self.assertNotIn("skipped", out)
        self.expect_pass(*ON, "--mode", "layer", "--ranks", "4", "--tokens", "65", "--hidden", "264", "--experts", "3", "--topk", "3",
                         "--intermediate", "64", "--routing", "one_expert,drops", "--processes")

    @unittest.skipUnless(BACKEND == "cuda", "experts on the CPU compute in bf16")
    def test_layer_in_fp8(self):
        """Tests partial scale blocks in both dimensions, and both kinds of scales, even if none is requested."""
        ragged = ["--mode", "layer", "--ranks", "1,2,4", "--tokens", "0,1,33,200", "--hidden", "528", "--experts", "16", "--topk", "4",
                  "--intermediate", "144", "--dtype", "bf16"]
        self.expect_pass(*ON, *ragged, "--routing", "uniform,zipf,drops,duplicates,all_to_one", "--quantize", "f32,ue8m0")
        out = self.expect_pass(*ON, *ragged, "--routing", "one_expert", "--processes", "--json")
        self.assertEqual({case["case"]["quantize"] for case in json.loads(out)["cases"]}, {"none", "f32", "ue8m0"})
        code, _, err = run("verify", *ON, "--mode", "layer", "--hidden", "264", "--quantize", "f32")
        self.assertEqual(code, 2)
        self.assertIn("--hidden: 264 given", err)

    def test_processes_and_multiprocessors(self):
        sms = ["--sms", "1,3"] if BACKEND == "cuda" else []
        self.expect_pass(*SMALL, "--ranks", "2", "--dtype", "f16", "--routing", "zipf", "--processes", *sms)

    def test_ledger(self):
        code, out, err = run("verify", "ledger", *ON, "--ranks", "2", "--tokens", "8", "--hidden", "512", "--topk", "4",
                             "--experts", "4", "--json")
        self.assertEqual(code, 0, out + err)
        self.assertTrue(json.loads(out)["passed"])


class Bench(unittest.TestCase):
    NORMAL = ["--limit-ms", "1"] if BACKEND == "cpu" else []  # keeps the host's copy limit short, because it is not checked

    def measured(self, *args):
        with tempfile.TemporaryDirectory() as folder:
            path, page = Path(folder, "a.json"), Path(folder, "a.html")
            code, out, err = run("bench", *SMALL, "--ranks", "2", "--iterations", "20", "--json", str(path), "--html", str(page),
                                 *args)
            self.assertEqual(code, 0, out + err)
            self.assertIn("</html>", page.read_text())
            runs = json.loads(path.read_text())["runs"]
        for one in runs:
            self.assertTrue(all(check["passed"] for check in one["checks"]), one["checks"])
            self.assertTrue(one["checks"])
        return runs

    def test_normal(self):
        for args in (["--sweep", "quantize=none,f32"], ["--layout", "expert_major", "--sweep", "order=per_rank,per_route"]):
            runs = self.measured(*self.NORMAL, *args)
            self.assertEqual(len(runs), 2, args)
            for one in runs:
                self.assertGreater(one["dispatch"]["p50_us"], 0)
                self.assertGreater(one["combine"]["p50_us"], 0)

    @unittest.skipIf(BACKEND == "cpu", "ranks are late on GPUs only")
    def test_a_late_rank(self):
        for one in self.measured(*self.NORMAL, "--sweep", "late-us=0,100"):
            self.assertGreater(one["dispatch"]["min_us"], 0, "negative: rank 0 was not late")
            self.assertGreater(one["combine"]["min_us"], 0, "negative: rank 0 was not late")

    def test_low_latency(self):
        runs = self.measured("--mode", "low_latency", "--quantize", "f32", "--sweep", "tokens=1,16", "--compute", "20")
        self.assertEqual(len(runs), 2)
        for one in runs:
            self.assertGreater(one["both_per_rank"]["p50_us"], 0)

    def test_flat(self):
        for one in self.measured("--mode", "flat", "--dtype", "f16", "--sweep", "late-us=0,100"):
            self.assertGreater(one["all_to_all"]["min_us"], 0, "negative: rank 0 was not late")

    def test_layer(self):
        exchanges = (["--sweep", "order=per_rank,per_route"], ["--exchange", "low_latency", "--sweep", "order=per_rank,per_route"],
                     ["--exchange", "low_latency", "--spare-slots", "1"], ["--processes"])
        for args in exchanges:
            for one in self.measured("--mode", "layer", "--intermediate", "256", *args):
                parts = ("up", "down") if BACKEND == "cuda" else ()
                for name in ("dispatch", "experts", "combine", "recorded_layer", "layer", *parts):
                    self.assertGreater(one[name]["p50_us"], 0, name)
                    self.assertEqual(one[name]["iterations"], 20, name)
                fused = [key for key in ("fused", "fused_per_rank") if key in one]
                self.assertEqual(set(one["tflops"]), {"experts", "layer", *parts, *fused})
                if BACKEND == "cuda":
                    self.assertEqual(bool(fused), one["config"]["exchange"] == "normal")
                if fused:
                    self.assertEqual([rank["rank"] for rank in one["fused_workers"]], [0, 1])

    @unittest.skipUnless(BACKEND == "cuda", "experts on the CPU compute in bf16")
    def test_layer_in_fp8(self):
        for args in (["--sweep", "quantize=none,f32,ue8m0"], ["--exchange", "low_latency", "--quantize", "f32"],
                     ["--exchange", "low_latency", "--quantize", "ue8m0", "--processes"]):
            runs = self.measured("--mode", "layer", "--intermediate", "272", *args)
            self.assertEqual({one["config"]["quantize"] for one in runs},
                             {"none", "f32", "ue8m0"} if "quantize=none,f32,ue8m0" in args else {args[3]})
            for one in runs:
                for name in ("dispatch", "up", "down", "experts", "combine", "layer"):
                    self.assertGreater(one[name]["p50_us"], 0, name)

    def test_processes(self):
        self.measured(*self.NORMAL, "--processes")

    def launched(self, mode, folder):
        """Starts one call for each of two ranks, as a launcher would, and returns (stdout, stderr) and the status of each."""
        calls = []
        for rank in range(2):
            own = {"SWITCHYARD_RANK": str(rank), "SWITCHYARD_WORLD_SIZE": "2", "SWITCHYARD_JOB_TOKEN": "any",
                   "SWITCHYARD_STORE": f"unix:@switchyard-gpu-test-{os.getpid()}-{mode}"}
            calls.append(subprocess.Popen([cli_test.TOOL, "bench", *SMALL, "--mode", mode, "--iterations", "20", "--json", "x.json"],
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env={**os.environ, **own}))
        try:
            return [(call.communicate(timeout=240), call.returncode) for call in calls]
        finally:
            for call in calls:
                call.kill()

    def test_launched(self):
        for mode in ("normal", "low_latency", "flat", "layer") if BACKEND == "cuda" else ("low_latency", "flat", "layer"):
            with tempfile.TemporaryDirectory() as folder:
                first, other = self.launched(mode, folder)
                self.assertEqual(first[1], 0, first)
                self.assertEqual(other[1], 0, other)
                self.assertEqual(other[0][0], "", "the first rank speaks for all")
                (one,) = json.loads(Path(folder, "x.json").read_text())["runs"]
                self.assertEqual((one["config"]["ranks"], one["config"]["ranks_are"]), (2, "processes"), mode)
                self.assertTrue(one["checks"], mode)
                self.assertTrue(all(check["passed"] for check in one["checks"]), one["checks"])


class Trace(unittest.TestCase):
    def traced(self, mode, *args):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            code, out, err = run("trace", *SMALL, "--ranks", "2", "--mode", mode, "--calls", "2", "--events", "2048", "--out",
                                 str(path), "--json", *args)
            self.assertEqual(code, 0, out + err)
            return json.loads(path.read_text()), json.loads(out)

    def traced_with_arrows(self, mode):
        """Whether any rank has to wait for another within a few calls depends on the machine."""
        for _ in range(20):
            trace, summary = self.traced(mode)
            if any(e["ph"] == "s" for e in trace["traceEvents"]):
                return trace, summary
        self.fail(f"{mode}: no arrow in 20 traces")

    def test_every_mode(self):
        for mode in MODES:
            trace, summary = self.traced_with_arrows(mode)
            spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
            self.assertEqual({e["pid"] for e in spans}, {0, 1}, mode)
            self.assertTrue(all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans), mode)
            arrows = {ph: [e["id"] for e in trace["traceEvents"] if e["ph"] == ph] for ph in "sf"}
            self.assertEqual(arrows["s"], arrows["f"], mode)
            for rank in (0, 1):
                in_flight = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == rank]
                self.assertGreater(max(in_flight, default=0), 0, mode)
                self.assertEqual(in_flight[-1], 0, mode)
            self.assertEqual(summary["lost_events"], 0, mode)
            calls = [p for p in summary["phases"] if p["category"] == "call"]
            self.assertEqual({p["rank"] for p in calls}, {0, 1}, mode)
            self.assertEqual({p["count"] for p in calls}, {2}, mode)
            self.assertGreater(summary["busiest_link"]["out"]["bytes"] + summary["busiest_link"]["back"]["bytes"], 0, mode)

    @unittest.skipUnless(BACKEND == "cuda", "of GPUs")
    def test_layer_in_one_kernel(self):
        trace, summary = self.traced("layer", "--intermediate", "256")
        self.assertEqual((summary["config"]["form"], summary["config"]["order"]), ("fused", "per_route"))
        names = {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"}
        self.assertLessEqual({"layer", "expert_up", "expert_down", "pull_rows", "return_rows", "sum_returned"}, names)
        self.assertEqual([layer["rank"] for layer in summary["layers"]], [0, 1])
        for layer in summary["layers"]:
            self.assertEqual(layer["calls"], 2)
            self.assertGreater(layer["communication_us"], 0)
            self.assertTrue(0 <= layer["hidden_share"] <= 1, layer)
            self.assertLess(layer["before_up_us"] + layer["after_down_us"], layer["call_us"])
            shares = [layer[f"{what}_share"] for what in ("up", "down", "sum", "wait")]
            self.assertTrue(all(share >= 0 for share in shares) and sum(shares) <= 1.000001, layer)
        _, summary = self.traced("layer", "--form", "separate", "--intermediate", "256")
        self.assertLessEqual({"dispatch", "combine"}, {p["phase"] for p in summary["phases"]})

    def test_rings(self):
        _, summary = self.traced("normal", "--staging", "ring")
        self.assertIn("ring_send", {p["phase"] for p in summary["phases"]})

    def test_cost(self):
        _, summary = self.traced("low_latency", "--cost", "3")
        self.assertEqual(len(summary["recording"]["plain_us"]), 3)


class Tune(unittest.TestCase):
    def test_a_file_that_the_library_reads(self):
        with tempfile.TemporaryDirectory() as folder:
            path, found = Path(folder, "a.tuning"), Path(folder, "a.json")
            code, out, err = run("tune", *SMALL, "--ranks", "2", "--mode", "low_latency", "--iterations", "20", "--out", str(path),
                                 "--json", str(found))
            self.assertEqual(code, 0, out + err)
            self.assertIn("mode=low_latency ranks=2 hidden=512 tokens=16", path.read_text())
            self.assertEqual(len(json.loads(found.read_text())["chosen"]), 1)
            code, out, err = run("verify", *SMALL, "--ranks", "2", "--mode", "low_latency", "--dtype", "bf16", "--routing",
                                 "uniform", env={"SWITCHYARD_TUNING": str(path)})
            self.assertEqual(code, 0, out + err)

    @unittest.skipUnless(BACKEND == "cuda", "of GPUs")
    def test_dispatches_that_quantise_are_measured_beside_the_others(self):
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "a.json")
            code, out, err = run("tune", *SMALL, "--ranks", "2", "--mode", "normal_expert_major", "--iterations", "20", "--out",
                                 str(Path(folder, "a.tuning")), "--json", str(found))
            self.assertEqual(code, 0, out + err)
            document = json.loads(found.read_text())
        taken = [one["quantized_config"]["sms"] for one in document["runs"]]
        self.assertEqual(taken[0], min(64, max(taken)), "untuned: 64, or all that the rank has, which are tried, too")
        self.assertIn(4, taken)
        for one in document["runs"]:
            self.assertEqual((one["config"]["quantize"], one["quantized_config"]["quantize"]), ("none", "f32"))
            self.assertGreater(one["quantized_dispatch"]["p50_us"], 0)
        self.assertIn("quantized_dispatch", {gain["of"] for gain in document["chosen"][0]["gains"]})


class Doctor(unittest.TestCase):
    def test_names_the_gpus(self):
        code, out, err = run("doctor")
        self.assertEqual(code, 0, out + err)
        if BACKEND == "cuda":
            self.assertRegex(out, r"ok +GPU 0 +NVIDIA")
            self.assertRegex(out, r"ok +cuda +ready on")
            self.assertRegex(out, r"global timer +ticks every [1-9]\d* ns")


class Errors(unittest.TestCase):
    @unittest.skipUnless(BACKEND == "cuda", "of GPUs")
    def test_too_many_multiprocessors(self):
        code, _, err = run("bench", *SMALL, "--ranks", "2", "--sms", "1000")
        self.assertEqual(code, 2, err)
        self.assertIn("--sms", err)


class TimedResult(unittest.TextTestResult):
    def startTest(self, test):
        self.begin = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        super().stopTest(test)
        self.stream.writeln(f"  {time.monotonic() - self.begin:.1f} s")


class TimedRunner(unittest.TextTestRunner):
    resultclass = TimedResult


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main(testRunner=TimedRunner, verbosity=2)
