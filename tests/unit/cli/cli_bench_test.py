#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`switchyard bench` from the user's perspective: its measurements, output and files.

Usage: cli_bench_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import json
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import cli_test
from cli_test import SMALL, run

QUICK = [*SMALL, "--iterations", "20", "--warmup", "1"]


def short_limit(args):
    """Arguments that shorten the copy-limit measurement, for calls whose rates do not matter. The flag exists only for normal
    mode on the CPU."""
    return [] if "--mode" in args and "normal" not in args else ["--limit-ms", "1"]


def run_with_small_files(*args, cwd):
    """Makes one call in which no file may exceed 16 MiB. This includes the heap segments of ranks that are processes."""
    limit = 16 << 20
    return subprocess.run([cli_test.TOOL, *args], capture_output=True, text=True, timeout=120, cwd=cwd, check=False,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))


class BenchOutputs(unittest.TestCase):
    """Result files are either complete or absent."""

    def refused(self, args, *texts):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("bench", *QUICK, *args, cwd=folder)
            self.assertEqual((code, out), (2, ""), f"{args}: {out}{err}")
            for text in texts:
                self.assertIn(text, err)
            self.assertEqual(os.listdir(folder), [])

    def test_wrong_paths(self):
        self.refused(["--json", ""], "--json: '' given; allowed: the path of a file")
        self.refused(["--html", ""], "--html: '' given")
        self.refused(["--json", "."], "--json: cannot write '.': Is a directory")
        self.refused(["--json", "x", "--html", "./x"], "--html: './x' given, to which another flag also writes")
        self.refused(["--json", "x", "--html", "nowhere/x"], "--html: cannot write 'nowhere/x'")

    def test_links_devices_and_permissions(self):
        with tempfile.TemporaryDirectory() as folder:
            target, link = Path(folder, "target"), Path(folder, "link")
            target.write_text("before")
            target.chmod(0o640)
            link.symlink_to(target)
            code, out, err = run("bench", *QUICK, "--mode", "low_latency", "--json", str(link), "--html", "/dev/null")
            self.assertEqual(code, 0, out + err)
            self.assertTrue(link.is_symlink())
            self.assertEqual(json.loads(target.read_text())["schema"], "switchyard.bench/1")
            self.assertEqual(target.stat().st_mode & 0o777, 0o640)
            self.assertEqual(sorted(os.listdir(folder)), ["link", "target"])


