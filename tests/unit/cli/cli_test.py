#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line tool from the user's perspective: exit statuses, error messages, written files, machine-readable output.
Usage: cli_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOL = None
SMALL = ["--ranks", "2", "--tokens", "16", "--hidden", "64"]


def run(*args, env=None, cwd=None):
    """Exit status, stdout and stderr of one call. Each call in this file must take less than two minutes."""
    full = {**os.environ, **(env or {})}
    done = subprocess.run([TOOL, *args], capture_output=True, text=True, timeout=120, env=full, cwd=cwd, check=False)
    return done.returncode, done.stdout, done.stderr


class Usage(unittest.TestCase):
    """Checks the result of a mistyped command: status 2, one line with the given and allowed values, a pointer to help."""

    def expect(self, args, *texts):
        code, out, err = run(*args)
        self.assertEqual(code, 2, f"{args}: {out}{err}")
        self.assertEqual(out, "", "usage errors belong on stderr")
        for text in texts:
            self.assertIn(text, err)
        self.assertIn("--help", err)

    def test_verbs(self):
        self.expect(["dmeo"], "'dmeo': no such verb", "demo, verify, bench, trace, tune, plot, plan, doctor", "Did you mean 'demo'?")

    def test_flags(self):
        self.expect(["verify", "--rank", "3"], "--rank: no such option of 'verify'", "Did you mean '--ranks'?")
        self.expect(["bench", "--itertaions=30"], "--itertaions", "Did you mean '--iterations'?")
        self.expect(["demo", "--quantum", "3"], "--quantum: no such option of 'demo'")
        self.expect(["doctor", "now"], "'now': 'doctor' takes no such argument")
        self.expect(["--foo"], "--foo: no such option")

    def test_values(self):
        self.expect(["help", "dmo"], "'dmo': no such verb", "Did you mean 'demo'?")
        self.expect(["demo", "--hidden", "0"], "--hidden: '0' given", "or auto")
        self.expect(["verify", "--ranks", "0"], "--ranks: '0' given", "1 to 64")
        self.expect(["verify", "--ranks", "2,x"], "--ranks: 'x' given", "1 to 64")
        self.expect(["verify", "--ranks", "65"], "--ranks: '65' given")
        self.expect(["verify", "--topk", "33"], "--topk: '33' given", "1 to 32", "auto")
        self.expect(["verify", "--layout", "rank-majr"], "--layout: 'rank-majr' given", "rank_major, expert_major",
                    "Did you mean 'rank_major'?")
        self.expect(["bench", "--tokens"], "--tokens: no value given")
        self.expect(["bench", "--iterations", "3"], "--iterations: '3' given", "20 to")
        self.expect(["bench", "--sweep", "toknes=3"], "'toknes=3' given", "Did you mean 'tokens'?")
        self.expect(["bench", "--sweep", "tokens"], "'tokens' given", "NAME=N,N,...")
        self.expect(["demo", "--backend", "cuda", "--staging", "ring"], "--", "cuda")
        self.expect(["demo", "--ranks", "3.5"], "--ranks: '3.5' given")
        self.expect(["bench", "--html", "/nonexistent/bench.html"], "--html: cannot write '/nonexistent/bench.html'")
        self.expect(["verify", "--sms", "4"], "--sms: given with --backend cpu")
        self.expect(["verify", "--backend", "gpu"], "--backend: 'gpu' given", "cpu, cuda")

    def test_verify_ledger(self):
        self.expect(["verify", "ledgr"], "'ledgr': 'verify' takes no such argument", "Did you mean 'ledger'?")
        self.expect(["verify", "ledger", "now"], "'now': 'verify ledger' takes no such argument", "switchyard verify ledger --help")
        self.expect(["verify", "ledger", "--expertz", "2"], "--expertz: no such option of 'verify ledger'", "Did you mean '--experts'?")
        self.expect(["verify", "ledger", "--ranks", "65"], "--ranks: '65' given", "1 to 64")
        self.expect(["verify", "ledger", "--tokens", "-1"], "--tokens: '-1' given", "0 to")
        self.expect(["verify", "ledger", "--hidden"], "--hidden: no value given")
        self.expect(["verify", "ledger", "--topk", "33"], "--topk: '33' given", "1 to 32")
        self.expect(["verify", "ledger", "--dtype", "fp8"], "--dtype: 'fp8' given", "bf16, f16, f32")
        self.expect(["verify", "ledger", "--sms", "4"], "--sms: given with --backend cpu")
        self.expect(["verify", "ledger", "--late-us", "4"], "--late-us: given with --backend cpu")
        for flag, meant in (("-K", "--hidden"), ("-M", "--tokens"), ("--pes", "--ranks"), ("--experts-per-pe", "--experts"),
                            ("--topK", "--topk")):
            self.expect(["verify", "ledger", flag, "2"], f"{flag}: no such option of 'verify ledger'. Did you mean '{meant}'?")
        for flag in ("--ranks", "--tokens", "--hidden", "--topk", "--experts"):
            for args in (["--quick", flag, "2"], [flag, "2", "--quick"]):
                self.expect(["verify", "ledger", *args], f"{flag}: given with --quick")
        self.expect(["verify", "ledger", "--backend", "gpu"], "allowed: cpu, cuda. Did you mean 'cuda'?")
        self.expect(["ledger", "--ranks", "2"], "'ledger': no such verb", "Did you mean 'verify ledger'?")

    def test_combinations(self):
        self.expect(["bench", "--order", "per_route"], "--order: 'per_route' given with --layout rank_major")
        self.expect(["bench", "--quantize", "f32", "--dtype", "fp8"], "--quantize")
        self.expect(["bench", "--pin", "cores", "--warps", "2"], "--pin: 'cores' given", "--processes")
        self.expect(["verify", "--dtype", "fp8", "--quantize", "f32"], "nothing to verify")
        self.expect(["verify", "--hidden", "3", "--ranks", "1"], "hidden = 3", "multiple of 16")
        self.expect(["demo", "--hidden", "12"], "--hidden: 12 given", "multiple of 8")
        self.expect(["demo", "--routing", "uniform", "--experts", "4"], "--topk: auto (8) given, which exceeds --experts 4")
        self.expect(["demo", "--routing", "zipf", "--hidden", "100000", "--intermediate", "100000"], "need about")

    def test_routing(self):
        self.expect(["demo", "--routing", "unifrm"], "'unifrm' given", "Did you mean 'uniform'?")
        self.expect(["demo", "--routing", "zipf:steep"], "'zipf:steep' given", "zipf:<exponent>")
        self.expect(["verify", "--routing", "uniform,zifp"], "'zifp' given", "Did you mean 'zipf'?")
        self.expect(["demo", "--routing", "all_to_one:9", "--ranks", "2"], "all_to_one:9")


