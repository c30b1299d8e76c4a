# SPDX-License-Identifier: Apache-2.0
"""Pages of the C and C++ reference, generated from the public headers: one page per header, with all declarations and
comments."""
import re
from pathlib import Path

from headers import VALUES, Kind, Reader

LANGUAGES = {"cpp": ("include/switchyard", "*.hpp", "C++"), "c": ("include/switchyard/c", "*.h", "C")}
#: Order in the navigation, followed by the other headers.
ORDER = ["switchyard", "group", "normal", "low_latency", "ledger", "layer", "expert", "gemm", "gemm_gradients", "types", "status"]
WORD = re.compile(r"`([^`]+)`|(?<![\w`/:])((?:sy_|SY_|SWITCHYARD_)\w+|[A-Z][a-z]+(?:[A-Z]\w*)+(?:::\w+)?|[A-Z]\w+::\w+|k[A-Z]\w+)")


def slug(name):
    return re.sub(r"[^\w.]+", "-", name.replace("::", ".")).strip("-")


class Index:
    """Where each name is declared."""

    def __init__(self):
        self.places = {}

    def add(self, language, page, name, anchor):
        self.places.setdefault((language, name), (page, anchor))

    def link(self, language, name, page, shown):
        """`shown` as a link to `name`, or unchanged if there is no such name."""
        bare = re.sub(r"\(.*\)$", "", name)
        place = self.places.get((language, bare))
        if place is None:
            return shown
        return f"[{shown}]({'' if place[0] == page else place[0]}#{place[1]})"


class Writer:
    """Writes one page. `scope` is the class whose members are being written."""

    def __init__(self, language, header, root, index):
        self.language, self.header, self.index = language, header, index
        self.page = header.path.stem + ".md"
        self.root = root
        self.lines, self.used = [], {}

    def anchor(self, name):
        name = slug(name)
        self.used[name] = self.used.get(name, 0) + 1
        return name if self.used[name] == 1 else f"{name}-{self.used[name]}"

    # ---- Prose ----

    def escape(self, text):
        return re.sub(r"([*_>\[\]])", r"\\\1", text).replace("<", "&lt;")

    def words(self, text, scope, own):
        """One paragraph in which names become links; everything else is unchanged. `own`: words that belong to the declaration,
        such as its parameters."""
        out, at = [], 0
        for match in WORD.finditer(text):
            out.append(self.escape(text[at:match.start()]))
            code, plain = match.groups()
            if code is not None:
                member = f"{scope}::{code}"
                name = member if (self.language, re.sub(r"\(.*", "", member)) in self.index.places else code
                out.append(f"`{code}`" if code in own else self.index.link(self.language, name, self.page, f"`{code}`"))
            else:
                out.append(self.index.link(self.language, plain, self.page, self.escape(plain)))
            at = match.end()
        out.append(self.escape(text[at:]))
        return re.sub(r"docs/((?:[\w/]|\\_)+\.md)", lambda m: self.document(m.group(1).replace("\\_", "_")), "".join(out))

    def document(self, name):
        return f"[{self.escape(name)}](../../{name})" if (self.root / "docs" / name).is_file() else self.escape("docs/" + name)

    def prose(self, comment, scope="", own=()):
        """A comment as Markdown: paragraphs, lists, exceptions."""
        text = re.sub(r"\s*\\throws,", "\n\n**Throws,**", comment)
        text = re.sub(r"\s*\\throws\s+", "\n\n**Throws** ", text)
        text = re.sub(r"\s*\\param\s+(\w+)\s+", r"\n\n`\1`: ", text)
        paragraphs, items = [[]], False
        for line in text.split("\n"):
            item = re.match(r"\s*- (.*)", line)
            if not line.strip():
                paragraphs.append([])
                items = False
            elif item:
                paragraphs.append(["-   ", item.group(1)])
                items = True
            elif items and not line.startswith(" "):
                paragraphs.append([line.strip()])
                items = False
            else:
                paragraphs[-1].append(line.strip())
        done = []
        for paragraph in filter(None, paragraphs):
            lead = paragraph.pop(0) if paragraph[0] == "-   " else ""
            bold = re.match(r"(\*\*Throws,?\*\*)(.*)", " ".join(paragraph))
            start, text = bold.groups() if bold else ("", " ".join(paragraph))
            done.append(lead + start + self.words(text, scope, own))
        return "\n\n".join(done)

    # ---- Declarations ----

    def code(self, text):
        lines = text.split("\n")
        indent = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
        self.lines += ["", f"```{'cpp' if self.language == 'cpp' else 'c'}", lines[0], *(line[min(indent, 4):] for line in lines[1:]), "```", ""]

    def heading(self, level, block, scope):
        names = list(dict.fromkeys(each.name for each in block if each.name))
        anchor = self.anchor(f"{scope}::{names[0]}" if scope else names[0])
        for name in names:
            self.index.add(self.language, self.page, f"{scope}::{name}" if scope else name, anchor)
        shown = ", ".join(f"`{name}`" for name in names)
        self.lines += ["", f"{'#' * level} {shown} {{ #{anchor} }}", ""]
        return anchor

    def items(self, blocks, scope, anchor):
        """Data members and enumerators, each with its meaning. Links to them point to `anchor`, the anchor of their type."""
        self.lines.append("")
        for each in (each for block in blocks for each in block):
            self.index.add(self.language, self.page, f"{scope}::{each.name}", anchor)
            if self.language == "c" and each.kind == Kind.ENUM_CONSTANT_DECL:
                self.index.add(self.language, self.page, each.name, anchor)
            code = re.sub(r"\s+", " ", each.code).rstrip(";")
            self.lines += [f"`{code}`", "", ":   " + (self.prose(each.comment, scope).replace("\n\n", "\n\n    ") or "\u00a0"), ""]

    def block(self, block, level, scope=""):
        first = block[0]
        anchor = self.heading(level, block, scope)
        self.code("\n".join(each.code for each in block if each.code))
        if any(each.comment for each in block):
            own = set(re.findall(r"\w+", " ".join(each.code for each in block)))
            self.lines += [self.prose("\n\n".join(each.comment for each in block if each.comment), scope, own), ""]
        for each in block:
            if each.enumerators:
                self.items([each.enumerators], each.name or first.name, anchor)
            if each.members:
                data = [members for members in each.members if members[0].kind in VALUES]
                inner = f"{scope}::{each.name}" if scope else each.name
                if data:
                    self.items(data, inner, anchor)
                for members in each.members:
                    if members[0].kind not in VALUES:
                        self.block(members, level + 1, inner)

    def write(self):
        self.lines, self.used = [], {}
        place = self.header.path.relative_to(self.root / "include")
        self.lines += [f"# {place.name}", ""]
        self.lines += [f"`#include \"{place}\"` · [source](../../source/include/{place}.md)", ""]
        self.lines += [self.prose(self.header.about), ""]
        sections = sorted(self.header.sections.items())
        level = 3 if sections else 2
        for block in self.header.blocks:
            while sections and sections[0][0] < block[0].first:
                self.lines += ["", f"## {sections.pop(0)[1].capitalize()}", ""]
            self.block(block, level)
        return "\n".join(self.lines) + "\n"


