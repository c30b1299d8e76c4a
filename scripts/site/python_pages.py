# SPDX-License-Identifier: Apache-2.0
"""Pages of the Python reference. This module imports only the standard library, so that tests can check the list."""
import ast
from pathlib import Path

#: Module below `switchyard` ("" is the package itself) and title, in navigation order.
PAGES = [("group", "Groups"), ("run", "Ranks as threads"), ("exchange", "Normal mode"), ("handle", "Handles"), ("routing", "Routing layout"),
         ("low_latency", "Low latency"), ("ledger", "Ledger combine"), ("layer", "A whole layer"), ("gemm", "Grouped GEMM"), ("expert_map", "Replicated experts"),
         ("route_counter", "Counts of routes"), ("step_rates", "Rates of moves"), ("checkpointing", "Activation checkpointing"),
         ("parallelize", "Models of transformers"), ("row_memory", "Tensors in symmetric memory"), ("graph_memory", "Memory of CUDA graphs"),
         ("trace", "Traces"), ("tuning", "Tuned values"), ("errors", "Errors"), ("", "The package and its library"), ("deep_ep", "The drop-in for DeepEP")]


def exported(path):
    """The names in a module's `__all__`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [each.value for each in node.value.elts if isinstance(each, ast.Constant)]
    return []


def defined(path):
    """The functions and classes defined in the module itself."""
    return [node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def shown(root, module):
    """The names documented on the page of `module`. The package's page documents only names defined in the package itself."""
    package = Path(root) / "python/switchyard"
    if not module:
        top = package / "__init__.py"
        return [name for name in defined(top) if name in exported(top)]
    path = package / f"{module}.py"
    return exported(path if path.is_file() else package / module / "__init__.py")


def pages(root):
    """Maps each page below reference/python/ to its Markdown."""
    made = {}
    for module, title in PAGES:
        text = f"# {title}\n\n::: switchyard{'.' if module else ''}{module}\n"
        if not module:
            names = ", ".join(shown(root, module))
            text += f"    options:\n      members: [{names}]\n"
        made[f"{module or 'package'}.md"] = text
    return made


def missing(root, public):
    """The names in `public` that no page documents."""
    documented = {name for module, _ in PAGES for name in shown(root, module)}
    return sorted(set(public) - documented)
