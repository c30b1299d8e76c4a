#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`switchyard trace --in`: the summary of a trace that was written earlier.

Usage: cli_trace_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import gzip
import json
import sys
import tempfile
import unittest
from pathlib import Path

import cli_test
from cli_test import SMALL, run

RECORDED = Path(__file__).resolve().parents[3] / "docs" / "traces"


class WrittenTrace(unittest.TestCase):
    def test_says_what_the_run_said(self):
        # Every token is sent to all 8 experts, 4 per rank. In each call, 16 rows of 64 bf16 columns are sent, and with
        # per_route, 64 rows return.
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run("trace", *SMALL, "--mode", "low_latency", "--order", "per_route", "--experts", "8", "--topk", "8", "--calls",
                                 "3", "--events", "4096", "--json", "--out", "t.json", cwd=folder)
            self.assertEqual(code, 0, err)
            live = json.loads(out)
            links = {way: (link["bytes"], link["by"]) for way, link in live["busiest_link"].items()}
            self.assertEqual(links, {"out": (16 * 128, "trace"), "back": (64 * 128, "trace")})
            code, out, err = run("trace", "--in", "t.json", "--json", cwd=folder)
            self.assertEqual(code, 0, err)
            read = json.loads(out)
            self.assertEqual(read["busiest_link"], live["busiest_link"])
            counts = [sorted((p["rank"], p["phase"], p["count"], p["bytes"]) for p in s["phases"]) for s in (live, read)]
            self.assertEqual(*counts)
            code, out, err = run("trace", "--in", "t.json", cwd=folder)
            self.assertEqual(code, 0, err)
            self.assertIn("Busiest link back: rank 0 to 1, 8.19 kB per call, according to the trace", out)
            Path(folder, "other.json").write_text('{"traceEvents": []}')
            for args, text in ((["other.json"], "'other.json' given, which is not such a trace"), (["none"], "'none' given, which cannot be read"),
                               (["."], "--in: '.' given"), (["t.json", "--tokens", "3"], "--tokens: given with --in, which runs nothing")):
                code, out, err = run("trace", "--in", *args, cwd=folder)
                self.assertEqual((code, out), (2, ""), err)
                self.assertIn(text, err)
            trace = json.loads(Path(folder, "t.json").read_text())
            at, event = next((i, e) for i, e in enumerate(trace["traceEvents"]) if e["ph"] == "X")
            event["dur"] = -1
            Path(folder, "bad.json").write_text(json.dumps(trace))
            code, out, err = run("trace", "--in", "bad.json", cwd=folder)
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn(f"'bad.json' given, which is not such a trace: traceEvents[{at}] ('{event['name']}'): dur is -1; allowed: 0 to", err)

    def test_recorded_traces(self):
        packed = sorted(RECORDED.glob("*.json.gz"))
        self.assertTrue(packed, RECORDED)
        with tempfile.TemporaryDirectory() as folder:
            for path in packed:
                with self.subTest(path.name):
                    code, out, err = run("trace", "--in", str(path))
                    self.assertEqual((code, out), (2, ""), err)
                    self.assertIn("which is compressed with gzip; decompress it first: gzip -dc", err)
                    plain = Path(folder, "t.json")
                    plain.write_bytes(gzip.decompress(path.read_bytes()))
                    code, out, err = run("trace", "--in", str(plain), "--json")
                    self.assertEqual(code, 0, err)
                    summary = json.loads(out)
                    self.assertEqual(len(summary["ranks"]), int(path.name[0]))
                    self.assertEqual(summary["lost_events"], 0)
                    waits = sum(p["count"] for p in summary["phases"] if p["category"] == "wait")
                    self.assertGreater(waits, 0)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
