# SPDX-License-Identifier: Apache-2.0
"""Reads the public headers with libclang, including the comments that state the declarations' contracts.

A *block* is a documented declaration together with the undocumented declarations directly below it, to which its comment also
applies. Fails if a header does not compile by itself.
"""
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from clang.cindex import AccessSpecifier, CursorKind as Kind, Index, TranslationUnit

SECTION = re.compile(r"^// -{4,}\s*(.*?)(?:\s*-{4,})?$")
TYPES = {Kind.CLASS_DECL, Kind.STRUCT_DECL, Kind.CLASS_TEMPLATE, Kind.UNION_DECL}
FUNCTIONS = {Kind.FUNCTION_DECL, Kind.FUNCTION_TEMPLATE, Kind.CXX_METHOD, Kind.CONSTRUCTOR, Kind.CONVERSION_FUNCTION}
ALIASES = {Kind.TYPEDEF_DECL, Kind.TYPE_ALIAS_DECL, Kind.TYPE_ALIAS_TEMPLATE_DECL}
VALUES = {Kind.VAR_DECL, Kind.FIELD_DECL, Kind.ENUM_CONSTANT_DECL}
KNOWN = TYPES | FUNCTIONS | ALIASES | VALUES | {Kind.ENUM_DECL, Kind.MACRO_DEFINITION, Kind.CONCEPT_DECL}


@dataclass
class Declaration:
    kind: Kind
    name: str
    code: str       # without the body
    comment: str    # "" if it has none
    first: int      # lines
    last: int
    members: list = field(default_factory=list)     # blocks; for types
    enumerators: list = field(default_factory=list)  # declarations; for enumerations

    @property
    def is_function(self):
        return self.kind in FUNCTIONS


@dataclass
class Header:
    path: Path
    about: str      # its \file comment
    blocks: list    # lists of declarations
    sections: dict  # line -> title


def comment_text(lines):
    """The text of /// lines, without the markers but with its indentation."""
    return "\n".join(re.sub(r"^\s*///<? ?", "", line) for line in lines).strip("\n")


def comment_of(lines, first, last):
    """The comment of a declaration on these lines (counted from 1): the lines above it or, if there are none, the comment after
    it and its continuation lines."""
    above = []
    while re.match(r"\s*///(?!<)", lines[first - 2 - len(above)]):
        above.insert(0, lines[first - 2 - len(above)])
    if above:
        return comment_text(above)
    behind = re.search(r"///<.*$", lines[last - 1])
    following = last
    while behind and re.match(r"\s*///<", lines[following]):
        following += 1
    return comment_text([behind.group(), *lines[last:following]]) if behind else ""


def table_comment(cursor):
    """The comment of a declaration on a line of a table (.def)."""
    line = Path(cursor.location.file.name).read_text(encoding="utf-8").split("\n")[cursor.location.line - 1]
    found = re.search(r"/\*(.*)\*/", line)
    return found.group(1).strip() if found else ""


def strip_body(kind, text):
    """A declaration without its definition."""
    if kind in FUNCTIONS:
        depth, closed = 0, None
        for i, c in enumerate(text):
            depth += c == "("
            depth -= c == ")"
            if c == ")" and depth == 0:
                following = text[i + 1:].lstrip()
                if not following.startswith("("):  # operator()(...)
                    closed = i + 1
                    break
        tail = re.match(r"[^{:]*", text[closed:]).group().rstrip() if closed else ""
        return re.sub(r"\s*=\s*(default|delete)$", "", (text[:closed] + tail)) + ";"
    if kind in TYPES:
        return re.split(r"\s*[{]", text)[0] + ";"
    if kind == Kind.ENUM_DECL:
        return re.split(r"\s*[{]", text)[0] + ";"
    return text.rstrip(";") + ("" if kind in (Kind.ENUM_CONSTANT_DECL, Kind.MACRO_DEFINITION) else ";")


