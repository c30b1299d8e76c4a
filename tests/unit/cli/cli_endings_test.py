#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the command line tool ends when something prevents its work: contradictory arguments, an unusable environment, a full
disk, or a signal. Runs with threads and with processes end in the same way.

Usage: cli_endings_test.py PATH-OF-SWITCHYARD [unittest arguments]
"""
import errno
import fcntl
import json
import os
import pty
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
from pathlib import Path

import cli_test
from cli_test import run

ONE_CASE = ["--ranks", "2", "--tokens", "16", "--hidden", "256", "--mode", "normal", "--routing", "uniform", "--dtype", "bf16",
            "--layout", "rank_major", "--staging", "direct"]


class Usage(unittest.TestCase):
    def expect(self, args, *texts):
        code, out, err = run(*args)
        self.assertEqual((code, out), (2, ""), f"{args}: {out}{err}")
        for text in texts:
            self.assertIn(text, err)

    def test_one_verb_at_a_time(self):
        self.expect(["bench", "verify", "--ranks", "2"], "'verify': given after 'bench'; one verb at a time")
        self.expect(["verify", "bench"], "'bench': given after 'verify'", "switchyard verify --help")
        self.expect(["trace", "doctor"], "'doctor': given after 'trace'")

    def test_options_before_an_inner_verb(self):
        self.expect(["verify", "--ranks", "64", "ledger", "--quick"], "--ranks: given before 'ledger'")
        self.expect(["verify", "--json", "ledger", "--quick"], "--json: given before 'ledger'")

    def test_a_switch_takes_no_value(self):
        for verb in (["verify"], ["verify", "ledger"]):
            self.expect([*verb, "--json=out.json"], "--json: 'out.json' given, but it is a switch", "as JSON)")

    def test_values_are_quoted_whole(self):
        for bad in ("1-", "1,,2", ",1"):
            self.expect(["verify", "--ranks", bad], f"--ranks: '{bad}' given", "from 1 to 64")

    def test_flags_are_named_not_members(self):
        self.expect(["verify", "--mode", "low_latency", "--tokens", "70000"], "--tokens = 70000: must be in [1, 65535]")

    def test_what_does_not_fit_into_memory(self):
        self.expect(["verify", *ONE_CASE, "--tokens", "1048576", "--hidden", "131072"],
                    "--tokens 1048576 --hidden 131072 --ranks 2 (normal, rank_major rows, direct staging) need about")
        for ranks in ([], ["--processes"]):
            self.expect(["verify", "ledger", "--ranks", "64", "--tokens", "65535", "--hidden", "131072", "--topk", "2", *ranks],
                        "--tokens 65535 --hidden 131072 --topk 2 --ranks 64 need about", "switchyard verify ledger --help")

    def test_recordings(self):
        self.expect(["verify", *ONE_CASE, "--routing", "recorded:layer=99"], "layer 99 given", "has layers: 3")
        for verb, flag in (("demo", "--routing"), ("verify", "--routing")):
            self.expect([verb, flag, "/nonexistent.npy"], f"{flag}: cannot read '/nonexistent.npy': No such file")


class Environment(unittest.TestCase):
    """If a tuning file is missing, nothing can run, and nothing is reported as a failed check."""
    ENV = {"SWITCHYARD_TUNING": "/nonexistent/f"}
    TEXT = "SWITCHYARD_TUNING: /nonexistent/f: cannot be read: No such file or directory"

    def test_threads_and_processes_agree(self):
        for verb in (["verify", *ONE_CASE], ["verify", "ledger", "--quick"]):
            for ranks in ([], ["--processes"]):
                code, out, err = run(*verb, *ranks, env=self.ENV)
                self.assertEqual((code, out), (2, ""), f"{verb} {ranks}")
                self.assertIn(self.TEXT, err)
                code, out, err = run(*verb, *ranks, "--json", env=self.ENV)
                self.assertEqual(code, 2)
                report = json.loads(out)
                self.assertFalse(report["passed"])
                self.assertEqual(report["problem"], self.TEXT)
                self.assertIn(self.TEXT, err)
                if "ledger" in verb:
                    self.assertIsNone(report["combine_e2e_us"])
                    self.assertIsNone(report["prepare_fixture_us"])

    def test_workers(self):
        for ranks in ([], ["--processes"]):
            code, _, err = run("trace", "--ranks", "2", "--tokens", "4", "--hidden", "64", "--blocks", "64", "--warps", "256", *ranks)
            self.assertEqual(code, 2)
            self.assertIn("--blocks x --warps: 64 x 256 given", err)

    def test_a_case_without_room_leaves_the_others(self):
        def limit():  # heaps of processes are files in memory, so a limit for files is a limit for heaps
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))

        def call(*args):
            return subprocess.run([cli_test.TOOL, "verify", "--mode", "low_latency", "--ranks", "2", "--tokens", "512,4", "--hidden",
                                   "256", "--routing", "uniform", "--dtype", "bf16", "--processes", *args], capture_output=True,
                                  text=True, timeout=120, check=False, preexec_fn=limit)
        done = call()
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^ERROR  low_latency .*T512.*\n +.*cannot create a heap segment")
        self.assertRegex(done.stdout, r"(?m)^PASS  low_latency .*T4 ")
        self.assertRegex(done.stdout.splitlines()[-1], "^ERROR: 2 cases, .* 0 cases failed, 1 could not run")
        done = call("--json")
        report = json.loads(done.stdout)
        self.assertEqual((done.returncode, report["passed"]), (3, False))
        self.assertEqual([c["passed"] for c in report["cases"]], [False, True])
        self.assertIn("cannot create a heap segment", report["cases"][0]["problem"])
        self.assertIn("1 case could not run", done.stderr)

    def test_a_device_is_no_tuning_file(self):
        code, _, err = run("verify", *ONE_CASE, env={"SWITCHYARD_TUNING": "/dev/zero"})
        self.assertEqual(code, 2)
        self.assertIn("/dev/zero: cannot be read: is not a regular file", err)

    def test_doctor_and_processes_agree(self):
        env = {"TMPDIR": "/nonexistent"}
        report = json.loads(run("doctor", "--json", env=env)[1])
        verdict = {f["name"]: f["verdict"] for f in report["findings"]}["cpu, ranks as processes"]
        self.assertEqual(verdict == "ok", run("verify", *ONE_CASE, "--processes", env=env)[0] == 0)


class FullDisk(unittest.TestCase):
    def test_output_that_nobody_can_read(self):
        for args in (["doctor"], ["verify", "ledger", "--quick", "--json"], ["--help"], ["--version"], ["verify", *ONE_CASE]):
            with open("/dev/full", "w", encoding="ascii") as full:
                done = subprocess.run([cli_test.TOOL, *args], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
            self.assertEqual(done.returncode, 3, args)
            self.assertIn(os.strerror(errno.ENOSPC), done.stderr)


class Outputs(unittest.TestCase):
    """Outputs that cannot be written are reported before any measurement, if this is known by then; no signal terminates the
    tool."""
    POINT = ["bench", "--mode", "low_latency", "--ranks", "1", "--tokens", "1", "--hidden", "64", "--iterations", "20"]
    TUNE = ["tune", "--ranks", "1", "--tokens", "2", "--hidden", "256", "--iterations", "20"]

    def test_json_alone_on_standard_output(self):
        with tempfile.TemporaryDirectory() as folder:
            for args in (self.POINT, [*self.POINT, "--mode", "flat"],
                         ["bench", "--ranks", "1", "--tokens", "16", "--hidden", "64", "--iterations", "20", "--limit-ms", "1"],
                         [*self.TUNE, "--out", f"{folder}/tuning"]):
                code, out, err = run(*args, "--json", "-")
                self.assertEqual(code, 0, err)
                self.assertTrue(json.loads(out)["runs"])
                self.assertIn(f"switchyard {args[0]}", err)  # the table
            code, out, err = run(*self.POINT, "--html", "-")
            self.assertEqual((code, out[:15]), (0, "<!DOCTYPE html>"))
            code, out, err = run(*self.POINT, "--html", "-", "--json", "-")
            self.assertEqual((code, out), (2, ""))
            self.assertIn("to which another flag also writes", err)
            code, out, err = run("trace", "--out", "-")
            self.assertEqual((code, out), (2, ""))
            self.assertIn("--out: '-' given", err)
        for args in (["verify", *ONE_CASE], ["verify", "ledger", "--quick"], ["doctor"],
                     ["trace", "--ranks", "1", "--tokens", "4", "--hidden", "64", "--out", "/dev/null"]):
            for json_flag in (["--json"], ["--json", "-"], ["--json=-"]):
                code, out, err = run(*args, *json_flag)
                self.assertEqual(code, 0, err)
                self.assertTrue(json.loads(out), args)
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run([cli_test.TOOL, *self.POINT, "--json", "-"], stdout=full, stderr=subprocess.PIPE, text=True,
                                  timeout=120, check=False)
        self.assertEqual(done.returncode, 3)
        self.assertIn("cannot write standard output: " + os.strerror(errno.ENOSPC), done.stderr)

    def limited(self, blocks, *args):
        """Runs the tool with a file size limit of `blocks` KiB."""
        return subprocess.run([cli_test.TOOL, *args], capture_output=True, text=True, timeout=120, check=False,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (blocks << 10, blocks << 10)))

    def test_a_limit_of_file_sizes_is_found_before(self):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/out"
            for args in ([*self.POINT, "--json", path], [*self.POINT, "--html", path], [*self.TUNE, "--out", path],
                         ["trace", "--out", path], ["demo", "--out", path]):
                for blocks in (0, 1):
                    if args[0] == "tune" and blocks == 1:
                        continue  # a file of this size fits
                    done = self.limited(blocks, *args)
                    self.assertEqual((done.returncode, done.stdout), (2, ""), args)
                    self.assertRegex(done.stderr, f"^switchyard: --\\w+: cannot write '{path}[^\n]*': " + os.strerror(errno.EFBIG))
            self.assertEqual([f for _, _, files in os.walk(folder) for f in files], [])

    def test_a_limit_that_is_met_at_the_end_loses_no_table(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            done = self.limited(4, *self.POINT, "--sweep", "tokens=1,2,3,4", "--json", str(path))
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertEqual(done.stdout.count("PASS"), 4)
            self.assertIn(f"switchyard: cannot write {path}: " + os.strerror(errno.EFBIG), done.stderr)
            self.assertEqual(os.listdir(folder), [])

    def test_a_folder_in_the_place_of_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("report.html", "trace.json"):
                out = Path(folder) / ("in_place_of_" + name)
                (out / name).mkdir(parents=True)
                code, printed, err = run("demo", "--out", str(out))
                self.assertEqual((code, printed), (2, ""))
                self.assertIn(f"--out: cannot write '{out / name}': " + os.strerror(errno.EISDIR), err)
            for args in ([*self.POINT, "--json"], [*self.POINT, "--html"], [*self.TUNE, "--json"], [*self.TUNE, "--html"],
                         ["trace", "--out"]):
                code, printed, err = run(*args, folder)
                self.assertEqual((code, printed), (2, ""), args)
                self.assertIn(f"cannot write '{folder}': " + os.strerror(errno.EISDIR), err)


class Inputs(unittest.TestCase):
    POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

    def test_other_kinds_of_file_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("a.safetensors", "a.topk_ids.npy"):
                path = Path(folder) / name
                path.write_text(self.POINTER, encoding="ascii")
                for verb, flag in (("demo", "--routing"), ("bench", "--routing"), ("verify", "--routing")):
                    code, out, err = run(verb, flag, str(path))
                    self.assertIn(code, (2, 3))
                    self.assertEqual(out, "")
                    self.assertIn("found a Git LFS pointer (git lfs pull", err)

    def test_the_recorder_has_a_sentence(self):
        script = Path(__file__).resolve().parents[3] / "scripts" / "record_routing.py"
        with tempfile.TemporaryDirectory() as folder:
            for number, content in enumerate((self.POINTER.encode(), b"", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{x",
                                              struct.pack("<Q", 7) + b'{"a":3}', b"\x1f\x8b\x08 and more", b"PK\x03\x04" + 60 * b"x")):
                path = Path(folder) / str(number)
                path.write_bytes(content)
                for args in (["info", path], ["merge", Path(folder) / "out", path], ["info", folder], ["info", path / "none"]):
                    done = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, timeout=60, check=False)
                    self.assertEqual(done.returncode, 1, done.stderr)
                    self.assertRegex(done.stderr, r"\Arecord_routing: [^\n]+\n\Z")  # also without numpy


class Signals(unittest.TestCase):
    LONG = ["verify", "ledger", "--iterations", "1000000", "--tokens", "8", "--hidden", "1024"]

    def test_nothing_is_left_behind(self):
        for end in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with tempfile.TemporaryDirectory() as folder:
                with subprocess.Popen([cli_test.TOOL, *self.LONG, "--processes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      env={**os.environ, "TMPDIR": folder}) as tool:
                    self.wait_for_ranks(tool.pid)
                    tool.send_signal(end)
                    self.assertEqual(tool.wait(60), -end)
                self.assertEqual(os.listdir(folder), [])

    def wait_for_ranks(self, pid):
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for _ in range(600):
            if len(children.read_text(encoding="ascii").split()) == 2:
                return
            time.sleep(0.1)
        self.fail("no ranks")

    def test_the_prompt_gets_a_line_of_its_own(self):
        for ranks in ([], ["--processes"]):
            out, status = self.interrupted(*self.LONG, *ranks)
            self.assertTrue(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT, status)
            self.assertIn("ledger combine", out)
            self.assertTrue(out.endswith("\n"), out[-200:])
            self.assertEqual(out.count("\n"), 1, out[-200:])  # one line, not one per rank

    SWEEP = ["bench", "--mode", "low_latency", "--ranks", "2", "--hidden", "256", "--sweep", "tokens=1,2,3,4,5,6", "--iterations"]

    def test_a_sweep_keeps_what_was_measured(self):
        for ranks in ([], ["--processes"]):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "out.json"
                with subprocess.Popen([cli_test.TOOL, *self.SWEEP, "3000", *ranks, "--json", path], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True, start_new_session=True) as tool:
                    self.assertIn("1 token", tool.stderr.readline())  # one measurement has finished
                    os.killpg(tool.pid, signal.SIGINT)  # like a terminal
                    out, err = tool.communicate(timeout=120)
                self.assertEqual(tool.returncode, -signal.SIGINT, err)
                self.assertEqual(err.count("stops after this measurement"), 1, err)
                document = json.loads(path.read_text(encoding="utf-8"))
                measured = len(document["runs"])
                self.assertIn(measured, range(1, 6))
                self.assertEqual(document["stopped"], f"interrupted after {measured} of 6")
                self.assertIn(f"switchyard: interrupted after {measured} of 6", err)
                self.assertIn("PASS", out)

    def test_sigterm_keeps_what_was_measured(self):
        for ranks in ([], ["--processes"]):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "out.json"
                with subprocess.Popen([cli_test.TOOL, *self.SWEEP, "3000", *ranks, "--json", path], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True, start_new_session=True) as tool:
                    self.assertIn("1 token", tool.stderr.readline())
                    tool.send_signal(signal.SIGTERM)  # like timeout(1): to the program, then to its group
                    os.killpg(tool.pid, signal.SIGTERM)
                    out, err = tool.communicate(timeout=120)
                self.assertEqual(tool.returncode, -signal.SIGTERM, err)
                measured = len(json.loads(path.read_text(encoding="utf-8"))["runs"])
                self.assertIn(measured, range(1, 6))
                self.assertIn(f"switchyard: interrupted after {measured} of 6", err)
                self.assertIn("PASS", out)

    def test_a_second_interrupt_ends_a_sweep_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            with subprocess.Popen([cli_test.TOOL, *self.SWEEP, "1000000", "--json", path], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) as tool:
                self.wait_until_caught(tool.pid)
                tool.send_signal(signal.SIGINT)
                self.assertEqual(tool.stderr.readline(), "\n")
                self.assertIn("a second signal stops at once", tool.stderr.readline())
                tool.send_signal(signal.SIGINT)
                self.assertEqual(tool.wait(60), -signal.SIGINT)
            self.assertFalse(path.exists() and path.stat().st_size)

    def wait_until_caught(self, pid):
        for _ in range(600):
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
            if caught >> (signal.SIGINT - 1) & 1:
                return
            time.sleep(0.1)
        self.fail("SIGINT is not caught")

    @staticmethod
    def interrupted(*args):
        """Terminal output and exit status of a call interrupted by Ctrl-C while it draws its progress."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(cli_test.TOOL, [cli_test.TOOL, *args], {**os.environ, "TERM": "xterm"})
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        out, pressed = "", False
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # all writers have closed it
                part = b""
            if not part:
                return out, os.waitpid(pid, 0)[1]
            out += part.decode()
            if not pressed and out.count("\r") > 3:
                os.write(terminal, b"\x03")
                pressed = True


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