class Files(unittest.TestCase):
    """Files that cannot be read or written: the error states the path and the reason, and the tool never crashes."""

    def test_missing_recording(self):
        code, _, err = run("demo", "--routing", "/nonexistent.safetensors")
        self.assertEqual(code, 2)
        self.assertIn("/nonexistent.safetensors", err)
        self.assertIn("No such file", err)

    def test_broken_recording(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "broken.safetensors")
            path.write_bytes(b"\xff" * 100)
            code, _, err = run("demo", "--routing", str(path))
            self.assertEqual(code, 2)
            self.assertIn("broken.safetensors", err)
            self.assertIn("expected", err)

    def test_wrong_layer(self):
        code, _, err = run("verify", "--ranks", "1", "--routing", default_recording() + ":layer=77")
        self.assertEqual(code, 2)
        self.assertIn("layer 77 given", err)

    def test_unwritable_output(self):
        with tempfile.TemporaryDirectory() as folder:
            blocker = Path(folder, "file")
            blocker.write_text("not a folder")
            code, out, err = run("demo", "--routing", "uniform", "--out", str(blocker / "report"))
            self.assertEqual(code, 2)
            self.assertIn("--out", err)
            self.assertIn(str(blocker), err)
            self.assertEqual(out, "", "the folder is tried before anything runs")

    def test_unwritable_json(self):
        code, _, err = run("bench", *SMALL, "--iterations", "20", "--json", "/nonexistent-folder/x.json")
        self.assertIn("/nonexistent-folder/x.json", err)
        self.assertEqual(code, 2)


