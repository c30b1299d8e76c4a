#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Complete layers from the user's perspective: `switchyard bench --mode layer`, `verify --mode layer` and `trace --mode layer`.

Usage: cli_layer_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import json
import sys
import tempfile
import unittest
from pathlib import Path

import cli_test
from cli_test import SMALL, run

FUSED = "layer, fused"
QUICK = [*SMALL, "--iterations", "20", "--warmup", "1"]


class Verify(unittest.TestCase):
    """Every token is compared with a single rank that computes everything without an exchange."""

    def test_shapes_and_routings(self):
        code, out, err = run("verify", "--mode", "layer", "--ranks", "1,3", "--tokens", "0,1,20", "--hidden", "72", "--experts", "10", "--topk",
                             "3", "--intermediate", "20", "--routing", "zipf,drops,duplicates,one_expert", "--dtype", "bf16,f16", "--json")
        self.assertEqual(code, 0, out + err)
        cases = json.loads(out)["cases"]
        self.assertEqual(len(cases), 2 * 3 * 4, "layers are bf16")
        names = ["layer, normal, per_rank", "layer, normal, per_route", "layer, low_latency, per_rank", "layer, low_latency, per_route"]
        for case in cases:
            self.assertEqual([check["name"] for check in case["checks"] if not check["name"].startswith(FUSED)], names)
            self.check_fused(case["checks"])
            self.assertEqual(case["case"]["intermediate"], 20)
        self.assertGreater(sum(check["compared"] for check in cases[-1]["checks"]), 0)
        code, out, err = run("verify", *SMALL, "--mode", "layer", "--routing", "uniform", "--processes", "--warps", "2")
        self.assertEqual(code, 0, out + err)
        for args, text in ((["--mode", "layer", "--dtype", "f16"], "those of a layer are bf16"),
                           (["--mode", "layer", "--quantize", "f32"], "quantized only with --backend cuda"),
                           (["--mode", "flat", "--intermediate", "32"], "--intermediate: given without --mode layer")):
            code, _, err = run("verify", *args)
            self.assertEqual(code, 2)
            self.assertIn(text, err)


    def check_fused(self, checks):
        """The fused form is checked if the library supports it; otherwise, the reason is reported."""
        fused = [check for check in checks if check["name"].startswith(FUSED)]
        names = [check["name"] for check in checks]
        orders = [FUSED + ", " + order for order in ("per_rank", "per_route") if FUSED + ", " + order in names]
        self.assertTrue(orders)
        if all(check["skipped"] for check in fused):
            self.assertEqual([check["name"] for check in fused], orders)
            for check in fused:
                self.assertEqual((check["passed"], check["compared"]), (True, 0), fused)
                self.assertIn("::", check["detail"], "a reason of the library's")
        else:
            self.assertEqual([(check["name"], check["skipped"]) for check in fused],
                             [(name + bits, False) for name in orders for bits in ("", ", bits of separate calls")])
        self.assertFalse(any(check["skipped"] for check in checks if check not in fused))

    def test_what_is_skipped_is_said(self):
        args = ["verify", *SMALL, "--mode", "layer", "--routing", "uniform", "--ranks", "1,2"]
        code, out, err = run(*args, "--json")
        self.assertEqual(code, 0, out + err)
        checks = [check for case in json.loads(out)["cases"] for check in case["checks"]]
        reasons = {check["detail"] for check in checks if check["skipped"]}
        code, out, err = run(*args)
        self.assertEqual(code, 0, out + err)
        self.assertIn(f" {sum(not check['skipped'] for check in checks)} checks, ", out.splitlines()[-1])
        for reason in reasons:
            for order in ("per_rank", "per_route"):
                self.assertIn(f"skipped {FUSED}, {order} (2 cases): {reason}", out)
        code, out, err = run(*args, "--order", "per_rank", "--json")
        self.assertEqual(code, 0, out + err)
        names = {check["name"] for case in json.loads(out)["cases"] for check in case["checks"]}
        self.assertFalse([name for name in names if name.startswith(FUSED + ", per_route")], "an order that was not asked for")
        self.assertIn(FUSED + ", per_rank", names)


class Capacity(unittest.TestCase):
    """`switchyard bench --mode layer --capacity`."""

    def test_calls_are_split(self):
        code, out, err = run("bench", "--mode", "layer", "--ranks", "3", "--tokens", "60", "--hidden", "64", "--experts", "9", "--topk", "2", "--order",
                             "per_route", "--routing", "rank_skew:2.4", "--sweep", "capacity=50,100,300", "--iterations", "20", "--warmup", "1", "--json", "-")
        self.assertEqual(code, 0, out + err)
        runs = json.loads(out)["runs"]
        self.assertEqual([each["config"]["capacity_percent"] for each in runs], [50, 100, 300])
        for each in runs:
            self.assertTrue(each["verified"])
            self.assertIn("fused", each)
        half, mean, worst = (each["symmetric_bytes_per_rank"] for each in runs)
        self.assertLess(half, mean)
        self.assertLess(mean, worst)


