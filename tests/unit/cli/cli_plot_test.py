#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`switchyard plot` from the user's perspective.

Usage: cli_plot_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

import cli_test
from cli_test import run


class Plot(unittest.TestCase):
    """Pages for figures that were written earlier. The bench and tune tests compare them with the pages from these commands."""

    RUN = {"config": {"mode": "normal", "tokens_per_rank": 8, "sms": 8}, "dispatch": {"p50_us": 2.0, "p99_us": 3.0},
           "verified": True}

    def plot(self, folder, document, *args):
        Path(folder, "x.json").write_text(document if isinstance(document, str) else json.dumps(document))
        return run("plot", "x.json", *args, cwd=folder)

    def document(self, sms):
        runs = [{**self.RUN, "config": {**self.RUN["config"], "sms": n}} for n in sms]
        return {"schema": "switchyard.bench/1", "runs": runs, "machine": {"cpu": "A"}, "gpus": {"names": ["G"]}}

    def test_without_what_was_swept(self):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = self.plot(folder, self.document([8, 16, 132]))
            self.assertEqual((code, out, err), (0, "written to x.html\n", ""))
            page = Path(folder, "x.html").read_text()
            for label in (">SMs</text>", ">8</text>", ">132</text>", "1 x G"):
                self.assertIn(label, page)
            code, _, _ = self.plot(folder, {**self.document([8, 16]), "swept": []}, "--html", "tokens.html")
            self.assertEqual(code, 0)
            self.assertIn(">tokens per rank</text>", Path(folder, "tokens.html").read_text())

    def test_what_cannot_be_plotted(self):
        with tempfile.TemporaryDirectory() as folder:
            for document, text in (
                    ("{", "FILE: 'x.json' given, which is not JSON: line 1, column 2"),
                    ("3", "'x.json' given, which has a schema other than"),
                    ({"schema": 3}, "switchyard.bench/1, switchyard.tune/1 and switchyard.plan/1"),
                    ({"schema": "switchyard.trace/2"}, "switchyard.bench/1, switchyard.tune/1 and switchyard.plan/1"),
                    ({"schema": "switchyard.bench/1"}, "'x.json' given, which lacks figures of its schema"),
                    ({**self.document([]), "runs": []}, "'x.json' given, which lacks figures of its schema"),
                    ({**self.document([1]), "runs": [{}]}, "'x.json' given, which lacks figures of its schema")):
                code, out, err = self.plot(folder, document)
                self.assertEqual((code, out), (2, ""), f"{document}: {err}")
                self.assertIn(text, err)
            for args, text in ((["--html", "./x.json"], "--html: './x.json' given, which is FILE itself"),
                               (["--html", "no/x"], "--html: cannot write 'no/x'"), (["y.json"], "takes no such argument")):
                code, _, err = self.plot(folder, self.document([1]), *args)
                self.assertEqual(code, 2, err)
                self.assertIn(text, err)
            for args, text in (([], "FILE is required"), (["nothing"], "'nothing' given, which cannot be read"),
                               ([folder], "which cannot be read")):
                code, _, err = run("plot", *args, cwd=folder)
                self.assertEqual(code, 2, err)
                self.assertIn(text, err)
            self.assertEqual(os.listdir(folder), ["x.json"])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