def default_recording():
    """Path of the recording that is included in the project."""
    code, out, err = run("demo", "--routing", "recorded", "--experts", "255", "--ranks", "1")
    match = re.search(r"the recording (\S+) has 256", out + err)
    assert code == 2 and match, out + err
    return match.group(1)


class Help(unittest.TestCase):
    def test_help(self):
        for args in (["--help"], [], ["help"], ["-h"]):
            code, out, _ = run(*args)
            self.assertEqual(code, 0)
            for verb in ("demo", "verify", "bench", "trace", "tune", "plan", "doctor"):
                self.assertIn(verb, out)
        for verb in ("demo", "verify", "bench", "trace", "tune", "plan", "doctor"):
            for args in ([verb, "--help"], ["help", verb]):
                code, out, _ = run(*args)
                self.assertEqual(code, 0)
                self.assertIn(f"Usage: switchyard {verb}", out)
                self.assertIn("Examples:", out)

    def test_lines_fit(self):
        for verb in ("demo", "verify", "bench", "trace", "tune", "plan", "doctor"):
            for line in run(verb, "--help")[1].splitlines():
                self.assertLessEqual(len(line), 140, line)

    def test_every_flag_of_the_examples_exists(self):
        for verb in ("demo", "verify", "verify ledger", "bench", "trace", "tune", "plan", "doctor"):
            out = run(*verb.split(), "--help")[1]
            self.assertIn(f"Usage: switchyard {verb}", out)
            declared = set(re.findall(r"^  (?:-h,)?(--[a-z-]+)", out, re.M))
            used = set(re.findall(r"(--[a-z-]+)", out.split("Examples:")[1]))
            self.assertLessEqual(used, declared)

    def test_version(self):
        code, out, _ = run("--version")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"^switchyard \d+\.\d+\.\d+, commit ")