class BenchUsage(unittest.TestCase):
    def refused(self, args, text):
        code, out, err = run("bench", *args)
        self.assertEqual((code, out), (2, ""), f"{args}: {out}{err}")
        self.assertIn(text, err)

    def test_what_has_no_effect(self):
        low_latency, flat, cuda = ["--mode", "low_latency"], ["--mode", "flat"], ["--backend", "cuda"]
        layer = ["--mode", "layer"]
        for args, text in (
                (["--sms", "4"], "--sms: given with --backend cpu; it belongs to --backend cuda"),
                (["--sweep", "sms=4,8"], "--sweep sms: given with --backend cpu"),
                ([*cuda, "--warps", "3"], "--warps: given with --backend cuda; it belongs to --backend cpu"),
                ([*cuda, "--sweep", "blocks=1,2"], "--sweep blocks: given with --backend cuda"),
                ([*cuda, "--cached"], "--cached: given with --backend cuda"),
                (["--pieces", "2"], "--pieces: given with --mode normal; it belongs to --mode low_latency and flat"),
                (["--sweep", "pieces=1,2"], "--sweep pieces: given with --mode normal"),
                (["--sending", "per_route"], "--sending: given with --mode normal"),
                (["--scale-order", "column_major"], "--scale-order: given with --mode normal; it belongs to --mode low_latency"),
                ([*flat, "--sweep", "scale-order=row_major"], "--sweep scale-order: given with --mode flat"),
                ([*low_latency, "--scale-order", "column_major"], "--scale-order: 'column_major' given for rows without scales"),
                (["--channels", "3"], "--channels: given with --staging direct; it belongs to --staging ring"),
                (["--slots", "8"], "--slots: given with --staging direct"),
                (["--send-chunk", "8"], "--send-chunk: given with --staging direct"),
                ([*low_latency, "--layout", "expert_major"], "--layout: given with --mode low_latency; it belongs to --mode normal"),
                ([*low_latency, "--staging", "ring"], "--staging: given with --mode low_latency"),
                ([*flat, "--order", "per_route"], "--order: given with --mode flat"),
                ([*flat, "--sets", "3"], "--sets: given with --mode flat"),
                ([*flat, "--limit-ms", "3"], "--limit-ms: given with --mode flat; it belongs to --mode normal"),
                ([*cuda, "--limit-ms", "3"], "--limit-ms: given with --backend cuda; it belongs to --backend cpu"),
                ([*flat, "--contest", "--tokens", "3"], "--tokens: given with --contest, which sets the shapes"),
                ([*flat, "--contest", "--sweep", "tokens=3"], "--sweep: given with --contest, which sets the shapes"),
                (["--contest"], "--contest: given with --mode normal; it belongs to --mode flat"),
                (["--exchange", "low_latency"], "--exchange: given with --mode normal; it belongs to --mode layer"),
                ([*flat, "--sweep", "intermediate=8,16"], "--sweep intermediate: given with --mode flat; it belongs to --mode layer"),
                ([*layer, "--layout", "expert_major"], "--layout: given with --mode layer; it belongs to --mode normal"),
                ([*layer, "--staging", "ring"], "--staging: given with --mode layer"),
                ([*layer, "--late-us", "3"], "--late-us: given with --mode layer; it belongs to --mode low_latency and flat"),
                ([*layer, "--pieces", "3"], "--pieces: given with --mode layer; it belongs to --mode low_latency and flat"),
                ([*layer, "--exchange", "low_latency", "--sending", "per_route"], "--sending: given with --mode layer; it belongs to --mode low_latency and flat"),
                ([*layer, "--alignment", "8"], "--alignment: given with --mode layer; it belongs to --mode normal"),
                ([*layer, "--dtype", "f16"], "--mode: 'layer' given with f16 rows; its tokens are bf16, and --quantize"),
                ([*layer, "--quantize", "f32"], "--quantize: 'f32' given with --mode layer --backend cpu, whose experts compute in bf16; allowed: none"),
                ([*layer, "--sweep", "quantize=none,ue8m0"], "--quantize: 'ue8m0' given with --mode layer --backend cpu"),
                ([*layer, "--sweep", "scale-order=row_major,column_major"], "--sweep scale-order: given with --mode layer; it belongs to --mode low_latency"),
                ([*layer, "--exchange", "flat"], "--exchange: 'flat' given; allowed: normal, low_latency"),
                ([*layer, "--exchange", "low_latency", "--tokens", "70k"], "low-latency mode takes at most 65535"),
                (["--sweep", "tokens=3", "--sweep", "tokens=4"], "--sweep: 'tokens=4' given after another of tokens")):
            self.refused(args, text)


    def test_a_configuration_is_checked_before_anything_is_measured(self):
        low_latency, flat, layer = ["--mode", "low_latency"], ["--mode", "flat"], ["--mode", "layer"]
        large = ["--hidden", "100k", "--sweep", "tokens=8,64k"]
        for args, text in (
                (["--sweep", "hidden=64,13"], "hidden = 13"),
                ([*low_latency, "--quantize", "f32", "--sweep", "hidden=64,20"], "hidden = 20"),
                (["--staging", "ring", "--slots", "1"], "slots = 1"),
                (["--topk", "8", "--experts", "4"], "--topk: 8 given, which exceeds --experts 4"),
                ([*low_latency, "--experts", "4", "--sweep", "topk=2,8"], "--topk: 8 given, which exceeds --experts 4"),
                ([*flat, "--experts", "4", "--sweep", "topk=2,8"], "--topk: 8 given, which exceeds --experts 4"),
                (["--routing", "unifrm"], "Did you mean 'uniform'?"),
                (["--ranks", "64", *large], "--hidden 100000 need about"),
                ([*low_latency, "--ranks", "64", *large], "--hidden 100000 need about"),
                ([*flat, "--ranks", "64", *large], "--hidden 100000 need about"),
                ([*layer, "--sweep", "intermediate=8,128k"], "--intermediate 128000 --experts 256 need about"),
                ([*layer, "--experts", "4", "--sweep", "topk=2,8"], "--topk: 8 given, which exceeds --experts 4")):
            self.refused(args, text)
        for mode in ("normal", "low_latency", "flat", "layer"):
            code, out, err = run("bench", "--mode", mode, env={"SWITCHYARD_TUNING": "/nonexistent.tuning"})
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn("/nonexistent.tuning", err)


