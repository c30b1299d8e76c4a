#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`switchyard doctor` from the user's perspective.

Usage: cli_doctor_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import json
import sys
import tempfile
import unittest
from pathlib import Path

import cli_test
from cli_test import run


class Doctor(unittest.TestCase):
    def test_json(self):
        code, out, err = run("doctor", "--json")
        report = json.loads(out)
        self.assertEqual(code, 0 if report["ok"] else 1, err)
        groups = {f["group"] for f in report["findings"]}
        self.assertLessEqual({"CPU", "Memory", "Processes", "GPU", "Libraries", "Tuning", "Environment", "Backends"}, groups)
        for finding in report["findings"]:
            self.assertIn(finding["verdict"], ("ok", "limited", "no", "note"))
            if finding["verdict"] in ("limited", "no"):
                self.assertTrue(finding["why"], finding)

    def test_environment_is_shown_but_secrets_are_not(self):
        env = {"SWITCHYARD_JOB_TOKEN": "hunter2", "SWITCHYARD_RANK": "3", "DNNL_MAX_CPU_ISA": "AVX2"}
        _, out, _ = run("doctor", env=env)
        self.assertNotIn("hunter2", out)
        self.assertIn("SWITCHYARD_RANK", out)
        self.assertIn("DNNL_MAX_CPU_ISA=AVX2 caps", out)

    def engines(self, script):
        """Runs `doctor --engines` with a script in place of Python."""
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder, "python")
            python.write_text(f"#!/bin/sh\n{script}\n")
            python.chmod(0o755)
            return (*run("doctor", "--engines", env={"SWITCHYARD_PYTHON": str(python)}), str(python))

    def test_engines_of_a_python(self):
        listing = '[ "$1" = -c ] && exit 0; [ "$*" = "-m switchyard.engines" ] || exit 4; echo "vllm 0.33.0, supported"; exit'
        self.assertEqual(self.engines(f"{listing} 0")[:2], (0, "vllm 0.33.0, supported\n"))
        self.assertEqual(self.engines(f"{listing} 1")[:2], (1, "vllm 0.33.0, supported\n"))
        code, out, err, _ = self.engines(f"{listing} 7")
        self.assertEqual((code, out), (3, "vllm 0.33.0, supported\n"))
        self.assertIn("-m switchyard.engines: exit status 7", err)

    def test_engines_without_the_package(self):
        code, out, _, python = self.engines("exit 69")
        self.assertEqual(code, 1)
        self.assertIn(f"{python} has no package switchyard: install the wheel there, or set SWITCHYARD_PYTHON", out)
        code, _, err, python = self.engines("exit 1")
        self.assertEqual(code, 3)
        self.assertIn(f"{python}: the package switchyard cannot be imported", err)
        code, _, err = run("doctor", "--engines", env={"SWITCHYARD_PYTHON": "/nonexistent/python"})
        self.assertEqual(code, 3)
        self.assertIn("/nonexistent/python: No such file or directory; set SWITCHYARD_PYTHON", err)

    def test_engines_exclude_other_reports(self):
        for arguments in (["--json"], ["--measure", "here.json"]):
            code, _, err = run("doctor", "--engines", *arguments)
            self.assertEqual(code, 2)
            self.assertIn(f"{arguments[0]}: given with --engines, which prints only text", err)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
