#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A table of usage mistakes. Each mistake produces exit status 2, one line on stderr that names the option and the allowed
values, and a line that refers to --help. Nothing is printed on stdout, and no file is written or changed.

Usage: cli_mistakes_test.py PATH-OF-SWITCHYARD [unittest arguments]
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
ROOT = Path(__file__).resolve().parents[3]
TOPOLOGY = json.loads((ROOT / "data/topologies/h100_8_400g.json").read_text())
TRACE = {"otherData": {"producer": "switchyard", "world": 1, "lost_events": 0}, "traceEvents": []}
HANG_S = 30  # mistakes are found before anything runs, so only a hang takes this long

# Returns the contents of the folder in which the mistaken calls run.
FILES = {
    "empty.json": b"",
    "binary.json": bytes(range(128, 256)) * 8,
    "zeros.json": bytes(64),
    "comma.json": b'{\n  "schema": "switchyard.bench/1",\n  "runs": [1,, 2]\n}\n',
    "cut.json": b'{\n "format": "switchyard-topology",\n "version": 1,\n',
    "text.json": b"tokens = 128\n",
    "huge_number.json": b'{"format": 1e999}',
    "list.json": b"[1, 2, 3]",
    "packed.json": b"\x1f\x8b\x08\x00" + bytes(20),
    "other.json": b'{"schema": "somebody.else/1"}',
    "bench.json": b'{"schema": "switchyard.bench/1"}',
    "negative.json": json.dumps({**TOPOLOGY, "hosts": -1}).encode(),
    "misspelt.json": json.dumps({**TOPOLOGY, "host_s": 1}).encode(),
    "world.json": json.dumps({**TRACE, "otherData": {**TRACE["otherData"], "world": 0}}).encode(),
    "event.json": json.dumps({**TRACE, "traceEvents": [{"ph": "X"}]}).encode(),
    "warp.json": json.dumps({**TRACE, "traceEvents": [{"ph": "M", "name": "thread_name", "args": {"name": "block 0 warp x"}}]}).encode(),
    "routing.npy": b"\x93NUMPY\x01\x00" + bytes(10),
    "routing.safetensors": b"\xff" * 64,
    "empty.safetensors": b"",
    "bad.tuning": b"mode = sideways\n",
    "binary.tuning": bytes(range(256)),
    "file": b"not a folder",
}

SMALL = ("--ranks", "2", "--tokens", "16", "--hidden", "64")
H100 = str(ROOT / "data/topologies/h100_8_400g.json")

