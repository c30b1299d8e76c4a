# SPDX-License-Identifier: Apache-2.0
"""bench/compare_builds.py with programs in place of the tool, whose times are known."""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

#: Reports the n-th of `times` as the time of `layer` at 64 tokens in its n-th call, and ten times as much at 128 tokens.
TOOL = """#!{python}
import json, pathlib, sys
log = pathlib.Path({log!r})
before = log.read_text() if log.exists() else ""
log.write_text(before + {name!r})
if sys.argv[1] != "bench" or {status} != 0:
    print("what went wrong", file=sys.stderr)
    sys.exit({status} or 3)
time = {times}[before.count({name!r})]
runs = [dict(config=dict(tokens=t, ranks=2), layer=dict(p50_us=time * f, p99_us=0), verified=True) for t, f in ((64, 1), (128, 10))]
runs[1]["only_{name}"] = dict(p50_us=1)
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(dict(commit={name!r}, runs=runs)))
"""


class CompareBuilds(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.log = Path(self.folder.name, "log")

    def tool(self, name, times, status=0):
        path = Path(self.folder.name, name)
        path.write_text(TOOL.format(python=sys.executable, log=str(self.log), name=name, times=times, status=status))
        path.chmod(0o755)
        return f"--build={name}={path}"

    def compare(self, *args):
        return subprocess.run([sys.executable, "bench/compare_builds.py", *args], cwd=ROOT, capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL, check=False)

    def test_medians_and_ratios(self):
        out = Path(self.folder.name, "out.json")
        done = self.compare(self.tool("a", [100.0, 400.0, 200.0]), self.tool("b", [50.0, 60.0, 40.0]), "--json", str(out), "--", "--mode", "layer")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.log.read_text(), "abbaab")
        found = json.loads(out.read_text())
        self.assertEqual((found["rounds"], found["bench"], found["builds"]), (3, ["--mode", "layer"], {"a": {"commit": "a"}, "b": {"commit": "b"}}))
        self.assertEqual(found["runs"], [
            {"point": f"tokens {tokens}", "time": "layer", "a": {"p50_us": 200.0 * factor, "ratio": 1.0, "spread": 1.5},
             "b": {"p50_us": 50.0 * factor, "ratio": 0.25, "spread": 0.4}} for tokens, factor in ((64, 1), (128, 10))])
        self.assertRegex(done.stdout, r"\ntokens 128 +layer +2000\.0  1\.000  1\.500 +500\.0  0\.250  0\.400\n\Z")

    def test_failing_run(self):
        done = self.compare(self.tool("a", [1.0] * 3), self.tool("b", [], status=1), "--", "--mode", "layer")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("round 1, b: exit status 1: what went wrong\n", done.stderr)

    def test_wrong_results(self):
        """Output that is not that of a bench is an error of the run. Times of 0, and those that not all builds have, are left out."""
        broken = Path(self.folder.name, "broken")
        for text, message in (("hello", "its --json is not that of a bench"), ("[]", "its --json is not that of a bench"),
                              ('{"runs": [{"layer": {"p50_us": 1}}]}', "KeyError('config')"), ('{"runs": []}', "no time in common"),
                              ('{"runs": [{"config": {"tokens": 64}, "layer": {"p50_us": 0}}]}', "no time in common"),
                              ('{"runs": [{"config": {"tokens": 64}, "layer": {"p50_us": null}}]}', "no time in common"),
                              ('{"runs": [{"config": {"tokens": 64}}, {"config": {"ranks": 2}, "layer": {"p50_us": 1}}]}', "no time in common")):
            with self.subTest(text):
                broken.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[-1], 'w').write({text!r})\n")
                broken.chmod(0o755)
                done = self.compare("--rounds=1", f"--build=b={broken}", self.tool("a", [1.0] * 9), "--", "x")
                self.assertEqual(done.returncode, 1)
                self.assertIn(message, done.stderr)
                self.assertNotIn("Traceback", done.stderr)

    def test_failing_run_that_prints_bytes(self):
        broken = Path(self.folder.name, "broken")
        broken.write_text(f"#!{sys.executable}\nimport sys\nsys.stderr.buffer.write(b'bad \\xff')\nsys.exit(3)\n")
        broken.chmod(0o755)
        done = self.compare(f"--build=b={broken}", self.tool("a", [1.0]), "--", "x")
        self.assertEqual((done.returncode, done.stderr), (1, "round 1, b: exit status 3: bad \ufffd\n"))

    def test_tools_in_the_current_folder(self):
        """Their names need no slash."""
        self.tool("a", [1.0]), self.tool("b", [2.0])
        done = subprocess.run([sys.executable, ROOT / "bench/compare_builds.py", "--rounds=1", "--build=a=a", "--build=b=./b", "--", "x"],
                              cwd=self.folder.name, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_wrong_usage(self):
        a = self.tool("a", [1.0])
        data = Path(self.folder.name, "data")
        data.touch()
        for args, text in (([a, "--", "x"], "--build: at least two are needed"),
                           ([a, a, "--", "x"], "two builds have this name"),
                           ([a, "--build", "b=/nowhere", "--", "x"], "--build b=/nowhere: must be NAME=TOOL, where TOOL is a file that can be executed"),
                           ([a, f"--build=b={data}", "--", "x"], "where TOOL is a file that can be executed"),
                           ([a, self.tool("time", []), "--", "x"], "two columns of the result have this name"),
                           ([a, self.tool("b", []), "--limit", "nan", "--", "x"], "--limit nan: must be a number above 0"),
                           ([a, self.tool("b", []), "--json", "/nowhere/x", "--", "x"], "--json /nowhere/x: its folder does not exist"),
                           ([a, self.tool("b", []), "--rounds", "0", "--", "x"], "--rounds 0: must be at least 1"),
                           ([a, self.tool("b", []), "--", "--json", "x"], "--json is an option of this program, not of bench")):
            with self.subTest(text):
                done = self.compare(*args)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main()
