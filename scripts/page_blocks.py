#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the shell blocks of the pages as a reader would: all blocks of a page in order, in one
shell, at the top of the clone.

A fence in README.md, docs/quickstart.md, docs/start or docs/how_to may have a comment on the line
above it:

  <!-- not run: REASON -->   above a ```sh fence: the block is not run; REASON is its requirement
  <!-- file: PATH -->        above a fence of another language: a file that the page tells the
                             reader to save, relative to the clone

Without arguments, all pages are run. A block with an invalid comment is an error, as is a fence
with commands in a language other than sh. Files that a page leaves at the top of the clone are
removed afterwards, except build/ and dist/. The last line is `N passed, N failed`, counting blocks.
"""
import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/quickstart.md", "docs/start/*.md", "docs/how_to/*.md"]
COMMENT = re.compile(r"<!-- (not run|file): (\S.*?) -->")
COMMANDS = {"sh"}
NOT_COMMANDS = {"python", "c", "cpp", "cmake"}
DEADLINE_S = 1800  # per page
KEPT = {"build", "dist"}


class Block:
    """A fence: its language, text and location, and the content of the comment above it."""

    def __init__(self, page, line, language, lines, comment):
        self.place = f"{page}:{line}"
        self.language = language
        self.text = "".join(lines)
        self.reason = self.file = None
        if comment:
            if comment[1] == "file":
                self.file = comment[2]
            else:
                self.reason = comment[2]

    def fault(self, in_clone):
        if self.language not in COMMANDS | NOT_COMMANDS:
            return f"a fence of {self.language or 'no language'}; allowed: {', '.join(sorted(COMMANDS | NOT_COMMANDS))}"
        if self.language in COMMANDS and self.file:
            return "<!-- file: --> above commands: it is for files that the commands use"
        if self.language not in COMMANDS and self.reason:
            return "<!-- not run: --> above a fence that has no commands"
        if self.file and in_clone(self.file):
            return f"<!-- file: {self.file} -->, which the clone already has"
        return None


def blocks_of(page):
    """The fences in a page. A comment applies only to a fence on the next line."""
    blocks, lines, begun, comment = [], None, None, None
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if lines is not None:
            if line.startswith("```"):
                blocks.append(Block(page, begun[0], begun[1], lines, comment))
                lines = comment = None
            else:
                lines.append(line)
        elif line.startswith("```"):
            lines, begun = [], (number, line[3:].strip())
        else:
            if comment:
                sys.exit(f"{page}:{number - 1}: a comment that is not right above a fence")
            comment = COMMENT.fullmatch(line.strip())
            if not comment and re.match(r"\s*<!--\s*(not.?run|file|run)\b", line, re.I):
                sys.exit(f"{page}:{number}: not one of <!-- not run: REASON --> and <!-- file: PATH -->")
    if lines is not None:
        sys.exit(f"{page}:{begun[0]}: a fence without an end")
    return blocks


def all_pages():
    return [path.relative_to(ROOT).as_posix() for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def tracked_files():
    """Returns the tracked files of the clone and their folders. --check uses them because pages that run meanwhile write files in it."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {path.as_posix() for each in files if each for path in (Path(each), *Path(each).parents)}


def script_of(blocks):
    """One shell script. It writes the location of each block to descriptor 9 when the block begins, and `end` when all blocks
    have succeeded."""
    parts = ["set -e\n"]
    for block in blocks:
        parts.append(f"echo {shlex.quote(block.place)} >&9\n{block.text}test $? = 0\n")  # -e ignores a failed first part of `a && b`
    return "".join(parts) + "echo end >&9\n"


def run_page(page, blocks):
    """Returns the numbers of the page's blocks that passed and failed, as a pair."""
    commands = [b for b in blocks if b.language in COMMANDS and not b.reason]
    if not commands:
        return 0, 0
    before = set(os.listdir(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        script, progress = Path(folder, "page.sh"), Path(folder, "progress")
        script.write_text(script_of(commands), encoding="utf-8")
        try:
            for block in blocks:
                if block.file:
                    (ROOT / block.file).parent.mkdir(parents=True, exist_ok=True)
                    (ROOT / block.file).write_text(block.text, encoding="utf-8")
            ended = f"exit status {run_script(script, progress)}"
        finally:
            for name in set(os.listdir(ROOT)) - before - KEPT:
                path = ROOT / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        reached = progress.read_text(encoding="utf-8").splitlines()
    if reached[-1:] == ["end"]:
        return len(commands), 0
    print(f"FAIL {reached[-1] if reached else page}: {ended}; the page's later blocks were not run", flush=True)
    passed = max(len(reached) - 1, 0)
    return passed, len(commands) - passed


def run_script(script, progress):
    with progress.open("w") as to:
        shell = subprocess.Popen(["bash", "-c", f"exec 9>&{to.fileno()}; . {script}"], cwd=ROOT, pass_fds=[to.fileno()],
                                 stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return shell.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return f"none within {DEADLINE_S} s"
        finally:  # including background processes of the blocks
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run nothing: only look at the comments")
    parser.add_argument("pages", nargs="*", help="paths in the clone (default: all)")
    args = parser.parse_args()
    pages = {page: blocks_of(page) for page in args.pages or all_pages()}
    tracked = tracked_files() if args.check else None

    def in_clone(file):
        return (ROOT / file).exists() if tracked is None else os.path.normpath(file) in tracked

    faults = [f"{block.place}: {fault}" for blocks in pages.values() for block in blocks if (fault := block.fault(in_clone))]
    if faults:
        print("\n".join(faults))
        return 1
    if args.check:
        return 0
    for block in (block for blocks in pages.values() for block in blocks if block.reason):
        print(f"not run: {block.place}: {block.reason}")
    passed = failed = 0
    for page, blocks in pages.items():
        print(f"=== {page}", flush=True)
        counts = run_page(page, blocks)
        passed, failed = passed + counts[0], failed + counts[1]
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