# The command, and the parts of the message: the option, then the given value and the allowed values.
MISTAKES = [
    # verbs
    ("frobnicate", "'frobnicate': no such verb", "allowed: demo, verify"),
    ("becnh", "'becnh': no such verb", "Did you mean 'bench'?"),
    ("help dmeo", "'dmeo': no such verb", "Did you mean 'demo'?"),
    ("demo bench", "'bench': given after 'demo'", "one verb at a time"),
    ("verify ledgre", "'ledgre': 'verify' takes no such argument", "Did you mean 'ledger'?"),
    ("verify --json ledger", "--json: given before 'ledger'"),
    ("demo 8", "'8': 'demo' takes no such argument", "options begin with -"),
    # flags
    ("--verbose", "--verbose: no such option"),
    ("demo --rank 2", "--rank: no such option of 'demo'", "Did you mean '--ranks'?"),
    ("bench -ranks 2", "-ranks: no such option of 'bench'"),
    ("verify --modes flat", "--modes: no such option of 'verify'", "Did you mean '--mode'?"),
    ("tune --modes flat", "--modes: no such option of 'tune'", "Did you mean '--mode'?"),
    ("verify --layouts all", "--layouts: no such option of 'verify'", "Did you mean '--layout'?"),
    ("bench --tokens", "--tokens: no value given"),
    ("bench --tokens=", "--tokens: no value given"),
    ("doctor --json=x.json", "--json: 'x.json' given", "takes no value"),
    ("demo --processes=yes", "--processes: given with a value", "takes no value"),
    ("bench --no-verify=1", "--no-verify: given with a value", "takes no value"),
    ("verify ledger -K 64", "-K: no such option of 'verify ledger'", "Did you mean '--hidden'?"),
    # numbers
    ("demo --ranks 0", "--ranks: '0' given", "an integer from 1 to 64"),
    ("demo --ranks -4", "--ranks: '-4' given", "an integer from 1 to 64"),
    ("demo --ranks 65", "--ranks: '65' given", "an integer from 1 to 64"),
    ("demo --ranks two", "--ranks: 'two' given", "an integer from 1 to 64"),
    ("demo --ranks 2.5", "--ranks: '2.5' given", "an integer from 1 to 64"),
    ("demo --steps nan", "--steps: 'nan' given", "an integer from 1 to 1000"),
    ("demo --tokens inf", "--tokens: 'inf' given", "an integer from 1 to 1048576, or auto"),
    ("bench --tokens 99999999999999999999", "--tokens: '99999999999999999999' given", "an integer from 1 to 1048576"),
    ("bench --hidden 0x100", "--hidden: '0x100' given", "an integer from 8 to 131072"),
    ("bench --tokens 1e3", "--tokens: '1e3' given", "an integer from 1 to 1048576"),
    ("bench --tokens 128,256", "--tokens: '128,256' given", "an integer from 1 to 1048576"),
    ("bench --iterations 1", "--iterations: '1' given", "an integer from 20 to"),
    ("verify --ranks 4-1", "--ranks: range '4-1' given", "first <= last"),
    ("verify --tokens 1,,2", "--tokens: '1,,2' given", "separated by commas"),
    ("trace --events 1", "--events: '1' given", "an integer from 16 to"),
    ("tune --slack 100", "--slack: '100' given", "an integer from 0 to 50"),
    ("doctor --measure x.json --seconds 0", "--seconds: '0' given", "an integer from 1 to 600"),
    (f"plan {H100} --ranks 0", "--ranks: '0' given", "an integer from 1 to 2048"),
    (f"plan {H100} --ranks 4096", "--ranks: '4096' given", "an integer from 1 to 2048"),
    ("verify ledger --tokens -1", "--tokens: '-1' given", "an integer from 0 to"),
    # words
    ("bench --dtype fp7", "--dtype: 'fp7' given", "bf16"),
    ("bench --dtype float32", "--dtype: 'float32' given", "allowed: bf16, f16, f32"),
    ("verify ledger --experts 3", "--experts: 3 given", "allowed: a multiple of --ranks 2"),
    ("verify ledger --dtype fp8", "--dtype: 'fp8' given", "allowed: bf16, f16, f32"),
    ("bench --mode lowlatency", "--mode: 'lowlatency' given", "Did you mean 'low_latency'?"),
    ("verify --mode normal,fast", "--mode: 'fast' given", "allowed: normal"),
    ("verify --layout all,rank_major", "--layout: 'all,rank_major' given", "'all' stands alone"),
    ("bench --backend rocm", "--backend: 'rocm' given", "allowed: cpu, cuda"),
    ("demo --routing zipf:steep", "--routing: 'zipf:steep' given", "zipf:<exponent>"),
    ("demo --routing zipf:nan", "--routing: 'zipf:nan' does not fit", "allowed: 0 to 16"),
    ("demo --routing drops:2", "--routing: 'drops:2' does not fit", "allowed: 0 to 1"),
    ("demo --routing uniform:3", "--routing: 'uniform:3' given", "without a number"),
    ("bench --sweep tokens", "--sweep: 'tokens' given", "NAME=N,N,..."),
    ("bench --sweep tokens=", "--sweep tokens: '' given", "an integer from 0 to"),
    ("bench --sweep dtype=bf17", "--sweep dtype: 'bf17' given", "allowed: bf16"),
    ("bench --sweep tokens=1 --sweep tokens=2", "--sweep: 'tokens=2' given after another of tokens", "one list"),
    # shapes
    ("bench --topk 9 --experts 8", "--topk: 9 given, which exceeds --experts 8", "allowed: 1 to 8"),
    ("demo --topk 9 --experts 8 --routing uniform", "--topk: 9 given, which exceeds --experts 8", "allowed: 1 to 8"),
    ("verify --topk 9 --experts 8", "--topk: 9 given, which exceeds --experts 8", "allowed: 1 to 8"),
    ("trace --topk 9 --experts 8", "--topk: 9 given, which exceeds --experts 8", "allowed: 1 to 8"),
    ("tune --topk 9 --experts 8", "--topk: 9 given, which exceeds --experts 8", "allowed: 1 to 8"),
    (f"plan {H100} --topk 9 --experts 8", "--topk: 9 given, which exceeds --experts 8", "allowed: 1 to 8"),
    ("bench --experts 4", "--topk: auto (8) given, which exceeds --experts 4", "allowed: 1 to 4"),
    ("demo --topk 4 --routing recorded", "--topk: 4 given", "has 8"),
    ("bench --hidden 12", "--hidden = 12: a row has 24 bytes in bf16", "multiple of 16"),
    ("demo --hidden 100", "--hidden: 100 given", "multiple of 8"),
    ("demo --routing zipf --hidden 100000 --intermediate 100000", "--hidden 100000", "are available; make one of them smaller"),
    ("bench --ranks 64 --tokens 1m --hidden 128ki", "--ranks 64 --tokens 1000000 --hidden 131072", "make one of them smaller"),
    # contradictions
    ("bench --order per_route", "--order: 'per_route' given with --layout rank_major", "allowed: per_rank"),
    ("bench --dtype fp8 --quantize f32", "--quantize: fp8 rows are quantized already", "allowed with"),
    ("bench --mode flat --layout expert_major", "--layout: given with --mode flat", "it belongs to --mode normal"),
    ("bench --contest", "--contest: given with --mode normal", "it belongs to --mode flat"),
    ("bench --slots 64", "--slots: given with --staging direct", "it belongs to --staging ring"),
    ("bench --accumulate fast", "--accumulate: given with --mode normal", "it belongs to --mode layer"),
    ("bench --mode layer --exchange low_latency --pieces 2", "--pieces: given with --mode layer", "it belongs to --mode low_latency and flat"),
    ("bench --mode layer --exchange low_latency --sweep sending=per_rank,per_route", "--sweep sending: given with --mode layer", "it belongs to --mode low_latency and flat"),
    ("bench --mode layer --exchange low_latency --scale-order column_major", "--scale-order: given with --mode layer", "it belongs to --mode low_latency"),
    ("bench --mode layer --alignment 16", "--alignment: given with --mode layer", "it belongs to --mode normal"),
    ("bench --mode layer --accumulate fast", "--accumulate: 'fast' given with bf16 experts", "--quantize f32 or ue8m0"),
    ("bench --mode layer --accumulate loose", "--accumulate: 'loose' given", "exact", "fast"),
    ("bench --scaling per_channel", "--scaling: given with --mode normal", "it belongs to --mode layer"),
    ("bench --sweep scaling=block,per_channel", "--sweep scaling: given with --mode normal", "it belongs to --mode layer"),
    ("bench --mode layer --scaling per_row", "--scaling: 'per_row' given", "block, per_channel, group_channel"),
    ("bench --mode layer --sweep scaling=block,channel", "--sweep scaling: 'channel' given", "block, per_channel, group_channel"),
    ("bench --mode layer --scaling per_channel", "--scaling: 'per_channel' given with bf16 experts", "block, or --quantize f32"),
    ("bench --mode layer --quantize f32 --scaling group_channel", "--quantize: 'f32' given with --mode layer --backend cpu", "--backend cuda"),
    ("bench --intermediate-scaling fixed", "--intermediate-scaling: given with --mode normal", "it belongs to --mode layer"),
    ("bench --mode layer --intermediate-scaling block", "--intermediate-scaling: 'block' given", "per_group, fixed, per_row"),
    ("bench --mode layer --intermediate-scaling fixed", "--intermediate-scaling: 'fixed' given with --scaling block", "--scaling per_channel or group_channel"),
    ("bench --capacity 125", "--capacity: given with --mode normal", "it belongs to --mode layer"),
    ("bench --mode layer --exchange low_latency --capacity 50", "--capacity: given with --exchange low_latency", "--exchange normal"),
    ("bench --mode layer --ranks 2 --tokens 128 --hidden 128 --experts 4 --topk 2 --intermediate 16 --capacity 1", "--capacity: 1 given", "overflow split"),
    ("bench --mode layer --capacity 0", "--capacity: '0' given", "from 1 to 6400"),
    ("bench --spare-slots 2", "--spare-slots: given with --mode normal", "it belongs to --mode layer"),
    ("bench --balance", "--balance: given with --mode normal", "it belongs to --mode layer"),
    ("bench --mode layer --balance", "--balance: given without --spare-slots"),
    ("bench --mode layer --spare-slots 1025", "--spare-slots: '1025' given", "from 0 to 1024"),
    ("demo --routing rank_skew:3 --ranks 2", "--routing: 'rank_skew:3' does not fit", "allowed: 0 to 2"),
    ("bench --pin cores --warps 2", "--pin: 'cores' given", "--processes"),
    ("verify ledger --quick --tokens 3", "--tokens: given with --quick", "allowed: one of them"),
    ("trace --in t.json --tokens 3", "--tokens: given with --in"),
    ("trace --form fused", "--form: given without --mode layer"),
    ("trace --mode layer --order per_rank", "--order: 'per_rank' given with --form automatic; allowed: per_route"),
    ("trace --mode layer --alignment 16", "--alignment: given with --mode layer", "it belongs to --mode normal"),
    ("trace --mode layer --sending per_route", "--sending: given with --mode layer", "it belongs to --mode low_latency and flat"),
    ("doctor --hosts 2", "--hosts: given without --measure"),
    ("doctor --measure x.json --json", "--json: given with --measure"),
    # GPU options on the CPU
    ("bench --sms 4", "--sms: given with --backend cpu", "it belongs to --backend cuda"),
    ("verify --sms 4", "--sms: given with --backend cpu"),
    ("trace --mode flat --layout expert_major", "--layout: given with --mode flat", "it belongs to --mode normal"),
    ("trace --sms 4", "--sms: given with --backend cpu"),
    ("verify ledger --late-us 5", "--late-us: given with --backend cpu"),
    ("tune --mode normal", "--mode: 'normal' given with --backend cpu", "Allowed: low_latency"),
    # files to read
    ("plan", "TOPOLOGY is required"),
    ("plan none.json", "TOPOLOGY: 'none.json' given, which cannot be read: No such file or directory", "allowed: a file"),
    ("plan folder", "TOPOLOGY: 'folder' given, which cannot be read: Is a directory", "allowed: a file"),
    ("plan file/x.json", "TOPOLOGY: 'file/x.json' given, which cannot be read: Not a directory", "allowed: a file"),
    ("plan empty.json", "TOPOLOGY: 'empty.json' given, which is empty", "allowed: a file"),
    ("plan binary.json", "TOPOLOGY: 'binary.json' given, which is not JSON: line 1, column 1", "allowed: a file"),
    ("plan zeros.json", "TOPOLOGY: 'zeros.json' given, which is not JSON: line 1, column 1", "allowed: a file"),
    ("plan cut.json", "TOPOLOGY: 'cut.json' given, which is not JSON: line 4, column 1", "expected string literal", "allowed: a file"),
    ("plan text.json", "TOPOLOGY: 'text.json' given, which is not JSON: line 1, column 2", "allowed: a file"),
    ("plan huge_number.json", "TOPOLOGY: 'huge_number.json' given, which is not JSON", "1e999", "allowed: a file"),
    ("plan list.json", "TOPOLOGY: 'list.json' given, which is not a topology: the document is not an object", "allowed: a file"),
    ("plan other.json", "TOPOLOGY: 'other.json' given, which is not a topology: format is null", "switchyard-topology"),
    ("plan negative.json", "TOPOLOGY: 'negative.json' given, which is not a topology: hosts is -1", "allowed: 1 to 2048"),
    ("plan misspelt.json", "TOPOLOGY: 'misspelt.json' given, which is not a topology: host_s is not known", "Did you mean 'hosts'?"),
    ("plot", "FILE is required"),
    ("plot none.json", "FILE: 'none.json' given, which cannot be read: No such file or directory", "allowed: JSON that bench"),
    ("plot comma.json", "FILE: 'comma.json' given, which is not JSON: line 3, column 14", "unexpected ','", "allowed: JSON that bench"),
    ("plot binary.json", "FILE: 'binary.json' given, which is not JSON: line 1, column 1", "allowed: JSON that bench"),
    ("plot other.json", "FILE: 'other.json' given, which has a schema other than switchyard.bench/1"),
    ("plot bench.json", "FILE: 'bench.json' given, which lacks figures of its schema", "'runs'"),
    ("trace --in none.json", "--in: 'none.json' given, which cannot be read: No such file or directory", "allowed: a trace"),
    ("trace --in comma.json", "--in: 'comma.json' given, which is not JSON: line 3, column 14", "allowed: a trace"),
    ("trace --in packed.json", "--in: 'packed.json' given, which is compressed with gzip; decompress it first"),
    ("trace --in other.json", "--in: 'other.json' given, which is not such a trace", "'otherData' not found"),
    ("trace --in list.json", "--in: 'list.json' given, which is not such a trace", "allowed: a trace"),
    ("trace --in world.json", "--in: 'world.json' given, which is not such a trace: otherData.world is 0; allowed: 1 to 64"),
    ("trace --in event.json", "--in: 'event.json' given, which is not such a trace", "'name' not found"),
    ("trace --in warp.json", "--in: 'warp.json' given, which is not such a trace", "block 0 warp x"),
    ("demo --routing none.npy", "--routing: cannot read 'none.npy': No such file or directory"),
    ("demo --routing folder/", "--routing: ", "folder"),
    ("demo --routing routing.npy", "--routing: ", "routing.npy"),
    ("demo --routing routing.safetensors", "--routing: ", "routing.safetensors", "expected"),
    ("verify --routing empty.safetensors", "--routing: ", "empty.safetensors"),
    ("demo --routing recorded:layer=99", "--routing: layer 99 given", "has layers: 3"),
    # files to write
    ("bench --json none/x.json", "--json: cannot write 'none/x.json': No such file or directory"),
    ("bench --json folder", "--json: cannot write 'folder': Is a directory"),
    ("bench --html file/x.html", "--html: cannot write 'file/x.html': Not a directory"),
    ("bench --json x --html x", "--html: 'x' given, to which another flag also writes", "allowed: a different file"),
    ("bench --json=", "--json: no value given"),
    ("demo --out file/report", "--out: cannot make the folder 'file/report'"),
    ("demo --out=", "--out: no value given"),
    ("trace --out none/t.json", "--out: cannot write 'none/t.json': No such file or directory"),
    ("trace --out -", "--out: '-' given", "allowed: a file"),
    ("tune --out folder", "--out: cannot write 'folder': Is a directory"),
    ("tune --out bad.tuning", "--out: bad.tuning, line 1: 'mode = sideways' given: must be 'switchyard-tuning 1'"),
    ("tune --out binary.tuning", "--out: binary.tuning, line 1: ", "must be 'switchyard-tuning 1'"),
    (f"plan {H100} --html none/x.html", "--html: cannot write 'none/x.html': No such file or directory"),
    ("plot bench.json --html bench.json", "--html: 'bench.json' given, which is FILE itself", "allowed: another file"),
    ("doctor --measure none/x.json", "--measure: cannot write 'none/x.json': No such file or directory"),
]
# The same, with mistakes in environment variables.
VARIABLES = [
    ({"SWITCHYARD_TUNING": "none.tuning"}, ("bench", *SMALL), "SWITCHYARD_TUNING", "none.tuning"),
    ({"SWITCHYARD_TUNING": "bad.tuning"}, ("bench", *SMALL), "SWITCHYARD_TUNING", "bad.tuning, line 1", "sideways"),
    ({"SWITCHYARD_TUNING": "binary.tuning"}, ("verify", *SMALL), "SWITCHYARD_TUNING", "binary.tuning, line 1", "must be 'switchyard-tuning 1'"),
]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