class TraceVerb(unittest.TestCase):
    def test_timeline_and_summary(self):
        for mode, phases in (("normal", {"dispatch", "combine", "wait_counts", "send_rows", "pull_reduce"}),
                             ("low_latency", {"dispatch", "combine", "send_rows", "place_rows", "sum_returned"}),
                             ("flat", {"all_to_all", "send_rows", "return_rows", "sum_returned"}),
                             ("ledger", {"ledger_combine", "return_segments", "restore_tokens"})):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                code, out, err = run("trace", *SMALL, "--mode", mode, "--calls", "2", "--json", "--events", "2048", "--out", str(path))
                self.assertEqual(code, 0, err)
                summary, document = json.loads(out), json.loads(path.read_text())
            self.assertEqual(summary["lost_events"], 0)
            self.assertLessEqual(phases, {p["phase"] for p in summary["phases"]})
            spans = [e for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] != "flow"]
            self.assertEqual(len(spans), sum(p["count"] for p in summary["phases"]))
            self.assertEqual({e["pid"] for e in spans}, {0, 1})
            calls = [p for p in summary["phases"] if p["category"] == "call"]
            self.assertTrue(calls and all(p["count"] == 2 for p in calls), calls)
            self.check_counters(document, spans)
            for rank in summary["ranks"]:
                self.assertGreaterEqual(rank["longest_gap"]["us"], 0)
                self.assertIn(rank["longest_gap"]["call"], {c["phase"] for c in calls})
                self.assertGreater(rank["window_us"], 0)
                self.assertTrue(0 <= rank["idle_share"] <= 1, rank)

    def check_counters(self, document, spans):
        """Bytes in flight: zero at the beginning and the end, and never more than the bytes carried by the open spans."""
        for rank in (0, 1):
            counts = [(e["ts"], e["args"]["bytes"]) for e in document["traceEvents"] if e["ph"] == "C" and e["pid"] == rank]
            carried = sum(s["args"].get("bytes", 0) for s in spans if s["pid"] == rank)
            self.assertGreater(carried, 0)
            self.assertEqual(counts, sorted(counts, key=lambda c: c[0]))
            self.assertEqual(counts[-1][1], 0)
            self.assertTrue(all(0 <= c[1] <= carried for c in counts), counts)
            self.assertGreater(max(c[1] for c in counts), 0)

    # Spans that end a wait. For each wait: the kinds of spans of the rank being waited for, and whether they signal at their
    # beginning.
    CAUSES = {
        "wait_entered": {"dispatch": True, "combine": True, "all_to_all": True},
        "wait_counts": {"exchange_counts": True, "plan": False},
        "wait_placement": {"dispatch": True, "exchange_counts": True, "combine": True},
        "wait_rows": {"send_rows": False},
        "wait_message": {"send_rows": False},
        "wait_outputs": {"combine": True, "reduce_local": False, "return_rows": False},
        "wait_pulled": {"pull_reduce": False, "sum_returned": False},
        "wait_returned": {"return_rows": False},
        "wait_ledger_rows": {"ledger_combine": True, "return_segments": False},
        "wait_expert_count": {"send_counts": False},
        "wait_ring": {"ring_send": False, "ring_receive": False},
    }

    def test_arrows_lead_from_signals_to_waits(self):
        """With more ranks than available cores, some rank is late in some call in every mode."""
        modes = {"normal": {"wait_counts", "wait_placement", "wait_rows", "wait_pulled"}, "low_latency": {"wait_entered"},
                 "flat": {"wait_entered", "wait_returned"}, "ledger": {"wait_ledger_rows"}, "ring": {"wait_ring"}}
        for mode, awaited in modes.items():
            with self.subTest(mode), tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                code, _, err = run("trace", "--ranks", "4", "--tokens", "16", "--hidden", "64", "--experts", "8", "--topk", "2", "--calls", "20",
                                   "--events", "4096", *(("--staging", mode) if mode == "ring" else ("--mode", mode)), "--out", str(path))
                self.assertEqual(code, 0, err)
                events = json.loads(path.read_text())["traceEvents"]
                spans = [e for e in events if e["ph"] == "X"]
                ends = {e["id"]: e for e in events if e["ph"] == "f"}
                starts = [e for e in events if e["ph"] == "s"]
                self.assertEqual({e["id"] for e in starts}, set(ends))
                waits = {self.check_arrow(start, ends[start["id"]], spans) for start in starts}
                self.assertTrue(waits & awaited, f"arrows into {waits}, none into {awaited}")

    def check_arrow(self, start, end, spans):
        """Checks that an arrow leads forward in time, from a remote signal to 3 ns before a wait ends; returns the wait."""
        self.assertNotEqual(start["pid"], end["pid"])
        self.assertLess(start["ts"], end["ts"])

        def around(arrow):
            """Slices from the outermost to the innermost. Times may be too large by up to a tenth of a nanosecond."""
            return sorted((s for s in spans if (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"]) and
                           s["ts"] < arrow["ts"] + 2e-4 and s["ts"] + s["dur"] > arrow["ts"] + 5e-4), key=lambda s: (s["ts"], -s["dur"]))

        cause, (*_, wait, marker) = around(start)[-1], around(end)
        text = f"an arrow from {cause} to {marker} in {wait}"
        self.assertEqual((marker["name"], marker["cat"], marker["args"]["rank"]), ("signal", "flow", start["pid"]), text)
        self.assertEqual(wait["args"].get("rank"), start["pid"], text)
        self.assertAlmostEqual(wait["ts"] + wait["dur"] - marker["ts"], 0.003, delta=4e-4, msg=text)
        self.assertIn(cause["name"], self.CAUSES.get(wait["name"], {}), text)
        if not self.CAUSES[wait["name"]][cause["name"]]:
            self.assertAlmostEqual(cause["ts"] + cause["dur"] - start["ts"], 0.003, delta=4e-4, msg=text)
        return wait["name"]

    def test_rings_and_what_recording_costs(self):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "t.json")
            code, out, err = run("trace", *SMALL, "--staging", "ring", "--calls", "3", "--cost", "2", "--json", "--out", path)
        self.assertEqual(code, 0, err)
        summary = json.loads(out)
        phases = {p["phase"]: p for p in summary["phases"] if p["rank"] == 0}
        self.assertLessEqual({"ring_send", "ring_receive"}, set(phases))
        self.assertEqual(phases["dispatch"]["count"], 3)  # without the rounds of --cost
        self.assertGreater(phases["ring_send"]["bytes"], 0)
        cost = summary["recording"]
        self.assertEqual((len(cost["plain_us"]), len(cost["traced_us"]), cost["calls_per_round"]), (2, 2, 3))
        self.assertTrue(all(us > 0 for us in cost["plain_us"] + cost["traced_us"]))

    def test_busiest_link_counts_rows_as_they_are_sent(self):
        busiest = {}
        for sending in ("per_rank", "per_route"):
            with tempfile.TemporaryDirectory() as folder:
                code, out, err = run("trace", "--ranks", "2", "--tokens", "4", "--hidden", "64", "--mode", "low_latency", "--sending", sending,
                                     "--calls", "1", "--json", "--out", str(Path(folder) / "t.json"))
            self.assertEqual(code, 0, err)
            summary = json.loads(out)
            self.assertEqual(summary["config"]["sending"], sending)
            busiest[sending] = summary["busiest_link"]["out"]["bytes"]
            self.assertLessEqual(summary["busiest_link"]["back"]["bytes"], 4 * 64 * 2)  # one sum per token and rank
        self.assertLessEqual(busiest["per_rank"], 4 * 64 * 2)
        self.assertGreater(busiest["per_route"], 4 * 64 * 2)  # 8 experts for each token, on 2 ranks

    def test_forgotten_events_are_said(self):
        with tempfile.TemporaryDirectory() as folder:
            args = ["trace", "--mode", "low_latency", "--tokens", "64", "--hidden", "64", "--ranks", "1", "--out", str(Path(folder, "t.json"))]
            code, out, err = run(*args, "--events", "16")
            self.assertEqual(code, 0, err)
            said = re.search(r"the oldest [0-9,]+ records were lost, and are missing from the figures above; --events ([0-9]+) would keep them", out)
            self.assertTrue(said, out)
            code, out, err = run(*args, "--events", said[1])
            self.assertEqual(code, 0, err)
            self.assertNotIn("records were lost", out)

    def test_errors(self):
        for path, why in (("/nowhere/at/all.json", "No such file or directory"), (".", "Is a directory"), ("", "the path of a file")):
            code, out, err = run("trace", *SMALL, "--out", path)
            self.assertEqual(code, 2, path)
            self.assertIn("--out", err)
            self.assertIn(why, err)
            self.assertNotIn("ranks", out)  # before anything runs
        self.assertEqual(run("trace", "--mode", "flatt")[0], 2)
        self.assertEqual(run("trace", "--order", "per_route")[0], 2)
        code, _, err = run("trace", "--mode", "ledger", "--dtype", "fp8")
        self.assertEqual(code, 2)
        self.assertIn("--mode: 'ledger' given with fp8 rows", err)


