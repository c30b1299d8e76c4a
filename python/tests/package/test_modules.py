# SPDX-License-Identifier: Apache-2.0
"""The package's modules import each other without circles, neither at module level nor inside functions. Imports for type checkers
alone do not count."""
from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, Iterator, List, Set

import pytest

import switchyard as sy

ROOT = Path(sy.__file__).parent


def name_of(path: Path, root: Path) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from imports(child)


def graph_of(root: Path) -> Dict[str, Set[str]]:
    paths = {name_of(path, root): path for path in root.rglob("*.py")}
    graph: Dict[str, Set[str]] = {}
    for name, path in paths.items():
        inside = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found = graph.setdefault(name, set())
        for each in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Import):
                found.update(alias.name for alias in each.names)
                continue
            base = ".".join(inside[:len(inside) + 1 - each.level] + ([each.module] if each.module else [])) if each.level else each.module or ""
            for alias in each.names:
                found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in paths else base)
        found &= set(paths) - {name}
    return graph


def circle_in(graph: Dict[str, Set[str]]) -> List[str]:
    """A path that ends where it begins, or an empty list."""
    done: Set[str] = set()

    def search(name: str, path: List[str]) -> List[str]:
        if name in path:
            return path[path.index(name):] + [name]
        if name in done:
            return []
        for each in sorted(graph[name]):
            found = search(each, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for found in (search(name, []) for name in sorted(graph)) if found), [])


def test_modules_import_each_other_without_circles():
    graph = graph_of(ROOT)
    assert "switchyard._abi.ffi" in graph["switchyard.low_latency"]
    assert "switchyard._torch.low_latency_ops" in graph["switchyard.low_latency"]  # inside a function
    assert circle_in(graph) == []


@pytest.mark.parametrize("second", ["from .first import thing", "def f():\n    from . import first", "import made.first"])
def test_circles_are_found(tmp_path, second):
    package = tmp_path / "made"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("class C:\n    def f(self):\n        from .second import g\n")
    (package / "second.py").write_text(second)
    assert circle_in(graph_of(package)) == ["made.first", "made.second", "made.first"]
    (package / "second.py").write_text("if TYPE_CHECKING:\n    from . import first\n")
    assert circle_in(graph_of(package)) == []
