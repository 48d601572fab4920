"""MkDocs' view of the repository: pages and sources that lie outside of ``docs/`` are on the site as well.

GitHub shows the repository as it is, so a page links to ``../fleet/api.py`` or ``../README.md``. On the site Markdown
files keep their place beside the pages of ``docs/``, and any other file that is linked becomes a page that shows it.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = "docs/"
SOURCES = "source/"

#: Where Markdown has a link: the target of ``[text](target)`` and of ``![text](target)``.
LINK = re.compile(r"(?<=\]\()(?P<path>[^\s()#:]+)(?P<anchor>#[^\s()]*)?(?=\))")
#: Where a page wants to show what a command says.
OUTPUT = re.compile(r"<!-- output of: (?P<command>fleet.*) -->")
#: What a page would load from elsewhere.
FOREIGN = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')

#: From a page of the site to its file in the repository, for pages of text.
_origins: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add whatever is linked, and what that links to."""
    _origins.clear()
    waiting = [DOCS + file.src_uri for file in files.documentation_pages()] + ["README.md"]
    while waiting:
        origin = waiting.pop()
        is_page, place = origin.endswith(".md"), _place(origin)
        if place in _origins or (origin.startswith(DOCS) and not is_page):  # a figure is there already
            continue
        _origins[place] = origin
        text = (ROOT / origin).read_text()
        if not origin.startswith(DOCS):
            content = text if is_page else _listing(origin, text)
            shown = InclusionLevel.INCLUDED if is_page else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place, content=content, inclusion=shown))
        if is_page:
            targets = (_resolve(origin, link["path"]) for link in LINK.finditer(text))
            waiting += [target for target in targets if target is not None]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links between files of the repository become links between pages of the site."""
    origin = _origins.get(page.file.src_uri, "")
    if not origin.endswith(".md"):
        return markdown

    def turned(link: re.Match[str]) -> str:
        target = _resolve(origin, link["path"])
        if target is None:
            return link[0]  # a mistake, which MkDocs tells
        return posixpath.relpath(_place(target), posixpath.dirname(page.file.src_uri)) + (link["anchor"] or "")

    return OUTPUT.sub(lambda wanted: _fenced("text", _output(wanted["command"])), LINK.sub(turned, markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """A reader's browser asks nobody but the site."""
    foreign = FOREIGN.search(output)
    if foreign:
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {foreign[0]}")
    return output


def _resolve(origin: str, path: str) -> str | None:
    """The file of the repository that a link means; None if there is none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def _place(origin: str) -> str:
    """Where a file of the repository is on the site."""
    if origin.startswith(DOCS):
        return origin.removeprefix(DOCS)
    return origin if origin.endswith(".md") else f"{SOURCES}{origin}.md"


def _listing(origin: str, text: str) -> str:
    language = {".py": "python", ".sh": "sh", ".proto": "protobuf", ".yaml": "yaml"}.get(Path(origin).suffix, "text")
    return f"# `{origin}`\n\n{_fenced(language, text)}\n"


def _fenced(language: str, text: str) -> str:
    fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}"


def _output(command: str) -> str:
    name, *arguments = command.split()
    module = {"fleet": "fleet", "fleetrun": "fleet.launch"}[name]
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "COLUMNS": "110"},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
    )
    if ran.returncode:
        raise PluginError(f"{command} failed: {ran.stderr}")
    return ran.stdout