class Verify(unittest.TestCase):
    def test_passes_and_counts(self):
        code, out, err = run("verify", *SMALL, "--mode", "normal", "--routing", "uniform,drops", "--dtype", "bf16,fp8")
        self.assertEqual(code, 0, out + err)
        self.assertEqual(len(re.findall(r"^PASS  ", out, re.M)), 2 * 2 * 2 * 2)
        self.assertNotIn("FAIL", out)
        self.assertRegex(out.splitlines()[-1], r"^PASS: 16 cases, \d+ checks, [\d,]+ values compared, 0 cases failed")

    def test_modes_without_layouts(self):
        code, out, err = run("verify", *SMALL, "--mode", "low_latency,flat", "--routing", "drops", "--dtype", "bf16,fp8")
        self.assertEqual(code, 0, out + err)
        cases = re.findall(r"^PASS  (\S+ \S+)", out, re.M)
        self.assertEqual(cases, ["low_latency bf16", "low_latency fp8", "flat bf16"])  # flat rows are not fp8
        for check in ("moe_all_to_all per rank", "moe_all_to_all per route", "combine, experts scale"):
            self.assertIn(check, out)
        code, _, err = run("verify", "--mode", "flat", "--dtype", "fp8")
        self.assertEqual(code, 2)
        self.assertIn("flat rows", err)

    def test_json(self):
        code, out, err = run("verify", *SMALL, "--mode", "normal", "--routing", "zipf", "--layout", "expert_major", "--staging",
                             "direct", "--dtype", "f32", "--processes", "--json")
        self.assertEqual(code, 0, out + err)
        report = json.loads(out)
        self.assertTrue(report["passed"])
        self.assertEqual(report["ranks_are"], "processes")
        self.assertEqual(len(report["cases"]), 1)
        names = [c["name"] for c in report["cases"][0]["checks"]]
        for name in ("dispatch", "cached dispatch", "combine per_rank", "combine per_route", "worst-case size",
                     "capacity exceeded, fail", "capacity exceeded, drop and report", "ledger", "matrices"):
            self.assertIn(name, names)
        for check in report["cases"][0]["checks"]:
            self.assertTrue(check["passed"], check)
            self.assertGreater(check["compared"], 0, check)

    def test_ledger_profile(self):
        code, out, err = run("verify", "ledger", "--quick")
        self.assertEqual(code, 0, out + err)
        self.assertIn("M=8 K=64 ranks=2 topK=2 expertPerPe=1 warmup=3 measured=5 samples=5", out)
        self.assertIn("workspace=2304 routeMeta=448 window=2176 guard=4096", out)
        self.assertRegex(out, r"combine_e2e: avg=[\d.]+ us max=[\d.]+ us")
        self.assertEqual(out.splitlines()[-1], "  verify=PASS")
        code, out, err = run("verify", "ledger", "--warmup", "0", "--iterations", "1", "--hidden", "7168", "--json")
        self.assertEqual(code, 0, out + err)
        report = json.loads(out)
        self.assertTrue(report["passed"])
        self.assertGreater(report["machine"]["logical_cpus"], 0)
        self.assertEqual(report["gpus"], "")
        self.assertEqual([report[name] for name in ("workspace_bytes", "route_meta_bytes", "window_bytes", "guard_bytes")],
                         [2304, 2432, 7340160, 4096])
        code, out, err = run("verify", "ledger", "--ranks", "3", "--tokens", "5", "--hidden", "37", "--dtype", "bf16", "--drop-percent", "30",
                             "--processes", "--warps", "2")
        self.assertEqual(code, 0, out + err)

    def test_verbose_names_every_check(self):
        code, out, _ = run("verify", *SMALL, "--routing", "uniform", "--layout", "rank_major", "--staging", "ring", "--dtype",
                           "bf16", "--verbose")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"PASS  combine returns the weights +\d+ compared")

    def test_no_tokens_and_odd_experts(self):
        code, out, err = run("verify", "--ranks", "3", "--tokens", "0,5", "--hidden", "64", "--experts", "10", "--topk", "3",
                             "--dtype", "bf16", "--routing", "duplicates,one_expert", "--warps", "2")
        self.assertEqual(code, 0, out + err)