class Sweeps(unittest.TestCase):
    """Swept values appear in the rows, in the progress output, and once in the notes."""

    def lines(self, *args):
        code, out, err = run("bench", *QUICK, *short_limit(args), *args)
        self.assertEqual(code, 0, out + err)
        return out, err

    def column(self, out, name):
        header, *rows = [line.split() for line in out.replace("max tokens", "tokens").splitlines() if "checked" in line or "PASS" in line]
        return [row[header.index(name)] for row in rows]

    def test_few_iterations_have_no_p99(self):
        for mode in ("normal", "low_latency", "flat"):
            for iterations, tail, other in (("99", "max", "p99"), ("100", "p99", "max")):
                with tempfile.TemporaryDirectory() as folder:
                    out, _ = self.lines("--mode", mode, "--iterations", iterations, "--html", f"{folder}/x.html")
                    header = next(line for line in out.splitlines() if "checked" in line).replace("max tokens", "tokens").split()
                    self.assertGreaterEqual(header.count(tail), 2, header)
                    self.assertNotIn(other, header)
                    self.assertEqual(out.count("max: of 99 iterations; p99 needs 100 or more"), int(tail == "max"))
                    page = Path(folder, "x.html").read_text()
                    self.assertIn(f"<th>{tail}</th>", page)
                    self.assertNotIn(f"<th>{other}</th>", page)

    def test_normal(self):
        out, err = self.lines("--sets", "1", "--sweep", "hidden=64,128", "--sweep", "topk=2,4")
        self.assertEqual(self.column(out, "hidden"), ["64", "64", "128", "128"])
        self.assertEqual(self.column(out, "topk"), ["2", "4", "2", "4"])
        for title in ("hidden 64, topk 2", "hidden 64, topk 4", "hidden 128, topk 2", "hidden 128, topk 4"):
            self.assertEqual(err.count("2 ranks, 16 tokens, " + title), 1, err)
        self.assertNotIn("hidden", out.splitlines()[4], "it differs")
        self.assertEqual(out.count("note: the input sets of 4 of 4 points"), 1, out)

    def test_what_was_measured_before_a_failure_is_written(self):
        for mode in ("normal", "low_latency", "flat", "layer"):
            with tempfile.TemporaryDirectory() as folder:
                done = run_with_small_files("bench", *QUICK, *short_limit(["--mode", mode]), "--mode", mode, "--processes", "--hidden",
                                            "256", "--sweep", "tokens=8,4096,9", "--json", "x.json", "--html", "x.html", cwd=folder)
                self.assertEqual(done.returncode, 3, done.stderr)
                self.assertIn("the file size limit is", done.stderr.splitlines()[-1])
                self.assertEqual(self.column(done.stdout, "tokens"), ["8"])
                result = json.loads(Path(folder, "x.json").read_text())
                self.assertEqual([r["config"]["tokens_per_rank"] for r in result["runs"]], [8])
                self.assertIn("the file size limit is", result["stopped"])
                self.assertIn("PASS", Path(folder, "x.html").read_text())
                self.assertEqual(sorted(os.listdir(folder)), ["x.html", "x.json"])
                done = run_with_small_files("bench", *QUICK, *short_limit(["--mode", mode]), "--mode", mode, "--processes", "--hidden",
                                            "256", "--sweep", "tokens=4096,8", "--json", "y.json", cwd=folder)
                self.assertEqual(done.returncode, 3, done.stderr)
                self.assertEqual(sorted(os.listdir(folder)), ["x.html", "x.json"], "nothing was measured")

    def test_words(self):
        with tempfile.TemporaryDirectory() as folder:
            out, err = self.lines("--sets", "1", "--sweep", "dtype=bf16,f32,fp8", "--sweep", "routing=uniform,zipf:1.2", "--json",
                                  f"{folder}/x.json", "--html", f"{folder}/x.html")
            self.assertEqual(self.column(out, "dtype"), ["bf16", "bf16", "f32", "f32", "fp8", "fp8"])
            self.assertEqual(self.column(out, "routing"), ["uniform", "zipf:1.2"] * 3)
            self.assertIn("2 ranks, 16 tokens, dtype f32, routing zipf:1.2", err)
            result = json.loads(Path(folder, "x.json").read_text())
            self.assertEqual(result["swept"], ["dtype", "routing"])
            self.assertEqual([r["config"]["dtype"] for r in result["runs"]], ["bf16", "bf16", "f32", "f32", "fp8", "fp8"])
            sizes = [r["bytes"]["payload"] for r in result["runs"]]
            self.assertLess(sizes[4], sizes[0])
            self.assertLess(sizes[0], sizes[2])
            page = Path(folder, "x.html").read_text()
            self.assertIn("<h2>uniform routing</h2>", page)  # a pair of plots per routing, with types side by side
            for label in (">bf16</text>", ">f32</text>", ">fp8</text>", ">rows</text>", "<td>zipf, exponent 1.2</td>"):
                self.assertIn(label, page)
            out, _ = self.lines("--mode", "low_latency", "--sweep", "quantize=none,f32", "--sweep", "tokens=2,3", "--html",
                                f"{folder}/y.html")
            self.assertEqual(self.column(out, "quantize"), ["none", "none", "f32", "f32"])
            self.assertIn("<h2>f32 quantised</h2>", Path(folder, "y.html").read_text())  # the axis has numbers, not words
            code, out, err = run("plot", "x.json", "--html", "z.html", cwd=folder)
            self.assertEqual((code, out, err), (0, "written to z.html\n", ""))
            self.assertEqual(Path(folder, "z.html").read_text(), page)

    def test_wrong_words(self):
        for sweep, text in (("dtype=bf16,fp9", "--sweep dtype: 'fp9' given; allowed: bf16, f16, f32, fp8"),
                            ("layout=", "--sweep layout: '' given; allowed: rank_major, expert_major"),
                            ("routing=uniform,", "--sweep routing: '' given; allowed: what --routing takes"),
                            ("routing=zipff", "--routing: 'zipff' given"), ("dtipe=f32", "Did you mean 'dtype'?")):
            code, out, err = run("bench", *QUICK, "--sweep", sweep)
            self.assertEqual((code, out), (2, ""), sweep)
            self.assertIn(text, err)

    def test_decode_sized(self):
        out, err = self.lines("--mode", "low_latency", "--sweep", "pieces=1,2,4", "--sweep", "tokens=3")
        self.assertEqual(self.column(out, "pieces"), ["1", "2", "4"])
        self.assertEqual(self.column(out, "tokens"), ["3", "3", "3"])
        self.assertIn("2 ranks, 3 tokens, pieces 4", err)
        with tempfile.TemporaryDirectory() as folder:
            out, _ = self.lines("--mode", "low_latency", "--quantize", "ue8m0", "--sweep", "sending=per_rank,per_route", "--sweep",
                                "scale-order=row_major,column_major", "--json", f"{folder}/x.json", "--html", f"{folder}/x.html")
            self.assertIn("quantize ue8m0, scale order (see below), sending (see below)", out)
            configs = [r["config"] for r in json.loads(Path(folder, "x.json").read_text())["runs"]]
            self.assertEqual(self.column(out, "scale-order"), [c["scale_order"] for c in configs])
            self.assertEqual([c["scale_order"] for c in configs], ["row_major", "column_major"] * 2)
            self.assertEqual(self.column(out, "sending"), [c["sending"] for c in configs])
            self.assertIn("<th>order of scales</th>", Path(folder, "x.html").read_text())
        out, err = self.lines("--mode", "flat", "--sweep", "pieces=1,2", "--sweep", "topk=2,3")
        self.assertEqual(self.column(out, "pieces"), ["1", "1", "2", "2"])
        self.assertEqual(self.column(out, "top"), ["2", "3", "2", "3"])
        self.assertIn("2 ranks, 16 tokens, pieces 2, topk 3", err)