class Reader:
    def __init__(self, root):
        self.root = root
        include = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout.strip()
        self.flags = {".hpp": ["-x", "c++-header", "-std=c++20"], ".h": ["-x", "c-header", "-std=c11"]}
        self.common = [f"-I{root / 'include'}", "-isystem", include, "-Wno-pragma-once-outside-header"]
        self.index = Index.create()

    def read(self, path):
        """Reads one header into a Header."""
        unit = self.index.parse(str(path), [*self.flags[path.suffix], *self.common], options=TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD)
        errors = [str(each) for each in unit.diagnostics if each.severity >= each.Error]
        if errors:
            raise RuntimeError(f"{path}: does not compile alone: " + "; ".join(errors))
        self.path, self.data = str(path), path.read_bytes()
        self.lines = self.data.decode().split("\n")
        sections = {i: match.group(1).strip() for i, line in enumerate(self.lines, 1) if (match := SECTION.match(line)) and match.group(1)}
        declarations = sorted(self.declarations(unit.cursor, top=True), key=lambda each: (each.first, each.last))
        return Header(path, self.about(), self.blocks(declarations), sections)

    def about(self):
        start = next(i for i, line in enumerate(self.lines) if line.startswith("/// \\file"))
        rest = self.lines[start + 1:]
        end = next(i for i, line in enumerate(rest) if not line.startswith("///"))
        return comment_text(rest[:end])

    def source(self, cursor):
        return self.data[cursor.extent.start.offset:cursor.extent.end.offset].decode()

    def declarations(self, parent, top=False):
        """The user-facing declarations in one scope of this header."""
        found, structs = [], {}
        for cursor in parent.get_children():
            if not cursor.location.file or cursor.location.file.name != self.path:
                if not top and cursor.kind == Kind.FIELD_DECL:  # from a table (.def), which contains the comments
                    found.append(Declaration(cursor.kind, cursor.spelling, f"{cursor.type.spelling} {cursor.spelling};", table_comment(cursor), 0, 0))
                continue
            if top and cursor.kind in (Kind.NAMESPACE, Kind.LINKAGE_SPEC, Kind.UNEXPOSED_DECL):
                if cursor.spelling != "detail":
                    found += self.declarations(cursor, top=True)
            elif cursor.kind in KNOWN and self.is_shown(cursor):
                declaration = self.declaration(cursor)
                if cursor.kind in TYPES and self.path.endswith(".h"):
                    structs[cursor.spelling] = declaration  # represented by its typedef
                elif cursor.kind == Kind.TYPEDEF_DECL and cursor.spelling in structs:
                    struct = structs.pop(cursor.spelling)
                    found.append(Declaration(Kind.STRUCT_DECL, cursor.spelling, f"typedef struct {cursor.spelling} {cursor.spelling};",
                                             struct.comment or declaration.comment, struct.first, declaration.last, struct.members))
                else:
                    found.append(declaration)
        return found

    def is_shown(self, cursor):
        text, name = self.source(cursor), cursor.spelling
        if cursor.access_specifier in (AccessSpecifier.PRIVATE, AccessSpecifier.PROTECTED) or name in ("Impl", "NamesOf"):
            return False
        if cursor.kind == Kind.MACRO_DEFINITION:
            return self.path.endswith(".h") and re.match(r"SY_\w+\s", text) is not None
        if cursor.kind in TYPES:
            return cursor.is_definition() or self.path.endswith(".h") and bool(self.comment(cursor))
        if re.search(r"=\s*(default|delete)\s*$", text) or name.startswith("operator="):
            return False
        if cursor.kind == Kind.CONSTRUCTOR and re.match(rf"{name}\(\s*(const )?{name}\s*&", text):
            return False  # copies and moves: see the comment of the class
        return not ("library internal" in self.comment(cursor) or "<Impl>" in text or "detail::" in text.split("{")[0])

    def comment(self, cursor):
        return comment_of(self.lines, cursor.extent.start.line, cursor.extent.end.line)

    def declaration(self, cursor):
        text = self.source(cursor)
        code = strip_body(cursor.kind, text)
        if cursor.kind == Kind.MACRO_DEFINITION:
            code = "#define " + re.sub(r"\s*\\\n\s*", " ", text)
        name = re.sub(r"(?<!operator)<.*", "", cursor.spelling)
        declaration = Declaration(cursor.kind, name, code, self.comment(cursor), cursor.extent.start.line, cursor.extent.end.line)
        if cursor.kind in TYPES:
            declaration.members = self.blocks(self.declarations(cursor))
        if cursor.kind == Kind.ENUM_DECL:
            declaration.enumerators = self.enumerators(cursor)
            if "(" in name or not name:  # it has no name
                declaration.name, declaration.code = "", ""
        return declaration

    def enumerators(self, cursor):
        """Enumerators, including those from a table (.def), which have no comment here."""
        found = []
        for each in cursor.get_children():
            if each.kind == Kind.ENUM_CONSTANT_DECL:
                here = each.location.file.name == self.path and each.extent.start.line > cursor.extent.start.line
                found.append(Declaration(each.kind, each.spelling, f"{each.spelling} = {each.enum_value}",
                                         self.comment(each) if here else "", each.extent.start.line, each.extent.end.line))
        return found

    def blocks(self, declarations):
        """Groups declarations into blocks, in the order of the header."""
        blocks = []
        for each in declarations:
            above = blocks[-1][-1] if blocks else None
            follows = above is not None and each.first == above.last + 1 and not each.comment and above.kind not in TYPES
            alike = above is not None and (above.kind in VALUES) == (each.kind in VALUES)
            if follows and alike and each.kind not in TYPES and each.kind != Kind.FIELD_DECL:
                blocks[-1].append(each)
            else:
                blocks.append([each])
        return blocks
