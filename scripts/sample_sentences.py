#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws sentences from documents and comments for a blind reading of the English.

usage: sample_sentences.py [--count 100] [--planted 20] [--from OLD_COMMIT] FOLDER

Writes FOLDER/sample.txt (a numbered list of places and sentences, nothing else) and FOLDER/key.json
(the seed, the commit, and the numbers of the planted sentences). Half of the planted sentences come
from documents and half from comments, all of OLD_COMMIT; none of them is in the tree today. The
seed is derived from the commit, so each state of the tree has exactly one sample. Readers receive
only sample.txt and mark each sentence that a native technical editor would rewrite.
"""
import argparse
import json
import random
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^(include|src|tools|python/switchyard|oracle|bench|examples|tests|scripts)/.*\.(h|hpp|cpp|cu|cuh|c|py|def)$")
DOCS = re.compile(r"^(docs/.*|README|CONTRIBUTING)\.md$")
MIN_WORDS = 5


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def split(text):
    """Sentences of running text."""
    text = re.sub(r"\s+", " ", text).strip()
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(*\[])", text)
    return [part for part in parts if len(part.split()) >= MIN_WORDS and re.search(r"[.:]\W*$", part)]


def of_document(text):
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for block in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", text):
        if not re.match(r"\s*(#|\||<|!\[)", block):
            block = re.sub(r"^\s*([-*>]|\d+\.)\s+", "", block.strip())
            yield from split(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block))


def of_source(name, text):
    if name.endswith(".py"):
        blocks = re.findall(r'"""(.*?)"""', text, re.S)
        mark = "#"
    else:
        blocks, mark = [], "//[/!]?<?"
    run = []
    for line in [*text.splitlines(), ""]:
        found = re.match(rf"\s*{mark} ?(.*)$", line)
        if found and "SPDX" not in line and not re.match(r"[-=]{3}|#|\\file", found[1]):
            run.append(found[1])
        elif run:
            blocks.append("\n".join(run))
            run = []
    for block in blocks:
        for part in re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*[\w`.*]+: )", block):  # list items and entries such as `name: text`
            if "|" not in part:
                yield from split(part)


def sentences(commit):
    """Two sorted lists of (place, sentence) pairs: one from documents, one from comments."""
    docs, comments = set(), set()
    for name in git("ls-tree", "-r", "--name-only", commit).split():
        if DOCS.match(name) or CODE.match(name):
            text = git("show", f"{commit}:{name}")
            if DOCS.match(name):
                docs.update((name, each) for each in of_document(text))
            else:
                comments.update((name, each) for each in of_source(name, text))
    return sorted(docs), sorted(comments)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="of documents, and as many of comments")
    parser.add_argument("--planted", type=int, default=20)
    parser.add_argument("--from", dest="old", default="4bfa21ff")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    commit = git("rev-parse", "HEAD").strip()
    rng = random.Random(commit)
    now, old = sentences(commit), sentences(args.old)
    drawn = [(place, text, False) for kind in now for place, text in rng.sample(kind, args.count)]
    for kind, before in zip(now, old):
        today = {text for _, text in kind}
        gone = [each for each in before if each[1] not in today]
        drawn += [(place, text, True) for place, text in rng.sample(gone, args.planted // 2)]
    rng.shuffle(drawn)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "sample.txt").write_text("".join(f"{n}. [{place}] {text}\n" for n, (place, text, _) in enumerate(drawn, 1)), encoding="utf-8")
    planted = [n for n, (_, _, is_planted) in enumerate(drawn, 1) if is_planted]
    key = {"commit": commit, "old": args.old, "seed": commit, "sentences": len(drawn), "planted": planted}
    (args.folder / "key.json").write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")
    print(f"{len(drawn)} sentences of {commit[:8]}, {len(planted)} of them planted from {args.old}, in {args.folder}")


if __name__ == "__main__":
    main()