#: Patterns for names that a header declares at namespace scope, each at the start of a line.
DECLARED = {
    "c": [r"(?:const )?\w+\** (sy_\w+)\(", r"typedef .*?\b(\w+);", r"\} (\w+);", r"typedef \w+ \(\*(\w+)\)", r"#define (SY_\w+)\s",
          r"  (SY_\w+)(?: = [^,\n]*)?,?(?: *//.*)?$"],
    "cpp": [r"(?:class|struct|enum class) (?:\[\[\w+\]\] )?(\w+)(?: final)?(?: :[^{;]*)? \{", r"using (\w+) =", r"concept (\w+) =",
            r"(?:inline |constexpr |const )*(?:std::)?\w[\w:<>]*(?: const)?[&*]? (\w+)\(", r"inline constexpr [\w:]+ (k\w+)(?:\[\])? ="],
}
#: Names in headers whose declarations are internal to the library.
INTERNAL = {"NamesOf"}


def without_internal_namespaces(text):
    """Returns a header without its `detail` namespaces. Braces in strings and comments must be balanced."""
    while start := re.search(r"^namespace (?:\w+::)?detail \{", text, re.M):
        depth, end = 1, start.end()
        while depth > 0:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: start.start()] + text[end:]
    return text


def declared(language, text):
    """A header's public names, found without a parser so that names skipped by the header reader are detected."""
    text = without_internal_namespaces(text)
    return {name for pattern in DECLARED[language] for name in re.findall("^" + pattern, text, re.M)} - INTERNAL


def check_complete(root, index):
    """Raises an error if a header declares a function, type, constant, macro or enumerator that is missing from the
    reference."""
    for language, (folder, pattern, _) in LANGUAGES.items():
        for path in sorted((root / folder).glob(pattern)):
            missing = sorted(name for name in declared(language, path.read_text(encoding="utf-8")) if (language, name) not in index.places)
            if missing:
                raise RuntimeError(f"{path}: no place in the reference for {', '.join(missing)}")


def order(path):
    return (ORDER.index(path.stem) if path.stem in ORDER else len(ORDER), path.stem)


def pages(root):
    """Maps each page below reference/ to its Markdown, with the pages of each language in order."""
    root = Path(root)
    reader, index, writers = Reader(root), Index(), []
    for language, (folder, pattern, _) in LANGUAGES.items():
        for path in sorted((root / folder).glob(pattern), key=order):
            header = reader.read(path)
            if header.blocks:
                writers.append(Writer(language, header, root, index))
    for writer in writers:
        writer.write()  # after this, every name has its location
    check_complete(root, index)
    return {f"{writer.language}/{writer.page}": writer.write() for writer in writers}