class Launched(unittest.TestCase):
    """Every rank is a separate call, as with torchrun, mpirun and srun. Only the first rank prints."""

    def ranks(self, world, *args, launcher=None, folder="."):
        name = f"switchyard-test-{secrets.token_hex(8)}"
        calls = []
        for rank in range(world):
            own = {"SWITCHYARD_RANK": str(rank), "SWITCHYARD_WORLD_SIZE": str(world), "SWITCHYARD_STORE": f"unix:@{name}",
                   "SWITCHYARD_JOB_TOKEN": "any"}
            if launcher == "torchrun":
                own = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
                       "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": name}
            calls.append(subprocess.Popen([cli_test.TOOL, "bench", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                          cwd=folder, env={**os.environ, **own}))
        return [(call.communicate(timeout=120), call.returncode) for call in calls]

    def test_one_report_of_all_ranks(self):
        for launcher in (None, "torchrun"):
            for mode in ("low_latency", "flat", "layer"):
                with tempfile.TemporaryDirectory() as folder:
                    (first, *others) = self.ranks(3, "--mode", mode, "--hidden", "64", "--iterations", "20", "--sweep", "tokens=2,5", "--json",
                                                  "x.json", "--html", "x.html", launcher=launcher, folder=folder)
                    self.assertEqual(first[1], 0, first)
                    self.assertEqual(others, [(("", ""), 0)] * 2)
                    self.assertEqual(first[0][0].count("PASS"), 2)
                    self.assertIn("3 ranks, 5 tokens", first[0][1])
                    runs = json.loads(Path(folder, "x.json").read_text())["runs"]
                    self.assertEqual([(r["config"]["ranks"], r["config"]["ranks_are"], r["config"]["tokens_per_rank"], r["verified"])
                                      for r in runs], [(3, "processes", 2, True), (3, "processes", 5, True)])
                    self.assertEqual(sorted(os.listdir(folder)), ["x.html", "x.json"])

    def test_what_contradicts_the_launcher(self):
        for args, text in ((["--mode", "flat", "--ranks", "2"], "--ranks: '2' given; the launcher started 3 ranks"),
                           (["--mode", "flat", "--sweep", "ranks=2,3"], "--sweep: 'ranks=2,3' given; the launcher started 3 ranks"),
                           ([], "run it without a launcher")):
            for (out, err), code in self.ranks(3, *args):
                self.assertEqual((code, out), (2, ""), err)
                self.assertIn(text, err)

    def test_variables_that_a_launcher_has_left(self):
        code, out, err = run("bench", *QUICK, "--mode", "flat", env={"RANK": "0", "WORLD_SIZE": "many"})
        self.assertEqual(code, 0, out + err)
        code, out, err = run("bench", *QUICK, *short_limit([]), env={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
        self.assertEqual(code, 0, out + err)


class Bench(unittest.TestCase):
    def measure(self, *args, small=True, short=True):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            code, out, err = run("bench", *(SMALL if small else SMALL[:2]), *(short_limit(args) if short else []), "--iterations", "20",
                                 "--json", str(path), *args)
            self.assertEqual(code, 0, out + err)
            return json.loads(path.read_text()), out

    def test_json(self):
        result, out = self.measure("--commit", "abc123", "--sets", "2", "--sweep", "tokens=8,16,8", "--sweep", "ranks=1,2", short=False)
        self.assertEqual(result["schema"], "switchyard.bench/1")
        self.assertEqual(result["commit"], "abc123")
        self.assertGreater(result["machine"]["last_level_cache_bytes"], 0)
        self.assertEqual(result["copy_limit_ms"], 1500)
        self.assertEqual(self.measure()[0]["copy_limit_ms"], 1)
        limit = result["copy_limit"]
        twice = 1.5 / (2 * len(limit["rates"])) * 10e9  # bytes that each method copies twice at 10 GB/s in the default time
        self.assertGreaterEqual(limit["source_bytes"], min(4 * result["machine"]["last_level_cache_bytes"], twice))
        self.assertEqual(limit["gb_per_s"], max(r["gb_per_s"] for r in limit["rates"]))
        shapes = [(r["config"]["tokens_per_rank"], r["config"]["ranks"]) for r in result["runs"]]
        self.assertEqual(shapes, [(8, 1), (8, 2), (16, 1), (16, 2)])
        for one in result["runs"]:
            self.check_run(one, limit["gb_per_s"])
        self.assertEqual(out.count("PASS"), 4)

    def test_low_latency(self):
        result, out = self.measure("--mode", "low_latency", "--quantize", "f32", "--sweep", "tokens=3,16")
        self.assertEqual([r["config"]["tokens_per_rank"] for r in result["runs"]], [3, 16])
        for one in result["runs"]:
            self.assertTrue(one["verified"])
            self.assertEqual(len(one["checks"]), one["config"]["ranks"] * 4)
            for section in ("dispatch", "combine_per_route", "combine_per_rank", "both_per_route", "both_per_rank"):
                self.assertEqual(one[section]["iterations"], 20)
            self.assertGreater(one["largest_remote_bytes"], 0)
            self.assertNotIn("overlap", one)
        self.assertEqual(out.count("PASS"), 2)
        self.assertNotIn("around it", out)

    def test_overlap(self):
        result, out = self.measure("--mode", "low_latency", "--quantize", "f32", "--sweep", "tokens=3,16", "--compute", "30")
        self.assertEqual(out.count("PASS"), 2)
        rows = [line.split() for line in out[out.index("around it"):].splitlines() if line.count("%") == 3]
        self.assertEqual([row[1] for row in rows], ["3", "16"])
        for one, row in zip(result["runs"], rows):
            self.assertTrue(one["verified"], "also behind the split calls")
            self.assertEqual(one["config"]["compute_us"], 30)
            overlap = one["overlap"]
            self.assertEqual(overlap["compute"]["iterations"], 20)
            self.assertGreater(overlap["compute"]["min_us"], 0)
            shown = []
            for call in ("dispatch", "combine_per_route", "combine_per_rank"):
                around = overlap[call]
                self.assertEqual(around["iterations"], 20)
                self.assertAlmostEqual(around["added_us"], around["p50_us"] - overlap["compute"]["p50_us"], places=6)
                self.assertAlmostEqual(around["hidden"], 1 - around["added_us"] / one[call]["p50_us"], places=6)
                shown += [f"{around['p50_us']:.1f}", f"{100 * around['hidden']:.0f}", "%"]
            self.assertEqual(row[3:], shown)
        for mode in ("flat", "normal"):
            code, out, err = run("bench", *QUICK, "--mode", mode, "--compute", "30")
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn(f"--compute: given with --mode {mode}; it belongs to --mode low_latency", err)

    def test_late(self):
        """Times would be negative if no rank had been late, and would exceed any delay if it had not been subtracted."""
        for mode, sections in (("low_latency", ("dispatch", "combine_per_rank", "both_per_route")), ("flat", ("all_to_all", "two_calls"))):
            for late in (20000, 100000):  # on a loaded machine, calls may take longer than the first
                result, out = self.measure("--mode", mode, "--sweep", f"late-us=0,{late}")
                self.assertIn("Rank 0 enters each call late-us microseconds after the other ranks", out)
                self.assertEqual([one["config"]["late_us"] for one in result["runs"]], [0, late])
                for section in sections:
                    self.assertGreater(result["runs"][1][section]["min_us"], 0)
                longest = max(result["runs"][1][section]["p50_us"] for section in sections)
                if longest < late:
                    break
            self.assertLess(longest, late)
        code, out, err = run("bench", *QUICK, "--late-us", "5")
        self.assertEqual((code, out), (2, ""), err)
        self.assertIn("--late-us: given with --mode normal --backend cpu; it belongs to --mode low_latency and flat", err)

    def test_flat(self):
        result, out = self.measure("--mode", "flat", "--dtype", "f32", "--topk", "3", "--sweep", "tokens=3,16")
        self.assertEqual([r["config"]["tokens_per_rank"] for r in result["runs"]], [3, 16])
        for one in result["runs"]:
            self.assertTrue(one["verified"])
            for form in ("all_to_all", "two_calls"):
                self.assertEqual(one[form]["iterations"], 20)
            self.assertIsNone(one["link_us_at_353_gbs"], "there is no NVLink")
        self.assertEqual(out.count("PASS"), 2)
        for text in ("353 GB/s", "2(t+12)"):
            self.assertNotIn(text, out)

    def test_contest(self):
        result, out = self.measure("--mode", "flat", "--contest", small=False)
        shapes = [(r["config"]["experts"], r["config"]["topk"], r["config"]["hidden"]) for r in result["runs"]]
        self.assertEqual(shapes, [(8, 2, 6144), (64, 6, 2048), (128, 4, 2880), (128, 8, 4096), (256, 8, 7168)])
        product = 1.0
        for one in result["runs"]:
            self.assertTrue(one["verified"])
            self.assertEqual(one["config"]["dtype"], "f16")
            self.assertTrue(all(1 <= t < one["config"]["tokens_per_rank"] for t in one["tokens"]))
            product *= one["all_to_all"]["p50_us"]
        self.assertAlmostEqual(product**0.2 / result["geometric_mean_us"], 1, places=6)
        self.assertIn("Geometric mean", out)
        for flags in (["--contest"], ["--mode", "flat", "--contest", "--sweep", "tokens=1"], ["--mode", "flat", "--dtype", "fp8"]):
            self.assertEqual(run("bench", *flags)[0], 2)

    def check_run(self, one, limit):
        self.assertTrue(one["verified"])
        self.assertEqual(one["dispatch"]["iterations"], 20)
        for phase in ("dispatch", "combine", "both"):
            times = one[phase]
            self.assertLessEqual(times["min_us"], times["p50_us"])
            self.assertLessEqual(times["p50_us"], times["p99_us"])
            self.assertLessEqual(times["p99_us"], times["max_us"])
        # A median of whole nanoseconds is itself a whole number; a mean is whole in only one case in twenty.
        self.assertAlmostEqual(one["plan_us"] * 1000, round(one["plan_us"] * 1000), places=6)
        sizes, config = one["bytes"], one["config"]
        row = config["hidden"] * 2
        tokens = config["ranks"] * config["tokens_per_rank"]
        self.assertEqual(sizes["logical"], tokens * config["topk"] * row)
        self.assertEqual(sizes["dispatch_limit"], tokens * row + sizes["payload"])
        self.assertLessEqual(sizes["remote"], sizes["payload"])
        if config["ranks"] == 1:
            self.assertEqual(sizes["remote"], 0)
            self.assertEqual(one["counted_remote_bytes"], 0)
        share = one["share_of_limit"]["dispatch"]
        self.assertAlmostEqual(share, sizes["dispatch_limit"] / (one["dispatch"]["p50_us"] * 1e-6) / (limit * 1e9), places=6)

    def test_counted_bytes_agree(self):
        # One set: the bytes counted by the library equal those computed from the routing.
        result, _ = self.measure("--sets", "1")
        one = result["runs"][0]
        self.assertEqual(one["counted_remote_bytes"], one["bytes"]["remote"])

    def test_hosts(self):
        # Ranks 0 and 1 share a host, and rank 2 has its own. All counts follow from the routing, whatever it is.
        for order in ("per_host", "per_rank"):
            with tempfile.TemporaryDirectory() as folder:
                code, out, err = run("bench", *QUICK, "--limit-ms", "1", "--sets", "1", "--ranks", "3", "--order", order, "--json", f"{folder}/x",
                                     env={"SWITCHYARD_HOST": "a,a,b"})
                self.assertEqual(code, 0, out + err)
                one = json.loads(Path(folder, "x").read_text())["runs"][0]
            network, row = one["network"], one["config"]["hidden"] * 2
            self.assertTrue(one["verified"])
            self.assertEqual(network["hosts"], 2)
            self.assertLess(0, network["token_host_pairs"])
            self.assertLess(network["token_host_pairs"], network["token_rank_pairs"])
            self.assertLess(network["token_rank_pairs"], network["routes"])
            # A token crosses as a header of 128 bytes and its row, rounded up to a multiple of 128 bytes.
            self.assertEqual(network["dispatch_bytes"], network["token_host_pairs"] * (128 + -(-row // 128) * 128))
            self.assertEqual(network["combine_bytes"], network["token_host_pairs" if order == "per_host" else "token_rank_pairs"] * row)
            self.assertIn("2 hosts: ", out)
        self.assertEqual(self.measure("--sets", "1")[0]["runs"][0]["network"],
                         {"hosts": 1, "token_host_pairs": 0, "token_rank_pairs": 0, "routes": 0, "dispatch_bytes": 0, "combine_bytes": 0})

    def test_more_sets_than_iterations(self):
        # Every set is combined and checked, so the warm-up is longer.
        result, _ = self.measure("--sets", "48", "--warmup", "1")
        self.assertEqual(result["runs"][0]["input_sets"], 48)
        self.assertEqual(result["runs"][0]["config"]["warmup"], 28)

    def test_variants(self):
        for args in (["--layout", "expert_major", "--order", "per_route", "--alignment", "4"], ["--staging", "ring", "--slots", "8"],
                     ["--quantize", "ue8m0"], ["--dtype", "fp8"], ["--cached"], ["--processes", "--warps", "2"],
                     ["--routing", "recorded"], ["--dtype", "f32", "--layout", "expert_major", "--routing", "drops"]):
            result, out = self.measure("--sets", "2", *args)
            self.assertTrue(result["runs"][0]["verified"], f"{args}: {out}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
