# SPDX-License-Identifier: Apache-2.0
"""``python -m switchyard.engines`` in environments with fabricated metadata, and the entry points of the wheel."""
import importlib
import re
import subprocess
import sys

import pytest

import switchyard as sy
from clone import ROOT
from switchyard import plugins
from switchyard.engines import _found, sglang, vllm

NAMES = ["vllm", "sglang", "torchtitan", "megatron-core", "nemo-automodel", "transformers"]
NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23", "torchtitan": "0.3.0", "megatron-core": "0.19.2", "nemo-automodel": "0.7.0",
          "transformers": "5.24.0"}
PLUG_INS = "[vllm.general_plugins]\nswitchyard = a:b\nswitchyard_deep_ep = a:c\n[sglang.srt.plugins]\nswitchyard = a:d\nswitchyard_deep_ep = a:c\n"
PACKAGES = {"vllm", "sglang", "torchtitan", "megatron", "nemo_automodel", "transformers", "torch"}


class Listing:
    """The list in an interpreter that sees only the distributions of a folder, by engine."""

    def __init__(self, environment, folder):
        kept = {name: value for name, value in environment.items()
                if not name.startswith(("SWITCHYARD_VLLM", "SWITCHYARD_SGLANG", "SWITCHYARD_DEEP_EP", "VLLM_", "SGLANG_"))}
        self.environment, self.folder = kept, folder

    def add(self, name, version, **files):
        """Adds a distribution's metadata."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for each, text in files.items():
            (info / {"entry_points": "entry_points.txt", "record": "RECORD"}[each]).write_text(text)
        return self

    def __call__(self, *arguments, status=0, **variables):
        program = (f"import importlib.metadata as m, sys; own = m.MetadataPathFinder; given = own.find_distributions\n"
                   f"import switchyard.engines.__main__ as main\n"
                   f"own.find_distributions = classmethod(lambda _, c=m.DistributionFinder.Context(): "
                   f"given(m.DistributionFinder.Context(**{{**vars(c), 'path': [{str(self.folder)!r}]}})))\n"
                   f"status = main.main({list(arguments)!r})\n"
                   f"assert not {PACKAGES!r} & {{name.split('.')[0] for name in sys.modules}}\n"
                   f"sys.exit(status)")
        done = subprocess.run([sys.executable, "-c", program], env={**self.environment, **variables}, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        self.text = done.stdout
        return {re.match(r"[\w-]+", each)[0]: each for each in re.split(r"\n(?=\w)", done.stdout)}

    def now(self, name, **options):
        return re.findall(r"^  now: (.*)$", self(**options)[name], re.M)


@pytest.fixture
def listing(environment, tmp_path):
    return Listing(environment, tmp_path)


@pytest.fixture
def complete(listing):
    """All engines in the tested versions, and the wheel."""
    for name, version in NEWEST.items():
        listing.add(name, version)
    return listing.add("switchyard-ep", "9.9", entry_points=PLUG_INS)


def test_nothing_is_installed(listing):
    found = listing()
    assert list(found) == NAMES
    for name in NAMES:
        assert found[name].startswith(f"{name}: not installed\n") and "now:" not in found[name]


def test_supported_versions(complete):
    found = complete()
    for name in NAMES:
        assert found[name].startswith(f"{name} {NEWEST[name]}, supported\n") and found[name].count("now:") == 1
    assert "  SWITCHYARD_VLLM=all2all: Switchyard replaces the all-to-all backend\n" in found["vllm"]
    assert "  SWITCHYARD_SGLANG=layer: Switchyard replaces the whole MoE layer\n" in found["sglang"]
    assert "  now: nothing: neither SWITCHYARD_VLLM nor SWITCHYARD_DEEP_EP is set" in found["vllm"]
    assert "  --override.imports switchyard.engines.torchtitan.token_dispatcher: " in found["torchtitan"]


@pytest.mark.parametrize("name, version, text", [
    ("vllm", "0.34.1", "refused: 0.33 was tested"), ("vllm", "0.3.3", "refused: 0.33 was tested"), ("vllm", "0.33.1+cu130", "supported"),
    ("sglang", "0.5.22", "refused: 0.5.23 was tested"), ("torchtitan", "0.4.0", "refused: 0.3 was tested"),
    ("megatron-core", "0.20.0", "not tested: 0.19 was tested"), ("nemo-automodel", "0.8", "not tested: 0.7 was tested"),
    ("transformers", "6.0", "not tested: 5.24 was tested")])
def test_other_versions(listing, name, version, text):
    found = listing.add(name, version)()
    assert found[name].startswith(f"{name} {version}, {text}\n")


@pytest.mark.parametrize("name, variable", [("vllm", "SWITCHYARD_VLLM"), ("sglang", "SWITCHYARD_SGLANG")])
def test_values_of_variables(complete, name, variable):
    for choice in ("all2all", "layer"):
        assert complete.now(name, **{variable: choice}) == [f"{variable}={choice} is active"]
    for off in ("", "0"):
        assert complete.now(name, **{variable: off})[0].startswith("nothing: neither")
    assert complete.now(name, SWITCHYARD_DEEP_EP="1") == ["SWITCHYARD_DEEP_EP=1 is active"]
    both = complete.now(name, SWITCHYARD_DEEP_EP="replace", **{variable: "layer"})
    assert both == [f"{variable}=layer is active", "SWITCHYARD_DEEP_EP=replace is active"]


def test_misspelt_values(complete):
    assert complete.now("vllm", status=1, SWITCHYARD_VLLM="all-to-all") == \
        ["refused: SWITCHYARD_VLLM = 'all-to-all': must be 'all2all', 'layer' or '0'"]
    assert complete.now("sglang", status=1, SWITCHYARD_SGLANG="1") == ["refused: SWITCHYARD_SGLANG = '1': must be 'all2all', 'layer' or '0'"]
    for name in ("vllm", "sglang"):
        assert complete.now(name, status=1, SWITCHYARD_DEEP_EP="yes") == ["refused: SWITCHYARD_DEEP_EP = 'yes': must be '1', 'replace' or '0'"]


def test_misspelt_values_without_the_engine(listing):
    assert listing.now("vllm", status=1, SWITCHYARD_VLLM="layr") == ["refused: SWITCHYARD_VLLM = 'layr': must be 'all2all', 'layer' or '0'"]
    listing.add("switchyard-ep", "9.9", entry_points=PLUG_INS)
    assert listing.now("vllm", SWITCHYARD_VLLM="layer") == []


def test_refused_version(listing):
    listing.add("vllm", "0.35.0").add("switchyard-ep", "9.9", entry_points=PLUG_INS)
    line = listing.now("vllm", status=1, SWITCHYARD_VLLM="layer")[0]
    assert line.startswith("refused: vllm 0.35.0: this plug-in was tested with vllm 0.33 ") and "SWITCHYARD_DEEP_EP=1" in line
    assert listing.now("vllm", SWITCHYARD_DEEP_EP="1") == ["SWITCHYARD_DEEP_EP=1 is active"]


def test_plug_ins_that_the_engine_does_not_load(listing, complete):
    layer = {"SWITCHYARD_VLLM": "layer", "SWITCHYARD_SGLANG": "layer"}
    for name, allowed in (("vllm", "VLLM_PLUGINS"), ("sglang", "SGLANG_PLUGINS")):
        variable = f"SWITCHYARD_{name.upper()}"
        assert complete.now(name, **layer, **{allowed: "other,switchyard"}) == [f"{variable}=layer is active"]
        assert complete.now(name, **layer, **{allowed: "other,switchyard_deep_ep"}) == \
            [f"{variable}=layer is not active: {allowed} = 'other,switchyard_deep_ep' excludes it: add switchyard"]
    assert "excludes it" in complete.now("vllm", **layer, VLLM_PLUGINS="other, switchyard")[0]  # vLLM keeps spaces, SGLang does not
    assert complete.now("sglang", **layer, SGLANG_PLUGINS="other, switchyard") == ["SWITCHYARD_SGLANG=layer is active"]
    assert "excludes it" in complete.now("vllm", **layer, VLLM_PLUGINS="")[0]  # vLLM loads none then, SGLang all
    assert complete.now("sglang", **layer, SGLANG_PLUGINS="") == ["SWITCHYARD_SGLANG=layer is active"]


@pytest.mark.parametrize("entry_points, text", [
    (None, "the distribution switchyard-ep is not installed, so vllm finds no plug-in"),
    (PLUG_INS.replace("switchyard =", "other ="),
     "switchyard-ep 0.1 has no entry point switchyard in vllm.general_plugins: install a newer version")])
def test_without_entry_points(listing, entry_points, text):
    listing.add("vllm", "0.33.0")
    if entry_points is not None:
        listing.add("switchyard-ep", "0.1", entry_points=entry_points)
    assert listing.now("vllm", SWITCHYARD_VLLM="layer") == [f"SWITCHYARD_VLLM=layer is not active: {text}"]


def test_owners_of_deep_ep(complete):
    for name in ("megatron-core", "nemo-automodel"):
        assert complete.now(name) == ["nothing, unless the program calls switchyard.deep_ep.install()"]
        assert complete.now(name, SWITCHYARD_DEEP_EP="1")[0].endswith("SWITCHYARD_DEEP_EP has no effect, because this engine loads no plug-ins")
    complete.add("switchyard-deep-ep", "9.9", record="deep_ep/__init__.py,,\n")
    assert complete.now("megatron-core") == ["the drop-in is active"]
    complete.add("deep-ep", "1.2.1", record="deep_ep/__init__.py,,\n")
    assert "the deep_ep of deep-ep or switchyard-deep-ep is installed" in complete.now("nemo-automodel")[0]
    assert complete.now("vllm", SWITCHYARD_DEEP_EP="1") == \
        ["SWITCHYARD_DEEP_EP=1 is not active: the deep_ep of deep-ep is installed; use SWITCHYARD_DEEP_EP=replace"]
    assert complete.now("vllm", SWITCHYARD_DEEP_EP="replace") == ["SWITCHYARD_DEEP_EP=replace is active"]


def test_command_line(environment):
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "switchyard.engines", *arguments], env=environment, capture_output=True, text=True)

    shown = run("--help")
    assert shown.returncode == 0 and "usage: python -m switchyard.engines" in shown.stdout and "imports no engine" in shown.stdout
    for wrong in (["--jsn"], ["vllm"], ["--hel"]):
        done = run(*wrong)
        assert (done.returncode, done.stdout) == (2, "") and f"unrecognized arguments: {wrong[0]}" in done.stderr
    assert run().stdout.startswith("vllm")


def test_versions_are_those_of_the_plug_ins():
    tested = {each.name: each.tested for each in _found.ENGINES}
    assert tested["vllm"] == tuple(vllm.SUPPORTED) and tested["sglang"] == (sglang._VERSION,)
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+) ", (ROOT / "python/tests/clients/versions.txt").read_text(), re.M))
    for name, version in pinned.items():
        assert _found._matches(version, tested[name]), name
    assert set(pinned) == set(NAMES) - {"transformers"}


# ---- Entry points ----


def _entry_points():
    """(group, name, module, function) of pyproject.toml."""
    text, found = (ROOT / "pyproject.toml").read_text(), []
    for group, body in re.findall(r'^\[project\.entry-points\."([^"]+)"\]\n((?:\w.*\n)+)', text, re.M):
        found += [(group, *each) for each in re.findall(r'^(\w+) = "([\w.]+):(\w+)"$', body, re.M)]
    return found


def test_entry_points_exist():
    found = _entry_points()
    assert {(group, name) for group, name, _, _ in found} == \
        {(each.group, name) for each in _found.ENGINES if each.group for name in ("switchyard", "switchyard_deep_ep")}
    for _, _, module, function in found:
        assert callable(getattr(importlib.import_module(module), function)) and function in plugins.__all__


@pytest.mark.parametrize("function, variable", [("vllm", "SWITCHYARD_VLLM"), ("sglang", "SWITCHYARD_SGLANG"), ("deep_ep", "SWITCHYARD_DEEP_EP")])
def test_entry_points_without_variables(monkeypatch, function, variable):
    for off in (None, "", "0"):
        monkeypatch.delenv(variable, raising=False) if off is None else monkeypatch.setenv(variable, off)
        before = set(sys.modules)
        assert getattr(plugins, function)() is None
        assert not {name.split(".")[0] for name in set(sys.modules) - before} & PACKAGES
    monkeypatch.setenv(variable, "al2all")
    with pytest.raises(sy.InvalidArgument, match=f"{variable} = 'al2all': must be "):
        getattr(plugins, function)()
