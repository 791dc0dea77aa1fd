"""Links of the Markdown files, as they are read in the repository."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
PAGES = [
    path
    for pattern in ("*.md", ".github/**/*.md", "benchmarks/*.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
] + sorted(ROOT.glob("notebooks/*.ipynb"))


def prose_of(path):
    """A page's text without its programs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        text = "\n\n".join(texts)
    return FENCE.sub("", text)


def heading_anchors(path):
    """The anchors of a page's headings: small letters, hyphens for spaces."""
    result = []
    for title in HEADING.findall(prose_of(path)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        result.append(f"{slug}-{result.count(slug)}" if slug in result else slug)
    return result


def broken_links(path):
    """Yield the links of a page whose target does not exist."""
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose_of(path))):
        if link.startswith(("https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        to = (path.parent / target).resolve() if target else path
        inside = to == ROOT or ROOT in to.parents
        result = (
            inside and to.exists() and (not anchor or anchor in heading_anchors(to))
        )
        # Other renderers make other anchors of headings that are not ASCII.
        if not result or not anchor.isascii():
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page_links_resolve(path):
    assert list(broken_links(path)) == []


def test_broken_links_are_detected(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    text = "# A title: of `two` parts\n\n```sh\n# no title\n```\n\n## Über\n"
    other.write_text(text, encoding="utf-8")
    good = "[a](other.md) [b](other.md#a-title-of-two-parts) [c](https://no.where)"
    bad = ["none.md", "other.md#no-title", "#g", "../outside.md", "other.md#über"]
    bad.append("http://no.where")
    links = " ".join(f"[d]({link})" for link in bad)
    page.write_text(f"{good}\n\n{links}\n", encoding="utf-8")
    assert list(broken_links(page)) == bad
