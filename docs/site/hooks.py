"""MkDocs' hooks: the site has the repository's paths, so that a link works here and on the code host.

The front page is README.md. Each linked document becomes a page, each linked source file a page that shows
it, and other linked files are copied. A page that Python-Markdown reads otherwise than CommonMark, the code
host's language, is a warning, which fails a strict build.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FRONT = "README.md"
STYLE = "docs/site/site.css"
LINK = re.compile(r"(\]\((?!https?:))([^)#\s]+)")
PICTURE = re.compile(r'<(?:img|source)\b[^>]*?\bsrc(?:set)?="([^"]+)"')
# Source files that a page shows, by the name of their language.
SHOWN = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".jsonl": "json",
    ".conf": "nginx",
    ".example": "",
}
COMPARED = ("table", "pre", "li", "ul", "ol", "img", "blockquote", "h2", "h3")
log = logging.getLogger("mkdocs.hooks.site")


def linked(source: str) -> list[str]:
    """Return the files that a document links to or shows, as paths in the repository."""
    text, folder = (ROOT / source).read_text(encoding="utf-8"), posixpath.dirname(source)
    paths = [path for _, path in LINK.findall(text)] + PICTURE.findall(text)
    return [posixpath.normpath(posixpath.join(folder, path)) for path in paths]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of `docs_dir` by those that can be reached from the front page."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    found, waiting = {STYLE}, [FRONT]
    while waiting:
        source = waiting.pop()
        if source not in found and (ROOT / source).is_file():
            found.add(source)
            waiting += linked(source) if source.endswith(".md") else []
    for source in sorted(found):
        files.append(file_of(source, config))
    return files


def file_of(source: str, config: MkDocsConfig) -> File:
    """Return the site's file: the repository's, or a page that shows its text."""
    path = ROOT / source
    if path.suffix not in SHOWN:
        return File.generated(config, source, abs_src_path=str(path))
    text = path.read_text(encoding="utf-8")
    head = (
        f"---\ntitle: {path.name}\nhide: [navigation, toc]\nsearch: {{ exclude: true }}\n---\n# {source}\n\n"
    )
    return File.generated(config, f"{source}.md", content=f"{head}````{SHOWN[path.suffix]}\n{text}````\n")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to a shown source file to its page."""
    if page.file.src_uri == FRONT:
        page.meta["hide"] = ["navigation"]
    return LINK.sub(lambda link: link[0] + ".md" * (Path(link[2]).suffix in SHOWN), markdown)


def on_page_content(html: str, page: Page, **_: Any) -> None:
    """Warn if the page has more or fewer tables, lists or pictures than on the code host."""
    there = MarkdownIt("commonmark").enable("table").render(page.markdown or "")
    for tag in COMPARED:
        here, wanted = (len(re.findall(rf"<{tag}\b", text)) for text in (html, there))
        if here != wanted:
            log.warning(
                "%s has %d <%s> here and %d in CommonMark: indent by four spaces within a list, and leave a"
                " blank line before one",
                page.file.src_uri,
                here,
                tag,
                wanted,
            )
