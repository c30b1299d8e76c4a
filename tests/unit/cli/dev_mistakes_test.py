#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Usage mistakes with ./dev and user-facing scripts: exit status 2, and one message that names the option and the allowed
values; nothing is installed, built or removed.

Usage: dev_mistakes_test.py [unittest arguments]
"""
import os
import shutil
import subprocess
import sys
import tempfile
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
VERBS = ("setup", "build", "demo", "test", "bench", "bundle", "wheel", "release", "python-test", "docs", "lint", "clean", "help")
#: Scripts with a help text, besides those that print that of a verb.
SCRIPTS = ("bench/compare_builds.py", "scripts/bare.sh", "scripts/gpu_figures.sh", "scripts/gpu_sanitize.sh", "scripts/page_blocks.py",
           "scripts/plan_validation.py", "scripts/record_routing.py", "scripts/result_lines.py", "scripts/sample_sentences.py",
           "scripts/interface/generate.py")
WIDTH = 100


def run(command, cwd=ROOT, **more):
    return subprocess.run(command.split(), cwd=cwd, capture_output=True, text=True, timeout=HANG_S, check=False, stdin=subprocess.DEVNULL,
                          **more)


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

    def test_help_is_at_most_100_columns_wide(self):
        commands = [f"./dev {verb} --help" for verb in VERBS]
        commands += [f"{sys.executable if name.endswith('.py') else 'bash'} {name} --help" for name in SCRIPTS]
        for command in commands:
            with self.subTest(command):
                done = run(command, env={**os.environ, "COLUMNS": str(WIDTH)})
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("\n", done.stdout)
                self.assertEqual([line for line in done.stdout.splitlines() if len(line) > WIDTH], [])

    def test_scripts_behind_a_verb_print_its_help(self):
        for name, verb in (("bundle", "bundle"), ("docs", "docs"), ("lint", "lint"), ("python_test", "python-test"), ("release", "release"),
                           ("wheel", "wheel")):
            with self.subTest(name):
                done, other = run(f"scripts/{name}.sh --help"), run(f"./dev {verb} --help")
                self.assertEqual((done.returncode, done.stdout, done.stderr), (0, other.stdout, ""))

    def test_the_recorder_needs_numpy_only_for_recordings(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "numpy.py").write_text("raise ImportError('none here')\n")
            env = {**os.environ, "PYTHONPATH": folder}
            script = f"{sys.executable} scripts/record_routing.py"
            asked, wrong, right = (run(f"{script} {args}", env=env) for args in ("--help", "infos x", "info x"))
            self.assertEqual((asked.returncode, asked.stderr), (0, ""))
            self.assertIn("record_routing.py info FILE", asked.stdout)
            self.assertEqual((wrong.returncode, wrong.stdout), (2, ""))
            self.assertEqual(wrong.stderr, asked.stdout)
            self.assertEqual((right.returncode, right.stdout), (1, ""))
            self.assertRegex(right.stderr, r"\Arecord_routing: none here; it is needed: pip install numpy\n\Z")


class Clone(unittest.TestCase):
    """Verbs in a copy of the clone without sources; commands that would install or build are stubs, which fail by default."""

    def setUp(self):
        self.clone = Path(tempfile.mkdtemp())
        (self.clone / "scripts").mkdir()
        for name in ("dev", "CMakePresets.json", "scripts/packages.sh"):
            shutil.copy(ROOT / name, self.clone / name)
        (self.clone / "stubs").mkdir()
        self.program("stubs/dpkg-query", "echo installed")
        for name in ("cmake", "apt-get", "nvidia-smi"):
            self.program(f"stubs/{name}", f"echo {name} was called >&2; exit 1")

    def tearDown(self):
        shutil.rmtree(self.clone, ignore_errors=True)

    def program(self, path, script):
        path = self.clone / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def dev(self, command):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SWITCHYARD_")}
        return run(f"./dev {command}", self.clone, env={**clean, "PATH": f"{self.clone / 'stubs'}:{os.environ['PATH']}"})

    def test_a_tool_that_exists_prints_it(self):
        self.program("build/release/bin/switchyard-demo", "echo the demo: $*")
        for args in ("--help", "--help --ranks 4", "--ranks 4 -h"):
            done = self.dev(f"demo -- {args}")
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "the demo: demo --help\n", ""))

    def test_the_demo_has_no_other_verb(self):
        self.program("build/release/bin/switchyard-demo", "echo the demo: $*")
        done = self.dev("bench -- --help")
        self.assertNotIn("the demo", done.stdout)
        self.assertIn("built first", done.stderr.splitlines()[0])
        self.program("build/release/bin/switchyard", "echo the tool: $*")
        self.assertEqual(self.dev("bench -- --help").stdout, "the tool: bench --help\n")

    def test_a_tool_that_does_not_exist_is_announced(self):
        done = self.dev("demo -- --help")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        lines = done.stderr.splitlines()
        self.assertIn("it is not built yet, and is built first", lines[0])
        self.assertIn("cmake was called", done.stderr)

    def test_the_libraries_need_no_packages_of_tests(self):
        self.program("stubs/dpkg-query", 'echo "$4" >> asked; echo installed')
        self.program("stubs/cmake", 'echo "$*" >> called')
        done = self.dev("build --target switchyard_libraries")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("libgtest-dev", (self.clone / "asked").read_text())
        calls = (self.clone / "called").read_text().splitlines()
        self.assertEqual(calls[0], "--preset release -DSWITCHYARD_TESTS=OFF -DSWITCHYARD_BENCH=OFF")
        self.assertRegex(calls[-1], "^--build build/release -j [0-9]+ --target switchyard_libraries$")
        (self.clone / "asked").unlink()
        self.dev("build")
        self.assertIn("libgtest-dev", (self.clone / "asked").read_text())


if __name__ == "__main__":
    unittest.main()