#: Options that only one verb has. Before an option is added here, check that no other verb has it by another name.
OWN_OPTIONS = {
    "demo": "--steps", "verify": "--equal-tokens --repeat --verbose", "verify ledger": "--quick --drop-percent --aiv-blocks",
    "bench": "--exchange --balance --capacity --accumulate --scaling --intermediate-scaling --scale-order --compute --cached --contest --sweep --channels --send-chunk --slots --sets --limit-ms --pin --no-verify",
    "trace": "--form --calls --events --cost --in", "tune": "--slack", "plan": "--ranks-per-host --variants", "plot": "",
    "doctor": "--engines --measure --hosts --seconds"}


class Spelling(unittest.TestCase):
    def test_verbs_share_the_names_of_options(self):
        verbs_of = {}
        for verb in OWN_OPTIONS:
            done = subprocess.run([TOOL, *verb.split(), "--help"], capture_output=True, timeout=HANG_S, text=True, check=True)
            for flag in re.findall(r"^  (-\S+)", done.stdout, re.M):
                verbs_of.setdefault(flag, []).append(verb)
        self.assertGreater(len(verbs_of), 50)
        self.assertEqual({flag: verbs[0] for flag, verbs in verbs_of.items() if len(verbs) == 1},
                         {flag: verb for verb, flags in OWN_OPTIONS.items() for flag in flags.split()})
        self.assertEqual([flag for flag in verbs_of if not flag.startswith("--") and flag != "-h,--help"], [])


