# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks of this site, for pages generated from the headers and the package, files linked by pages, links and lists."""
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

import links  # noqa: E402
import python_pages  # noqa: E402
import reference  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
_made = {}


def made_pages():
    """The generated pages, which are created once per build."""
    if not _made:
        _made.update({f"reference/{name}": text for name, text in reference.pages(ROOT).items()})
        _made.update({f"reference/python/{name}": text for name, text in python_pages.pages(ROOT).items()})
        _made["design/index.md"] = designs()
    return _made


def title_of(path):
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def designs():
    """The list of design pages. In a clone, the folder itself serves as the list."""
    pages = sorted((ROOT / "docs/design").glob("0*.md"))
    return ("# Decisions\n\nEach page asks one question, says what was decided, and what was looked at and rejected.\n\n"
            + "".join(f"- [{title_of(path)}]({path.name})\n" for path in pages))


def folder_of_navigation(folder):
    if folder == "design/":
        return ["design/index.md"] + sorted(f"design/{path.name}" for path in (ROOT / "docs/design").glob("0*.md"))
    return [page for page in made_pages() if page.startswith(folder)]


def fill(navigation):
    """Replaces the navigation's folders with their pages."""
    if isinstance(navigation, list):
        return [fill(each) for each in navigation]
    if isinstance(navigation, dict):
        return {title: fill(each) for title, each in navigation.items()}
    return folder_of_navigation(navigation) if navigation.endswith("/") else navigation


def on_config(config):
    _made.clear()
    config.nav = fill(config.nav)
    return config


def on_files(files, config):
    def add(place, **content):
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, **content))

    for place, text in made_pages().items():
        add(place, content=text)
    add("assets/site.css", abs_src_path=str(Path(__file__).parent / "site.css"))
    waiting = [f"docs/{file.src_uri}" for file in files if file.is_documentation_page() and file.generated_by is None]
    waiting += [path.relative_to(ROOT).as_posix() for path in (ROOT / "include").rglob("*.h*")] + ["CHANGELOG.md", "CONTRIBUTING.md"]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        place, content = links.site_path(path), None
        if not (ROOT / path).exists():
            continue  # MkDocs reports it
        if path.endswith("/"):
            content = made_pages().get(place) or links.listing(ROOT, path)
        elif place.startswith("source/") and place.endswith(".md") and not path.endswith(".md"):
            content = links.shown(ROOT, path)
        if content is not None:
            add(place, content=content)
        elif not path.startswith("docs/"):
            add(place, abs_src_path=str(ROOT / path))
        if path.endswith((".md", "/")):
            more = links.targets(path, content or (ROOT / path).read_text(encoding="utf-8")) - seen
            seen |= more
            waiting += sorted(more)
    return files


def separate_lists(markdown):
    """Adapts lists to GitHub's rules: a list may directly follow a line of text, and nested lists are indented by two or three
    blanks."""
    parts = links.prose_parts(markdown)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"^((?! *[-*] | *\d+\. |\|| {2}).*\S.*)\n(?=[-*] |\d+\. )", r"\1\n\n", parts[i], flags=re.M)
        parts[i] = re.sub(r"^ {2,3}(?=[-*] |\d+\. )", " " * 4, parts[i], flags=re.M)
    return "".join(parts)


def on_page_markdown(markdown, page, config, files):
    place = page.file.src_uri
    if place.startswith("reference/") or place in made_pages():
        return markdown
    shown = place.startswith("source/") and not place.endswith("index.md") and not (ROOT / links.repository_path(place)).is_file()
    if shown:
        return markdown
    document = links.repository_path(place)
    return links.relink(place, document, links.link_named(document, separate_lists(markdown)))
