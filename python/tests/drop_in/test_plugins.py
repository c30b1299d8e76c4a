# SPDX-License-Identifier: Apache-2.0
"""Discovery of the drop-in for DeepEP by other programs: entry points of plug-ins, and the distribution that owns the name
``deep_ep``. Each case runs in a separate interpreter with its own site-packages in front of those of this one."""
import importlib.metadata
import subprocess
import sys
import venv
import zipfile

import pytest

from clone import ROOT

torch = pytest.importorskip("torch")

GROUPS = ["vllm.general_plugins", "sglang.srt.plugins"]

#: The loading step that vLLM and SGLang run in each of their processes.
LOAD = """
import sys
from importlib.metadata import entry_points
for group in %r:
    for each in entry_points().select(group=group):
        if each.name == "switchyard_deep_ep":
            each.load()()
""" % (GROUPS,)

OURS = "import deep_ep, deep_ep.utils, switchyard.deep_ep as drop_in; assert deep_ep is drop_in and deep_ep.utils is drop_in.utils\n"
NOBODY = "import importlib.util; assert importlib.util.find_spec('deep_ep') is None\n"


class Environment:
    """An environment whose site-packages precede those of this interpreter."""

    def __init__(self, folder, variables):
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        self.packages = next((folder / "lib").glob("python*")) / "site-packages"
        self.variables = {name: value for name, value in variables.items() if not name.startswith(("SWITCHYARD_DEEP_EP", "PYTHONPATH"))}
        own = importlib.metadata.distribution("switchyard-ep").locate_file("")
        (self.packages / "below.pth").write_text(f"{own}\n")

    def add(self, name, source):
        """Adds a distribution with a package deep_ep, in the form in which pip would install it."""
        (self.packages / "deep_ep").mkdir(exist_ok=True)
        (self.packages / "deep_ep/__init__.py").write_text(source)
        info = self.packages / f"{name.replace('-', '_')}-1.2.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.1\n")
        (info / "RECORD").write_text("deep_ep/__init__.py,,\n")

    def add_wheel(self):
        """Adds the distribution built from this project."""
        wheels = sorted((ROOT / "dist").glob("switchyard_deep_ep-*.whl"))
        if not wheels:
            pytest.skip("./dev wheel --deep-ep has made no wheel")
        zipfile.ZipFile(wheels[-1]).extractall(self.packages)

    def run(self, program, **variables):
        return subprocess.run([self.python, "-c", program], env={**self.variables, **variables}, capture_output=True, text=True,
                              timeout=120)

    def check(self, program, **variables):
        done = self.run(program, **variables)
        assert done.returncode == 0, done.stderr

    def check_error(self, text, program, **variables):
        done = self.run(program, **variables)
        assert done.returncode != 0 and text in done.stderr, done.stderr


@pytest.fixture
def fresh(tmp_path, environment):
    if "site-packages" not in str(importlib.metadata.distribution("switchyard-ep").locate_file("switchyard")):
        pytest.skip("the package is not installed: it has no entry points")
    return Environment(tmp_path / "env", environment)


@pytest.mark.parametrize("group", GROUPS)
def test_entry_points(group):
    if not any(each.name == "switchyard_deep_ep" for each in importlib.metadata.entry_points().select(group=group)):
        pytest.skip("the package is not installed")
    found = [each.value for each in importlib.metadata.entry_points().select(group=group) if each.name == "switchyard_deep_ep"]
    assert found == ["switchyard.plugins:deep_ep"]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_package_that_is_merely_installed_changes_nothing(fresh, value):
    fresh.check("import sys\nbefore = list(sys.meta_path)\n" + LOAD + "assert sys.meta_path == before and 'torch' not in sys.modules\n" +
                NOBODY, **({} if value is None else {"SWITCHYARD_DEEP_EP": value}))


def test_a_variable_asks(fresh):
    fresh.check(LOAD + LOAD + OURS, SWITCHYARD_DEEP_EP="1")


def test_a_misspelt_value(fresh):
    fresh.check_error("SWITCHYARD_DEEP_EP = 'yes': must be '1', 'replace'", LOAD, SWITCHYARD_DEEP_EP="yes")


def test_another_deep_ep(fresh):
    fresh.add("sgl-deep-ep", "theirs = True\n")
    fresh.check(LOAD + "import deep_ep; assert deep_ep.theirs")
    fresh.check_error("another deep_ep is installed", LOAD, SWITCHYARD_DEEP_EP="1")
    fresh.check(LOAD + OURS, SWITCHYARD_DEEP_EP="replace")
    fresh.check_error("another deep_ep has been imported from", "import deep_ep\n" + LOAD, SWITCHYARD_DEEP_EP="replace")


def test_the_distribution_that_owns_the_name(fresh):
    fresh.add_wheel()
    fresh.check(OURS + "from deep_ep.utils import EventHandle; assert EventHandle is deep_ep.EventHandle")
    fresh.check("from deep_ep.utils import EventHandle; from deep_ep import Buffer\n" + OURS + "assert deep_ep.Buffer is Buffer")
    fresh.check(LOAD + OURS, SWITCHYARD_DEEP_EP="1")


@pytest.mark.parametrize("name", ["deep-ep", "sgl-deep-ep"])
def test_it_refuses_beside_another_owner(fresh, name):
    fresh.add(name, "theirs = True\n")
    fresh.add_wheel()  # overwrites the other distribution's file
    fresh.check_error(f"switchyard-deep-ep and {name} both have a package deep_ep", "from deep_ep.utils import EventHandle")