class Mistakes(unittest.TestCase):
    maxDiff = None

    def check(self, args, texts, env=None):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "folder").mkdir()
            for name, data in FILES.items():
                Path(folder, name).write_bytes(data)
            before = contents(folder)
            done = subprocess.run([TOOL, *args], capture_output=True, timeout=HANG_S, cwd=folder, check=False, stdin=subprocess.DEVNULL,
                                  env={**os.environ, **(env or {})})
            err = done.stderr.decode(errors="backslashreplace")
            self.assertEqual(done.returncode, 2, f"{done.stdout} {err}")
            self.assertEqual(done.stdout, b"")
            lines = err.splitlines()
            self.assertEqual(len(lines), 2, err)
            self.assertTrue(lines[0].startswith("switchyard: " + texts[0]), lines[0])
            for text in texts[1:]:
                self.assertIn(text, lines[0])
            self.assertTrue(lines[0].isprintable(), lines[0])
            self.assertRegex(lines[1], r"^Try: switchyard( \w+)* --help$")
            self.assertEqual(contents(folder), before)

    def test_command_lines(self):
        for command, *texts in MISTAKES:
            with self.subTest(command):
                self.check(command.split(), texts)

    def test_variables(self):
        for env, args, *texts in VARIABLES:
            with self.subTest(f"{env} {args}"):
                self.check(args, texts, env)

    @unittest.skipIf(os.path.exists("/dev/nvidia0"), "there are GPUs")
    def test_without_gpus(self):
        for verb in ("demo", "bench", "trace", "tune", "verify", "verify ledger"):
            with self.subTest(verb):
                self.check([*verb.split(), "--backend", "cuda"], ["--backend: 'cuda' given", "cpu"])

    @unittest.skipIf(os.geteuid() == 0, "root reads and writes everything")
    def test_without_permission(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "x.json")
            path.write_text("{}")
            path.chmod(0)
            for args in (["plan", path], ["plot", path], ["trace", "--in", path], ["bench", "--json", path]):
                with self.subTest(args):
                    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, timeout=HANG_S, text=True, check=False)
                    self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                    self.assertIn("Permission denied", done.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    TOOL = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
