#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Usage mistakes with ./dev and user-facing scripts: exit status 2, and one message that names the option and the allowed
values; nothing is installed, built or removed.

Usage: dev_mistakes_test.py [unittest arguments]
"""
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HANG_S = 60
MISTAKES = [
    ("./dev tset", "no verb 'tset'; did you mean 'test'?"),
    ("./dev xyzzy", "no verb 'xyzzy'"),
    ("./dev help tset", "no verb 'tset'; did you mean 'test'?"),
    ("./dev test --bogus", "test: unknown option '--bogus'; allowed: --preset VALUE --full --label VALUE --gpu"),
    ("./dev test plan", "test: unknown option 'plan'; allowed: --preset VALUE"),
    ("./dev test --label", "test: --label needs a value"),
    ("./dev test --full --gpu", "test: --gpu given with --full; allowed: one of --full, --label and --gpu"),
    ("./dev test --preset relaese", "no preset 'relaese'; allowed: release"),
    ("./dev build --preset", "build: --preset needs a value"),
    ("./dev build --preset --target x", "build: --preset needs a value"),
    ("./dev build --target", "build: --target needs a value"),
    ("./dev build all", "build: unknown option 'all'; allowed: --preset VALUE --target VALUE"),
    ("./dev build --preset=release", "build: unknown option '--preset=release'"),
    ("./dev docs extra", "docs: unknown option 'extra'; allowed: --serve"),
    ("./dev lint --fast", "lint: unknown option '--fast'; allowed: --changed --fix --tidy"),
    ("./dev bundle --preset", "bundle: --preset needs a value"),
    ("./dev wheel --bogus", "wheel: unknown option '--bogus'; allowed: --preset VALUE --layer --deep-ep"),
    ("./dev release --bogus", "release: unknown option '--bogus'; allowed: --preset VALUE --check"),
    ("./dev python-test tests", "python-test: unknown option 'tests'; allowed: --preset VALUE --no-torch"),
    ("./dev clean build/asan", "clean: unknown option 'build/asan'; allowed: none"),
    ("./dev setup everything", "setup: unknown group 'everything'; allowed: build, test"),
    ("./dev setup build lint", "setup: 'lint' given after 'build'; allowed: one group"),
    ("scripts/gpu_figures.sh --bogus", "unknown option '--bogus'"),
    ("scripts/gpu_figures.sh --out", "--out needs a folder"),
    ("scripts/gpu_sanitize.sh --bogus", "unknown option '--bogus'"),
    ("scripts/gpu_sanitize.sh --tool valgrind", "--tool = 'valgrind': memcheck, racecheck or synccheck"),
    ("scripts/gpu_sanitize.sh --limit 0", "--limit = '0': seconds, at least 1"),
    ("scripts/gpu_sanitize.sh --bin", "--bin needs a folder"),
]


def run(command):
    return subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False, stdin=subprocess.DEVNULL)


class Mistakes(unittest.TestCase):
    def test_commands(self):
        for command, text in MISTAKES:
            with self.subTest(command):
                done = run(command)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                name = Path(command.split()[0]).stem
                self.assertIn(f"{name}: {text}", done.stderr)
                if name == "dev":
                    self.assertEqual(len(done.stderr.splitlines()), 2 if "no verb" in text else 1, done.stderr)

    def test_help_of_a_verb(self):
        for verb in ("setup", "build", "test", "clean", "docs"):
            asked, other = run(f"./dev help {verb}"), run(f"./dev {verb} --help")
            self.assertEqual((asked.returncode, asked.stdout, asked.stderr), (0, other.stdout, ""))
            self.assertIn(f"Usage: ./dev {verb}", asked.stdout)


if __name__ == "__main__":
    unittest.main()
