# SPDX-License-Identifier: Apache-2.0
"""scripts/page_blocks.py in clones with one page each."""
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = """# A page

<!-- file: {file} -->
```python
print("saved")
```

```sh
python3 {quoted}
```

```sh
{last}
```
"""


class PageBlocks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.clone = Path(folder.name)
        for name in ("scripts", "docs/how_to", "docs/used"):
            (self.clone / name).mkdir(parents=True)
        shutil.copy(ROOT / "scripts/page_blocks.py", self.clone / "scripts")
        (self.clone / "README.md").touch()
        for each in ("plain.py", "my file.py", "größe.py", "docs/used/tracked.py"):
            (self.clone / each).touch()
        self.git("init", "-q")
        self.git("add", ".")

    def git(self, *args):
        subprocess.run(["git", *args], cwd=self.clone, check=True, timeout=60, stdin=subprocess.DEVNULL)

    def page(self, file, name="page.md", last="true"):
        (self.clone / "docs/how_to" / name).write_text(PAGE.format(file=file, quoted=f"'{file}'", last=last), encoding="utf-8")

    def run_pages(self, *args):
        done = subprocess.run([sys.executable, self.clone / "scripts/page_blocks.py", *args], cwd=self.clone, capture_output=True, text=True,
                              timeout=60, stdin=subprocess.DEVNULL, check=False)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def test_a_file_that_the_clone_has(self):
        """Tracked files and their folders, however the page writes their names."""
        for file in ("plain.py", "./plain.py", "docs/../plain.py", "my file.py", "größe.py", "docs/used/tracked.py", "docs/used"):
            self.page(file)
            for args in (["--check"], []):
                with self.subTest(file=file, args=args):
                    self.assertEqual(self.run_pages(*args), (1, f"docs/how_to/page.md:4: <!-- file: {file} -->, which the clone already has\n"))

    def test_a_file_of_a_page_that_runs(self):
        """--check ignores it; another run would overwrite it."""
        for file in ("new.py", "new folder/new file.py"):
            self.page(file)
            with self.subTest(file):
                self.assertEqual(self.run_pages("--check"), (0, ""))
                (self.clone / file).parent.mkdir(exist_ok=True)
                (self.clone / file).touch()
                self.assertEqual(self.run_pages("--check"), (0, ""))
                self.assertEqual(self.run_pages()[0], 1)

    def test_pages_that_run(self):
        for name in ("page.md", "my page (2).md"):
            for last, result in (("true", "2 passed, 0 failed\n"),
                                 ("exit 3", f"FAIL docs/how_to/{name}:12: exit status 3; the page's later blocks were not run\n1 passed, 1 failed\n")):
                with self.subTest(name=name, last=last):
                    self.page("new folder/new file.py", name, last)
                    code, text = self.run_pages(f"docs/how_to/{name}")
                    self.assertEqual((code, text), (int(last != "true"), f"=== docs/how_to/{name}\nsaved\n{result}"))
                    self.assertFalse((self.clone / "new folder").exists())


if __name__ == "__main__":
    unittest.main()
