# SPDX-License-Identifier: Apache-2.0
"""Paths of repository files in the site. Pages in docs/ link to sources as in a clone; the targets are added to the site."""
import posixpath
import re
import subprocess

LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?(\))")
#: A document that is named but not linked, outside code.
NAMED = re.compile(r"(?<!\]\()(?<![\[`\w/-])docs/([\w/-]+\.md(?:#[\w-]+)?)(?![\w`])")
FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.M | re.S)
#: Documents in the root that are separate pages.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
#: Extensions of source files shown as pages, and their highlighting languages. Other files (results, traces) are copied.
SHOWN = {".cpp": "cpp", ".hpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".c": "c", ".h": "c", ".def": "c", ".py": "python", ".sh": "bash", ".cmake": "cmake",
         ".txt": "text", ".map": "text", ".toml": "toml"}


def site_path(path):
    """Path in the site of a file or, if `path` ends in /, of a folder; `path` is relative to the repository's root."""
    if path in PAGES:
        return PAGES[path]
    if path.endswith("/"):
        return site_path(path + "index.md")
    if path.startswith("docs/"):
        return path[len("docs/"):]
    return "source/" + path + (".md" if posixpath.splitext(path)[1] in SHOWN else "")


def repository_path(page):
    """The repository file, if any, from which a page of the site was generated."""
    for path, place in PAGES.items():
        if place == page and path != "README.md":
            return path
    return page[len("source/"):] if page.startswith("source/") else "docs/" + page


def target_of(page, link):
    """The target of a document's link, as a path from the repository's root; a folder's path ends in /."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path + "/" if link.endswith("/") else path


def prose_parts(markdown):
    """Splits Markdown into parts that alternate between text and fenced code."""
    return FENCE.split(markdown)


def link_named(document, markdown):
    """Converts document names in prose to links."""
    above = "../" * document.count("/")
    parts = prose_parts(markdown)
    return "".join(part if i % 2 else NAMED.sub(lambda m: f"[{m.group()}]({above}{m.group()})", part) for i, part in enumerate(parts))


def targets(document, markdown):
    return {target_of(document, link) for part in prose_parts(markdown)[::2] for _, link, _, _ in LINK.findall(part)}


def relink(page, document, markdown):
    """Converts the links of `document` for its location at `page`."""

    def replace(match):
        place = site_path(target_of(document, match.group(2)))
        return match.group(1) + posixpath.relpath(place, posixpath.dirname(page) or ".") + (match.group(3) or "") + match.group(4)

    parts = prose_parts(markdown)
    return "".join(part if i % 2 else LINK.sub(replace, part) for i, part in enumerate(parts))


def listing(root, folder):
    """A page for a folder, listing its tracked files."""
    names = subprocess.run(["git", "ls-files", folder], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    here = [name[len(folder):] for name in names if "/" not in name[len(folder):]]
    return f"# {folder}\n\n" + "".join(f"- [{name}]({name})\n" for name in sorted(here))


def shown(root, path):
    """A page that displays a source file."""
    text = (root / path).read_text(encoding="utf-8")
    fence = "`" * 4
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{fence}{SHOWN[posixpath.splitext(path)[1]]}\n{text}{fence}\n"