class Demo(unittest.TestCase):
    SIZE = ["--tokens", "16", "--hidden", "128", "--intermediate", "32", "--steps", "2"]

    def check(self, *args):
        with tempfile.TemporaryDirectory() as folder:
            out_dir = Path(folder, "new", "report")
            code, out, err = run("demo", *self.SIZE, "--out", str(out_dir), *args)
            self.assertEqual((code, out.splitlines()[-1:]), (0, ["PASS"]), out + err)
            html = out_dir.joinpath("report.html").read_text()
            trace = json.loads(out_dir.joinpath("trace.json").read_text())
            self.assertLessEqual({str(out_dir / "report.html"), str(out_dir / "trace.json")}, set(out.split()))
        data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S).group(1))
        self.assertNotRegex(out, "% of (the|its) .*limit")  # these sizes are too small to compare with limits
        kinds = re.search(r"const KINDS = \[(.*?)\];", html, re.S).group(1)
        self.assertEqual([p["category"] for p in data["phases"] if f"['{p['category']}'," not in kinds], [], "phases without a legend")
        self.check_report(data)
        self.check_trace(trace, data)
        return data, out

    def check_report(self, data):
        world = data["world"]
        self.assertTrue(data["passed"])
        rows, routes = data["traffic"]["rows"], data["traffic"]["routes"]
        self.assertEqual([len(r) for r in rows], [world] * world)
        self.assertEqual(sum(map(sum, routes)), sum(data["experts"]["counts"]))
        for a in range(world):
            for b in range(world):
                self.assertLessEqual(rows[a][b], routes[a][b])
        self.assertEqual(len(data["experts"]["first"]), world + 1)
        self.assertEqual(len(data["timeline"]["steps"]), 2)
        self.assertEqual(data["timeline"]["lost"], 0)
        names = {s[2] for s in data["timeline"]["slices"]}
        self.assertLessEqual({"dispatch", "combine", "plan", "expert_mlp"}, names)
        self.assertEqual({s[0] for s in data["timeline"]["slices"]}, set(range(world)))
        self.assertEqual([p["name"] for p in data["phases"] if not p["meaning"]], [], "phases that the report does not explain")
        self.assertLessEqual({"dispatch", "expert MLP", "combine"}, {bar["name"] for bar in data["times"] if bar["us"] > 0})

    def check_trace(self, trace, data):
        spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "flow"]
        self.assertEqual({e["pid"] for e in spans}, set(range(data["world"])))
        self.assertEqual(len([e for e in spans if e["name"] == "step"]), 2 * data["world"])
        self.assertEqual(len([e for e in spans if e["name"] != "step"]), len(data["timeline"]["slices"]))

    def test_threads_recorded(self):
        data, out = self.check("--ranks", "3")
        self.assertIn("recorded", out)
        self.assertEqual(sum(data["experts"]["counts"]), 3 * 16 * 8 * 2)

    def test_processes_gate(self):
        data, out = self.check("--ranks", "2", "--processes", "--routing", "gate", "--experts", "16", "--topk", "4")
        self.assertIn("2 processes", out)
        self.assertIn("gate", {s[2] for s in data["timeline"]["slices"]})

    def test_ring_and_several_workers(self):
        self.check("--ranks", "2", "--staging", "ring", "--blocks", "2", "--warps", "2", "--routing", "drops", "--experts", "9",
                   "--topk", "3")

    def test_one_rank(self):
        self.check("--ranks", "1", "--routing", "softmax")

    def test_plain_output_is_plain(self):
        with tempfile.TemporaryDirectory() as folder:
            _, out, err = run("demo", *self.SIZE, "--ranks", "2", "--routing", "uniform", "--out", folder)
            self.assertNotIn("\x1b", out + err)
            self.assertNotIn("\r", out + err)


class Installed(unittest.TestCase):
    def test_recording_is_found_from_any_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("verify", *SMALL, "--routing", "recorded", "--layout", "rank_major", "--staging", "direct",
                                 "--dtype", "bf16", cwd=folder)
            self.assertEqual(code, 0, out + err)

    def test_data_folder_can_be_named(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "routing")
            path.mkdir()
            path.joinpath("moe_lm_e256_k8_layer3.safetensors").write_bytes(b"")
            code, _, err = run("demo", "--ranks", "1", env={"SWITCHYARD_DATA_DIR": folder})
            self.assertEqual(code, 2)
            self.assertIn(folder, err)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
