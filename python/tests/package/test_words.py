# SPDX-License-Identifier: Apache-2.0
"""Messages of the library in the words of Python: every message of the sources, and some whole ones."""
import re
from pathlib import Path

import pytest

from switchyard._abi.words import in_python

ROOT = Path(__file__).resolve().parents[3]
LITERAL = r'"(?:[^"\\\n]|\\.)*"'
#: What no Python user has written or can act upon.
FOREIGN = re.compile(r"\w::|->|\b(?:sy|SY|std)_|\bstd\b|CMake|nvcc|\s-D[A-Z]|\b\w+(?:Config|Options|Settings|Call)\b|(?<!/)\b(?:null|NULL|nullptr)\b|"
                     r"\bRowBuffer\b|\bDispatched\b|\bNormalExchange\b|\bLowLatencyExchange\b|\w\.(?:num_tokens|rows|cols|data|dtype|scale_kind)\b")
#: Literals that are no part of a message that Python can receive: other formats, messages of the compiler, and names of NCCL.
ELSEWHERE = re.compile(r"^/|^0::|shared::c|SY_\.\.\.|struct_size|^->$|^nccl\w+$|^sy_\w+$|^src/")


def literals():
    """Yields the string literals of the libraries that Python loads, adjacent ones joined."""
    for path in sorted((ROOT / "src").rglob("*.[ch]*")):
        if path.relative_to(ROOT).parts[1] == "routing":  # libswitchyard_workload
            continue
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^\s*#include.*|static_assert\((?:[^;\"]|" + LITERAL + r")*;", "", text, flags=re.M)
        text = re.sub(r"'\\?.'", "", text)  # characters, among them quotes
        text = re.sub(r"^\s*//.*|\s//[^\"\n]*$", "", text, flags=re.M)
        for found in re.finditer(rf"{LITERAL}(?:\s*{LITERAL})*", text):
            literal = "".join(each[1:-1] for each in re.findall(LITERAL, found[0]))
            if not ELSEWHERE.search(literal):
                yield path.relative_to(ROOT), literal


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="needs the sources of the library")
def test_no_message_has_words_of_other_languages():
    seen, left = 0, []
    for path, literal in literals():
        # A name alone is followed by a value, or by the member of the struct that it names.
        name = re.fullmatch(r"[\w\[\]>.:-]+(?: \([\w -]+\))?", literal)
        text = f"{literal}{'hidden' if literal.endswith('::') else ''} = 3: must be 4" if name else re.sub(" (=|is) $", r" \1 3", literal)
        seen += bool(FOREIGN.search(text))
        if FOREIGN.search(in_python(text)):
            left.append(f"{path}: {text!r} becomes {in_python(text)!r}")
    assert seen > 150
    assert left == []


@pytest.mark.parametrize("theirs, ours", [
    ("topk_ids.num_tokens = 21: must be in [0, 16] (max_tokens)", "topk_ids has 21 rows: must be in [0, 16] (max_tokens)"),
    ("NormalConfig::dtype = bf16 on rank 0 and f32 on rank 1", "dtype = 'bf16' on rank 0 and 'f32' on rank 1"),
    ("x.rows = 1: must equal the number of tokens, 3", "x has 1 row: must equal the number of tokens, 3"),
    ("DispatchOptions::out->cols = 64: must equal NormalConfig::hidden, 128", "out has 64 columns: must equal hidden, 128"),
    ("DispatchOptions::out->dtype = f32: must be bf16", "out is f32: must be 'bf16'"),
    ("DispatchOptions::out->scales is null: the rows have scales", "scales of out is None: the rows have scales"),
    ("NormalExchange, rank 0: NormalConfig::hidden = 3: a row has 6 bytes in bf16", "Exchange, rank 0: hidden = 3: a row has 6 bytes in bf16"),
    ("RingSettings::num_channels * world = 3: must be 4", "ring_num_channels * world = 3: must be 4"),
    ("GroupOptions::num_blocks = 0: must be in [1, 4]", "workers = 0: must be in [1, 4]"),
    ("are neither (invalid_ids = count drops and counts them)", "are neither (invalid_ids = 'count' drops and counts them)"),
    ("LedgerConfig::dtype = fp8_e4m3: must be bf16, f16 or f32", "dtype = 'fp8_e4m3': must be 'bf16', 'f16' or 'f32'"),
    ("CombineOptions::order = per_route: rank-major rows are one per (token, rank) already; use per_rank",
     "order = 'per_route': rank-major rows are one per (token, rank) already; use 'per_rank'"),
    ("NormalConfig::staging = ring: use Staging::direct", "staging = 'ring': use 'direct'"),
    ("weight_scales is given: must be null but for fp8_e4m3", "weight_scales is given: must be None but for fp8_e4m3"),
    ("options->timeout_ms = 0: must be in [1, 5]", "timeout = 0: must be in [1, 5]"),
    ("LedgerTables::dispatch_offset has 3 entries", "ledger.dispatch_offset has 3 entries"),
    ("Trace::merge: the bytes end early: 8 wanted, 4 left", "Trace.merge: the bytes end early: 8 wanted, 4 left"),
    ("capacity = 3 rows: rank 0 needs 4", "capacity = 3 rows: rank 0 needs 4"),
    ("cannot read /dev/null", "cannot read /dev/null"),
])
def test_messages(theirs, ours):
    assert in_python(theirs) == ours
