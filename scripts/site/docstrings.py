# SPDX-License-Identifier: Apache-2.0
"""Docstrings as this package writes them, for a reference in Markdown: roles of Sphinx are code, and `#:` documents an attribute."""
import re

import griffe

ROLE = re.compile(r":(?:class|meth|func|exc|attr|data|mod):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

    def on_attribute_instance(self, *, attr, **_):
        """The comment behind an attribute, or above it."""
        if attr.docstring or not attr.lineno or isinstance(attr.filepath, list):
            return
        lines = attr.filepath.read_text(encoding="utf-8").split("\n")
        behind = re.search(r"#: (.*)$", lines[attr.endlineno - 1])
        above = re.match(r"\s*#: (.*)$", lines[attr.lineno - 2])
        found = behind or above
        if found:
            attr.docstring = griffe.Docstring(found.group(1), parent=attr)
