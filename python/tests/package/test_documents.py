# SPDX-License-Identifier: Apache-2.0
"""Documents agree with the product: their programs run and print the documented output, the explained messages exist in the
sources, and the reference covers every public name, header and verb."""
import importlib
import re
import subprocess
import sys

import pytest

import switchyard as sy
from clone import ROOT
from switchyard._abi import ffi as _ffi

PROGRAM = re.compile(r"```python\n(.*?)```", re.S)
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')


def text_of(name):
    if not (ROOT / name).is_file():
        pytest.skip("the tests are not in a clone")
    return (ROOT / name).read_text(encoding="utf-8")


def programs(name):
    """Returns the complete programs of a page: those that start ranks."""
    return [block for block in PROGRAM.findall(text_of(name)) if "run_ranks" in block]


def run(program, folder, environment):
    (folder / "program.py").write_text(program)
    return subprocess.run([sys.executable, folder / "program.py"], check=True, timeout=60, env=environment, capture_output=True, text=True).stdout


def test_versions():
    version = text_of("VERSION").strip()
    minor = version.rpartition(".")[0]
    assert f"{_ffi._MAJOR}.{_ffi._MINOR}" == minor
    required = [re.findall(r"find_package\(switchyard ([0-9.]+)", path.read_text()) for path in
                (ROOT / "examples/CMakeLists.txt", *sorted((ROOT / "tests/abi").glob("consumer*/CMakeLists.txt")))]
    assert len(required) > 4 and all(each == [minor] for each in required)
    assert f"production: version {minor} " in text_of("README.md")
    assert f"This is version {minor}." in text_of("docs/support.md") and f"Switchyard {version} " in text_of("docs/comparison.md")


@pytest.mark.parametrize("name", ["README.md", "docs/python.md", "docs/start/python.md", "python/README.md"])
def test_ten_lines(name, tmp_path, environment):
    program = programs(name)[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    run(program + "\nassert set(np.unique(sy.run_ranks(rank, 4)[3])) == {3.0, 6.0}\n", tmp_path, environment)


@pytest.mark.parametrize("name, says", [("start/python", "['right', 'right', 'right', 'right']"), ("how_to/normal", "[True, True, True, True]"),
                                        ("how_to/low_latency", "[True, True, True, True]"), ("how_to/flat", "[True, True, True, True]"),
                                        ("how_to/ledger", "[True, True, True, True]"),
                                        ("how_to/layer", "[True, True, True, True]")])
def test_programs(name, says, tmp_path, environment):
    if name == "how_to/layer":
        try:
            _ffi.layer_library()
        except sy.LibraryNotFound as error:
            pytest.skip(str(error))
    assert run(programs(f"docs/{name}.md")[-1], tmp_path, environment).strip() == says


def literals():
    """Returns all texts in the sources; adjacent pieces that the compiler joins are one."""
    texts = []
    for folder, endings in [("src", {".cpp", ".hpp", ".cu", ".cuh"}), ("python/switchyard", {".py"})]:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in endings:
                joined = re.finditer(rf"(?:f?{LITERAL.pattern}\s*)+", path.read_text(encoding="utf-8"))
                texts += ["".join(piece[1:-1] for piece in LITERAL.findall(run.group())) for run in joined]
    return "\n".join(texts)


def test_errors_that_are_explained_are_there():
    explained = re.findall(r"^### `(.*)`$", text_of("docs/troubleshooting.md"), re.M)
    assert len(explained) >= 40
    there = literals()
    missing = [text for text in explained for piece in text.split("\u2026") if piece.strip(" ") not in there]
    assert not missing


def test_the_c_program_checks_every_code():
    program = re.search(r"```c\n(.*?)```", text_of("docs/start/c.md"), re.S)[1]
    header = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "include/switchyard/c").glob("*.h"))
    codes = set(re.findall(r"sy_code (sy_\w+)\(", header))
    unchecked = [line for line in program.splitlines() for name in re.findall(r"(sy_\w+)\(", line) if name in codes and "CHECK(" not in line]
    assert len(codes) > 100 and unchecked == []


def test_pip_shows_the_progress_of_a_build():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [page for page in pages if "pip install ." in page.read_text(encoding="utf-8")] == []


def test_figures_of_the_readme_have_files():
    text = text_of("README.md")
    assert len(text.split()) < 700
    measured = [line for line in text.splitlines() if line.startswith("|") and re.search(r"\d (?:µs|ms) \|", line)]
    assert len(measured) > 5 and all("](bench/results/" in line for line in measured)


def test_python_reference_has_every_public_name(monkeypatch):
    text_of("scripts/site/python_pages.py")
    monkeypatch.syspath_prepend(str(ROOT / "scripts/site"))
    python_pages = importlib.import_module("python_pages")
    assert len(sy.__all__) > 40
    assert python_pages.missing(ROOT, sy.__all__) == []
    assert python_pages.missing(ROOT, ["Exchange", "not_documented"]) == ["not_documented"]


def test_reference_page_lists_every_public_header():
    listed = set(re.findall(r"\]\(\.\./(include/[^)]+)\)", text_of("docs/reference.md")))
    # detail/ declares nothing for users; the .def files are lists that other headers include.
    headers = {path.relative_to(ROOT).as_posix() for path in (ROOT / "include").rglob("*") if path.suffix in {".h", ".hpp", ".cuh"}}
    assert listed == {each for each in headers if not each.startswith("include/switchyard/detail/")}
    assert len([path for path in (ROOT / "include/switchyard").iterdir() if path.is_file()]) <= 20


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_lists_of_verbs_are_complete(name):
    verbs = re.findall(r"&k(\w+)Verb", text_of("tools/verbs.cpp"))
    assert len(verbs) >= 8
    listed = re.findall(r"`switchyard ((?:\w+ \| )+\w+)`", text_of(name))
    assert [sorted(each.split(" | ")) for each in listed] == [sorted(verb.lower() for verb in verbs)]


@pytest.mark.parametrize("row, source, pattern", [
    ("GPU driver", "scripts/bundle_start.sh", r"needed_driver=(\d+)"),
    ("glibc", "scripts/bundle_start.sh", r"needed_glibc=([\d.]+)"),
    ("glibc", "scripts/wheel.sh", r"manylinux_(2_\d+)_x86_64"),
    ("CMake", "pyproject.toml", r'cmake.version = ">=([\d.]+)"'),
    ("Python", "pyproject.toml", r'requires-python = ">=([\d.]+)"'),
    ("numpy", "pyproject.toml", r'numpy>=([\d.]+)"'),
    ("torch (optional)", "pyproject.toml", r'torch>=([\d.]+)"'),
])
def test_support_matrix_has_the_versions_of_the_sources(row, source, pattern):
    (line,) = [each for each in text_of("docs/support.md").splitlines() if each.startswith(f"| {row} |")]
    version = re.search(pattern, text_of(source))[1].replace("_", ".")
    assert f"{version} or later" in line
