"""Build the site strictly, and check the built site.

    python docs/site/check.py [--browser]

The command needs the extra `docs`. It stops at a build with warnings, and fails if

- a link leads to no file or to no anchor,
- a page would load anything from another site,
- a formula or a section of a docstring was not converted,
- a public name has no entry on an API page, or
- a search puts a wrong page first (`search.py`).

With --browser, `browser.py` also opens the pages in Chromium.
"""

import argparse
import functools
import html.parser
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import names

HERE = pathlib.Path(__file__).parent
SITE = HERE.parents[1] / "build/site"
LOADED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src")}
# Patterns of source text that the generator should have converted.
LEFT = {
    "a formula that is not MathML": "arithmatex",
    "a section of a docstring that is none": "<p>(Privacy|Reference|Example|Returns): ",
}


class Parsed(html.parser.HTMLParser):
    """The anchors of a page, its links, and the files that it loads."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str, str]] = []
        text = path.read_text()
        self.left = [what for what, mark in LEFT.items() if re.search(mark, text)]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchor and the links of an element."""
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.links.append((tag, name, value))


@functools.cache
def parsed(path: pathlib.Path) -> Parsed:
    """Parse a page, at most once."""
    return Parsed(path)


def build() -> None:
    """Build the site; exit if the build gives a warning or an error."""
    # Without --quiet, because --quiet counts no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    config = str(HERE / "mkdocs.yml")
    if subprocess.run([*command, "-f", config], env=environment).returncode:
        sys.exit("The site was not built.")


def broken(page: pathlib.Path) -> list[str]:
    """Return the problems of a page: links, loaded files, and unconverted text."""
    found = []
    for tag, name, link in parsed(page).links:
        url = urllib.parse.urlsplit(link)
        if url.scheme or url.netloc:
            outside = url.scheme not in ("data", "mailto")
            # A link may lead to another site, but a page must load only own files.
            if outside and (tag, name) in LOADED:
                found.append(f"loaded from elsewhere: {link}")
            continue
        path = urllib.parse.unquote(url.path)
        to = (page.parent / path).resolve() if path else page
        if path.startswith("/"):
            to = SITE / path.lstrip("/")
        to = to / "index.html" if to.is_dir() else to
        anchor = urllib.parse.unquote(url.fragment)
        if not to.exists():
            found.append(f"no file: {link}")
        elif anchor and to.suffix == ".html" and anchor not in parsed(to).anchors:
            found.append(f"no anchor: {link}")
    return found + parsed(page).left


def problems() -> list[str]:
    """Return all problems of the site, except those of the search."""
    pages = sorted(SITE.rglob("*.html"))
    found = [
        f"{page.relative_to(SITE)}: {x}"
        for page in pages
        if page.name != "404.html" and "repository" not in page.parts
        for x in broken(page)
    ]
    entries = {
        anchor
        for page in (SITE / "api").rglob("*.html")
        for anchor in parsed(page).anchors
        if anchor.startswith("dpjax.")
    }
    missing = names.missing(entries)
    return found + [f"on no API page: {name}" for name in missing]


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--browser", action="store_true", help="look at the pages too")
    arguments = parser.parse_args()
    build()
    import search  # needs the extra `docs`

    found = problems() + search.problems(SITE)
    if arguments.browser:
        import browser

        found += browser.problems(SITE)
    for line in found:
        print(line)
    print(f"{len(found)} problems in {SITE}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
