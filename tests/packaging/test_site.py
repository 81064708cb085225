"""The navigation of the documentation site. `scripts/site` checks links, headings and layout."""

import re

from tests.packaging.checkout import ROOT

# The page of a source file has the file's name with this suffix (docs/site/hooks.py).
SHOWN = ".toml.md"


def test_the_navigation_has_every_document_once() -> None:
    navigation = (
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    )
    listed = re.findall(r": (\S+)$", navigation, re.MULTILINE)
    assert len(set(listed)) == len(listed)
    pages = {path.removesuffix(".md") if path.endswith(SHOWN) else path for path in listed}
    assert sorted(path for path in pages if not (ROOT / path).is_file()) == []
    documents = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(documents - pages) == []
    assert listed[0] == "README.md"