class Replicas(unittest.TestCase):
    """`switchyard bench --mode layer --spare-slots`."""

    def test_the_load_is_balanced(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "layer.json")
            code, out, err = run("bench", "--mode", "layer", "--ranks", "3", "--tokens", "600", "--hidden", "64", "--experts", "10", "--topk", "2",
                                 "--routing", "rank_skew:2.4", "--sweep", "spare-slots=0,1,4", "--iterations", "20", "--warmup", "1",
                                 "--json", str(path), "--html", str(Path(folder, "layer.html")))
            self.assertEqual(code, 0, out + err)
            none, one, four = json.loads(path.read_text())["runs"]
            self.assertAlmostEqual(none["busiest_over_mean"], 2.4, places=2)
            self.assertNotIn("replicas", none)
            self.assertLess(one["busiest_over_mean"], 1.9)
            self.assertLess(four["busiest_over_mean"], 1.1)
            for each, spare in ((one, 1), (four, 4)):
                self.assertTrue(each["verified"])
                self.assertEqual(each["routes"], none["routes"])
                self.assertEqual(each["replicas"]["slots"], 3 * (4 + spare))
                self.assertAlmostEqual(each["replicas"]["busiest_over_mean_without_replicas"], 2.4, places=2)
                self.assertGreater(each["replicas"]["weights_moved"], 0)
            page = Path(folder, "layer.html").read_text()
            for text in ("spare slots per rank", "Load of the busiest rank over the mean", "Bytes moved to spare slots, MB"):
                self.assertIn(text, page)

    def test_each_call_is_balanced(self):
        code, out, err = run("bench", "--mode", "layer", "--ranks", "2", "--tokens", "300", "--hidden", "64", "--experts", "8", "--topk", "2",
                             "--routing", "zipf:1.5", "--sweep", "spare-slots=0,2", "--balance", "--iterations", "20", "--warmup", "1", "--json", "-")
        self.assertEqual(code, 0, out + err)
        none, two = json.loads(out)["runs"]
        self.assertNotIn("balance", none)
        self.assertTrue(two["verified"])
        self.assertEqual(two["routes"], none["routes"])
        self.assertGreater(two["balance"]["p50_us"], 0)
        for rank in two["balanced_calls"]:
            self.assertEqual((rank["busiest_before"], rank["mean"]), (none["most_routes_of_a_rank"], -(-none["routes"] // 2)))
            self.assertLessEqual(rank["busiest_after"], rank["mean"] + 128)
            self.assertGreater(rank["weights_moved"], 0)
            self.assertEqual(rank["measured"], two["balanced_calls"][0]["measured"])
            self.assertTrue(all(rank["measured"][rate] > 0 for rate in ("link_bytes_per_s", "seconds_per_row", "seconds_per_move")))
        self.assertLessEqual(two["most_routes_of_a_rank"], two["balanced_calls"][0]["mean"] + 128)


class Trace(unittest.TestCase):
    """`switchyard trace --mode layer`: the form that the library supports, or separate calls with the experts between them."""

    def traced(self, *args):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "layer.json")
            code, out, err = run("trace", *SMALL, "--mode", "layer", "--calls", "2", "--events", "4096", "--out", str(path), *args)
            self.assertEqual(code, 0, out + err)
            return out, json.loads(path.read_text()), path

    def test_separate_calls(self):
        out, trace, _ = self.traced("--form", "separate", "--intermediate", "24", "--json")
        summary = json.loads(out)
        self.assertEqual((summary["config"]["form"], summary["config"]["intermediate"]), ("separate", 24))
        self.assertNotIn("layers", summary)
        phases = {(p["rank"], p["phase"]): p["count"] for p in summary["phases"]}
        for rank in (0, 1):
            for name in ("dispatch", "expert_mlp", "combine"):
                self.assertEqual(phases[rank, name], 2, name)
        spans = {(e["pid"], e["name"]): e for e in trace["traceEvents"] if e["ph"] == "X"}  # the last span of each name
        for rank in (0, 1):
            begin = [spans[rank, name]["ts"] for name in ("dispatch", "expert_mlp", "combine")]
            self.assertEqual(begin, sorted(begin))
        out, _, _ = self.traced("--form", "separate", "--intermediate", "24", "--processes")
        self.assertIn("layer mode, separate form, intermediate 24, on the CPU", out)

    def test_the_form_is_the_librarys(self):
        out, _, path = self.traced("--json")
        summary = json.loads(out)
        fused = summary["config"]["form"] == "fused"
        self.assertEqual("layers" in summary, fused)
        code, _, err = run("trace", *SMALL, "--mode", "layer", "--form", "fused", "--out", "/dev/null")
        if not fused:
            self.assertEqual(code, 2)
            self.assertIn("--form: 'fused' given, which the library does not support for this layer (", err)
            return
        self.assertEqual(code, 0, err)
        self.assertEqual(summary["config"]["order"], "per_route")
        for rank in summary["layers"]:
            self.assertEqual(rank["calls"], 2)
            self.assertTrue(0 <= rank["hidden_share"] <= 1, rank)

    def test_cost(self):
        out, _, _ = self.traced("--form", "separate", "--cost", "2", "--json")
        self.assertEqual(len(json.loads(out)["recording"]["plain_us"]), 2)

    def test_errors(self):
        for args, text in ((["--mode", "layer", "--form", "half"], "--form: 'half' given"),
                           (["--mode", "normal", "--form", "fused"], "--form: given without --mode layer"),
                           (["--intermediate", "16"], "--intermediate: given without --mode layer"),
                           (["--mode", "layer", "--alignment", "16"], "--alignment: given with --mode layer; it belongs to --mode normal"),
                           (["--mode", "layer", "--sending", "per_route"], "--sending: given with --mode layer; it belongs to --mode low_latency and flat"),
                           (["--mode", "ledger", "--pieces", "2"], "--pieces: given with --mode ledger; it belongs to --mode low_latency and flat"),
                           (["--mode", "layer", "--intermediate", "-3"], "--intermediate"),
                           (["--mode", "layer", "--dtype", "f16"], "--mode: 'layer' given with f16 rows"),
                           (["--mode", "layer", "--quantize", "f32"], "--quantize: 'f32' given with --mode layer --backend cpu")):
            code, out, err = run("trace", *SMALL, *args)
            self.assertEqual((code, out), (2, ""), args)
            self.assertIn(text, err)


class Bench(unittest.TestCase):
    """A complete layer and its steps."""

    def measure(self, *args):
        """Measures again if a step takes longer than the layer, which can be because the load of the machine has changed."""
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                code, out, err = run("bench", *QUICK, "--mode", "layer", "--json", f"{folder}/x.json", "--html", f"{folder}/x.html", *args)
                self.assertEqual(code, 0, out + err)
                page = Path(folder, "x.html").read_text()
                runs = json.loads(Path(folder, "x.json").read_text())["runs"]
            if all(each["recorded_layer"]["min_us"] > self.longest_step(each) for each in runs):
                break
        return runs, out, page

    @staticmethod
    def longest_step(one):
        return max(one[name]["min_us"] for name in ("dispatch", "experts", "combine"))

    def check(self, run, exchange):
        config = run["config"]
        self.assertEqual((config["mode"], config["exchange"], run["verified"]), ("layer", exchange, True))
        self.assertEqual((config["dtype"], config["quantize"]), ("bf16", "none"))
        for name in ("dispatch", "experts", "combine", "recorded_layer", "layer"):
            self.assertEqual(run[name]["iterations"], 20, name)
            self.assertGreater(run[name]["p50_us"], 0, name)
        self.assertGreater(run["recorded_layer"]["min_us"], self.longest_step(run))
        self.assertAlmostEqual(run["layer_over_experts"], run["layer"]["p50_us"] / run["experts"]["p50_us"])
        self.assertAlmostEqual(run["share_of_limit"]["layer"] * run["layer_over_experts"], 1)
        self.assertEqual(run["routes"], config["ranks"] * config["tokens_per_rank"] * config["topk"])
        flops = run["routes"] / config["ranks"] * 6 * config["hidden"] * config["intermediate"]
        self.assertAlmostEqual(run["tflops"]["experts"], flops / run["experts"]["p50_us"] / 1e6)
        names = [check["name"] for check in run["checks"]]
        for rank in range(config["ranks"]):
            self.assertIn(f"layer on rank {rank}", names)
            self.assertIn(f"the same bits after the timed calls on rank {rank}", names)
        self.assertTrue(all(check["passed"] for check in run["checks"]))

    def test_normal(self):
        runs, out, page = self.measure("--sweep", "intermediate=16,24", "--order", "per_route", "--processes")
        self.assertEqual([run["config"]["intermediate"] for run in runs], [16, 24])
        for run in runs:
            self.check(run, "normal")
            self.assertEqual(run["config"]["order"], "per_route")
        self.assertIn("recording costs some time", out)
        self.assertIn("normal exchange", out)
        self.assertIn("over up + down", out)
        self.assertIn("layer mode, normal exchange", page)
        self.assertIn("The limit of a layer is up + down", page)

    def test_low_latency(self):
        runs, out, page = self.measure("--exchange", "low_latency", "--sweep", "tokens=1,5", "--sweep", "order=per_rank,per_route")
        self.assertEqual([(run["config"]["tokens_per_rank"], run["config"]["order"]) for run in runs],
                         [(1, "per_rank"), (1, "per_route"), (5, "per_rank"), (5, "per_route")])
        for run in runs:
            self.check(run, "low_latency")
        self.assertIn("low_latency exchange", out)
        self.assertIn("<h2>per_route order of combine</h2>", page)

    def test_selecting_layer(self):
        for exchange in ("normal", "low_latency"):
            runs, _, _ = self.measure("--exchange", exchange, "--spare-slots", "1")
            self.check(runs[0], exchange)
            self.assertEqual(runs[0]["selecting_layer"]["iterations"], 20)
            checks = [check for check in runs[0]["checks"] if check["name"].startswith("the layer that selects its slots")]
            self.assertEqual([check["passed"] for check in checks], [True, True])

    def test_not_checked(self):
        runs, out, _ = self.measure("--no-verify")
        self.assertIsNone(runs[0]["verified"])
        self.assertNotIn("PASS", out)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
