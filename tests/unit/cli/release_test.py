#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The checks of `./dev release`, in a separate repository that contains only the files that they read.

Usage: release_test.py [unittest arguments]
"""
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SECTION = "# Changelog\n\n## [1.2.3] - 2026-11-30\n\n### Added\n- One.\n- Two.\n\n## [1.2.2] - 2026-10-01\n- Old.\n"


class Release(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = Path(self.folder.name)
        (self.root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "release.sh", self.root / "scripts")
        self.git("init", "-q")
        self.write("1.2.3\n", SECTION)

    def git(self, *arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=self.root, check=True, capture_output=True)

    def write(self, version, changelog):
        (self.root / "VERSION").write_text(version)
        (self.root / "CHANGELOG.md").write_text(changelog)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "state")

    def check(self):
        return subprocess.run(["scripts/release.sh", "--check"], cwd=self.root, capture_output=True, text=True, timeout=60, check=False)

    def refused(self, text):
        done = self.check()
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual(done.stderr.count("release: "), 1, done.stderr)
        self.assertIn(text, done.stderr)

    def test_a_tree_that_is_ready(self):
        done = self.check()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("version 1.2.3, 2 changelog entries", done.stderr)
        self.assertFalse((self.root / "dist").exists())

    def test_the_tag_of_this_commit_is_accepted(self):
        self.git("tag", "v1.2.3")
        self.assertEqual(self.check().returncode, 0)

    def test_the_tag_of_another_commit(self):
        self.git("tag", "v1.2.3")
        self.git("commit", "-q", "--allow-empty", "-m", "later")
        self.refused("the tag v1.2.3 names another commit")

    def test_uncommitted_changes(self):
        (self.root / "new").write_text("")
        self.refused("changes that are not committed")

    def test_versions(self):
        self.write("1.2\n", SECTION.replace("1.2.3", "1.2"))
        self.refused("'1.2' is not MAJOR.MINOR.PATCH")

    def test_sections(self):
        for text, error in ((SECTION.replace("[1.2.3]", "[1.2.4]"), "no section '## [1.2.3]"),
                            (SECTION.replace("2026-11-30", "unreleased"), "has no date"),
                            (SECTION.replace("### Added\n- One.\n- Two.\n", ""), "the section of 1.2.3 is empty"),
                            (SECTION.replace("- One.\n", "- One.\n" * 60), "has 61 entries; at most 60")):
            with self.subTest(error):
                self.write("1.2.3\n", text)
                self.refused(error)


if __name__ == "__main__":
    unittest.main()
