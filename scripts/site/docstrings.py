# SPDX-License-Identifier: Apache-2.0
"""Converts the docstrings of this package for a Markdown reference. Sphinx roles become code, sentences that explain an
argument (`name: ...`) become a list, `#:` documents an attribute, and `**config` is replaced with the keywords that it
represents."""
import re

import griffe

ROLE = re.compile(r":(?:class|meth|func|exc|attr|data|mod):`~?([^`]+)`")
#: Start of a sentence about an argument, at the start of a paragraph or after a full stop.
ARGUMENT = re.compile(r"(?:^|(?<=[.;] ))([a-z]\w*(?:, [a-z]\w*)*): (?=\S)")

#: Functions in the module that accept the collected keywords, by the name of the collecting parameter.
MAKERS = {"config": ("normal_config", "_config"), "options": ("_options",)}


def listed(paragraph):
    """A paragraph whose sentences about arguments are turned into list items."""
    if re.match(r"\s|[-*|>`]", paragraph):
        return paragraph
    text = " ".join(paragraph.split("\n"))
    starts = [match.start() for match in ARGUMENT.finditer(text)]
    if not starts:
        return paragraph
    parts = [text[a:b].strip() for a, b in zip(starts, starts[1:] + [len(text)])]
    items = [ARGUMENT.sub(lambda m: ", ".join(f"**{name}**" for name in m.group(1).split(", ")) + ": ", part, count=1) for part in parts]
    return "\n\n".join(filter(None, [text[:starts[0]].strip(), "\n".join("- " + item for item in items)]))


def unfold(function):
    """Replaces `**config` or `**options` with the keywords of the function to which they are passed."""
    kept = [each for each in function.parameters if each.kind != griffe.ParameterKind.var_keyword]
    if len(kept) == len(function.parameters):
        return
    makers = MAKERS.get(function.parameters[-1].name, ())
    maker = next((function.module.members[name] for name in makers if name in function.module.members), None)
    if maker is not None:
        names = {each.name for each in kept}
        function.parameters = griffe.Parameters(*kept, *(each for each in maker.parameters if each.name not in names))


class Docstrings(griffe.Extension):
    def on_function(self, *, func, **_):
        unfold(func)

    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = "\n\n".join(listed(paragraph) for paragraph in text.split("\n\n"))
        elif obj.name.startswith("__"):
            obj.public = False  # __enter__ and similar methods need no documentation

    def on_attribute_instance(self, *, attr, **_):
        """The comment after an attribute or above it."""
        if attr.docstring or not attr.lineno or isinstance(attr.filepath, list):
            return
        lines = attr.filepath.read_text(encoding="utf-8").split("\n")
        behind = re.search(r"#: (.*)$", lines[attr.endlineno - 1])
        above = re.match(r"\s*#: (.*)$", lines[attr.lineno - 2])
        found = behind or above
        if found:
            attr.docstring = griffe.Docstring(found.group(1), parent=attr)
