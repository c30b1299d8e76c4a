# SPDX-License-Identifier: Apache-2.0
"""Translates library messages to Python.

The library names arguments as its C and C++ callers know them: members of structs, enumerators, and the parts of a view of
rows. :func:`in_python` replaces these by keywords, words and shapes, by rules that hold for every message; what a keyword
accepts is taken from the declarations in arguments.py. A test translates every message of the sources and fails if a word of
C, C++ or the build remains.
"""
from __future__ import annotations

import re
from typing import Dict, FrozenSet, Match

from . import enumerations as _enumerations
from .arguments import FUNCTIONS
from .kinds import RowType, Word

#: Members whose keyword has a different name.
_KEYWORDS = {"num_warps": "workers", "num_blocks": "workers", "timeout_ms": "timeout", "rendezvous_timeout_ms": "rendezvous_timeout",
             "silence_ms": "silence"}
#: Structs where a message names them as a whole: the Python class or method that takes their members as keywords.
_STRUCTS = {
    "NormalConfig": "Exchange", "LowLatencyConfig": "LowLatency", "LedgerConfig": "LedgerCombine", "MoeLayerConfig": "MoeLayer",
    "MoeLayerCall": "MoeLayer", "GroupOptions": "Group", "DispatchOptions": "dispatch",
    "CombineOptions": "combine", "LowLatencyDispatchOptions": "dispatch", "LowLatencyCombineOptions": "combine",
    "AllToAllOptions": "all_to_all", "LedgerCombineOptions": "combine"}
#: Classes with different names in Python.
_CLASSES = {"NormalExchange": "Exchange", "LowLatencyExchange": "LowLatency"}
#: Sentences about builds, other names of functions, and calls that Python makes itself.
_PHRASES = (
    ("build with nvcc and -DSWITCHYARD_BACKENDS=cuda, or use Backend::cpu",
     "install a wheel that has it (`./dev wheel --preset cuda` makes one), or pass backend = 'cpu'"),
    (" (CMake found no nccl_device.h of version 2.30.7 or later)", ""),
    ("It is built where CMake finds MPI; ", "Wheels do not contain it, builds on a machine with MPI do; "),
    ("a RowBuffer or to Dispatched::x", "rows of Exchange.allocate_rows or of the dispatch"),
    ("Handle::deserialize", "Exchange.handle_from_bytes"), ("Handle::serialize", "Handle.to_bytes"),
    ("Trace::serialize", "Trace.to_bytes"), ("the last sy_low_latency_receive", "the last Pending.wait()"),
    ("sy_group_agree", "Group"), ("LedgerTables::", "ledger."), ("ledger->", "ledger."), ("expert_output", "y"),
    ("dispatched->", ""), ("output->", ""))
_STRUCT = r"\w*(?:Config|Options|Settings|Call|Key)"
_RINGS = re.compile(r"\bRingSettings::(num_channels|send_chunk|slots|max_bytes)")
_MEMBER = re.compile(rf"\b(?:{_STRUCT}::|(?:config|options|call|key)(?:->|\.))(\w+)")
_WHOLE = re.compile(rf"\b({'|'.join(sorted(_STRUCTS, key=len, reverse=True))})\b")
_CLASS = re.compile(rf"\b({'|'.join(sorted(_CLASSES, key=len, reverse=True))})\b")
_ENUMERATOR = re.compile(rf"\b(?:{'|'.join(_enumerations.CPP_TYPES)})::(\w+)")
_METHOD = re.compile(r"\b([A-Z]\w+)::(?=\w)")
_NULL = re.compile(r"(?<![/\w])(?:null|NULL)\b")
_COUNT = re.compile(r"\b(\w+(?:\[\d\])?)(?:->|\.)(num_tokens|rows|topk|cols)\b(?: \([\w ]+\))? (?:=|is) (-?\d+)")
_TYPE = re.compile(r"\b(\w+)(?:->|\.)dtype (?:=|is) (\w+)")
_SCALES, _PART = re.compile(r"\b(\w+)(?:->|\.)(?:scale_kind|scales)\b"), re.compile(r"\b(\w+)(?:->|\.)(?:data|dtype)\b")


def _words() -> Dict[str, FrozenSet[str]]:
    """Returns the words that each keyword accepts."""
    found: Dict[str, FrozenSet[str]] = {}
    for declared in FUNCTIONS.values():
        for name, kind in declared.items():
            if isinstance(kind, (Word, RowType)):
                table = kind.table if isinstance(kind, Word) else _enumerations.DTYPES
                found[name] = found.get(name, frozenset()) | frozenset(table)
    return found


_WORDS_OF = _words()
_WORDS = "|".join(sorted(set().union(*_WORDS_OF.values()), key=len, reverse=True))
_VALUE = re.compile(rf"\b({'|'.join(sorted(_WORDS_OF, key=len, reverse=True))}) (=|is) (\w+)\b")
_OTHER = re.compile(rf"( = '\w+' on rank \d+ and )({_WORDS})( on rank)")
#: Values that differ between ranks, of keywords that are bools, or None for no scales.
_CONSTANT = re.compile(r"(?<= )(true|false|'none')(?= on rank \d)")
_CONSTANTS = {"true": "True", "false": "False", "'none'": "None"}
_ALLOWED = re.compile(rf"\b(must (?:be|not be) )((?:{_WORDS})(?:, (?:{_WORDS}))*(?: or (?:{_WORDS}))?)(?![\w'])")
#: Words that occur only as values, except types, which messages also name in sentences.
_BARE = re.compile(rf"(?<![\w'.-])({'|'.join(word for word in _WORDS.split('|') if '_' in word and word not in _enumerations.DTYPES)})(?![\w'(])")


def _value(found: Match[str]) -> str:
    name, sign, word = found.groups()
    return f"{name} {sign} '{word}'" if word in _WORDS_OF[name] else found[0]


def _quoted(words: str) -> str:
    return re.sub(rf"\b({_WORDS})\b", r"'\1'", words)


def _count(found: Match[str]) -> str:
    name, part, number = found.groups()
    what = "row" if part in ("num_tokens", "rows") else "column"
    return f"{name} has {number} {what}{'' if number == '1' else 's'}"


def in_python(text: str) -> str:
    """Returns `text`, a message of the library, in the words of the Python API."""
    for theirs, ours in _PHRASES:
        text = text.replace(theirs, ours)
    text = _RINGS.sub(r"ring_\1", text)
    text = _MEMBER.sub(lambda found: _KEYWORDS.get(found[1], found[1]), text)
    text = _WHOLE.sub(lambda found: _STRUCTS[found[1]], text)
    text = _CLASS.sub(lambda found: _CLASSES[found[1]], text)
    text = _METHOD.sub(r"\1.", _ENUMERATOR.sub(r"'\1'", text))
    text = _NULL.sub("None", text)
    text = _TYPE.sub(r"\1 is \2", text)
    text = _PART.sub(r"\1", _SCALES.sub(r"scales of \1", _COUNT.sub(_count, text)))
    text = _OTHER.sub(r"\1'\2'\3", _VALUE.sub(_value, text))
    text = _CONSTANT.sub(lambda found: _CONSTANTS[found[1]], text)
    text = _ALLOWED.sub(lambda found: found[1] + _quoted(found[2]), text)
    return _BARE.sub(r"'\1'", text)
