"""Hooks for MkDocs: add files from outside of `docs/`, and adapt links and formulas.

The links of all pages are relative to the repository. The files of `ELSEWHERE` and the
notebooks (with their stored outputs) become pages of the site. Other files that a page
links to are copied into the site's folder `repository/`. The hooks convert formulas to
MathML, so that a page needs no script to render a formula.
"""

import pathlib
import posixpath
import re
import tomllib

import latex2mathml.converter
import notebook_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[2]
# From files outside of `docs/` to the pages that they become.
ELSEWHERE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
# The weight of a page's sections in a search, 1 for all other pages. Guides for tasks
# come before measurements, programs and functions.
BOOSTS = {"howto/": 2.0, "notebooks/": 0.5, "benchmarks": 0.25, "api/": 0.25}
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
GUIDE = re.compile(r"docs/(\w+)\.md")  # in docstrings
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def source_of(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    back = {page: path for path, page in _elsewhere().items()}
    return back.get(uri, f"docs/{uri}")


def _elsewhere() -> dict[str, str]:
    found = {path: page for path, page in ELSEWHERE.items() if (ROOT / path).exists()}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        found[f"notebooks/{path.name}"] = f"notebooks/{path.stem}.md"
    return found


def target_of(link: str, page: str) -> tuple[str, str]:
    """Return the file in the repository that a page links to, and the anchor."""
    path, _, anchor = link.partition("#")
    folder = posixpath.dirname(source_of(page))
    return posixpath.normpath(posixpath.join(folder, path)), anchor


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """State the version of dpjax in the header and in the footer of every page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = f"dpjax {project['version']}"
    config.site_name = name
    config.copyright = f"These pages describe {name}."
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, pictures and linked files from outside of `docs/`."""

    def add(uri: str, **kwargs: object) -> None:
        files.append(
            File.generated(config, uri, inclusion=InclusionLevel.INCLUDED, **kwargs)
        )

    for path, page in _elsewhere().items():
        if path.endswith(".ipynb"):
            text, pictures = notebook_pages.markdown(ROOT / path)
            for name, content in pictures.items():
                add(f"notebooks/{name}", content=content)
            add(page, content=text)
        else:
            add(page, content=(ROOT / path).read_text())
    add("assets/style.css", abs_src_path=str(ROOT / "docs/site/style.css"))
    for page in [f for f in files if f.src_uri.endswith(".md")]:
        for path in _linked_files(page):
            if not files.get_file_from_path(f"repository/{path}"):
                add(f"repository/{path}", abs_src_path=str(ROOT / path))
    return files


def _linked_files(page: File) -> list[str]:
    """Return a page's linked files that are neither pages nor in `docs/`."""
    links = (link for part in prose(page.content_string) for link in LINK.findall(part))
    paths = [
        target_of(x, page.src_uri)[0] for x in links if "//" not in x and x[0] != "#"
    ]
    return [
        path
        for path in paths
        if not path.startswith(("docs/", "..")) and path not in _elsewhere()
        if (ROOT / path).is_file()
    ]


def prose(markdown: str) -> list[str]:
    """Return the parts of a page outside of its blocks of code."""
    return FENCE.split(markdown)[::2]


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Change links to those of the site, and set the page's weight in a search."""
    boosts = (x for start, x in BOOSTS.items() if page.file.src_uri.startswith(start))
    page.meta["search"] = {"boost": next(boosts, 1.0)}

    def relocate(match: re.Match[str]) -> str:
        link = match[0]
        if "//" in link or link.startswith(("#", "mailto:")):
            return link
        uri = page.file.src_uri
        path, anchor = target_of(link, uri)
        if not (ROOT / path).exists():  # a notebook's picture, or a mistake
            return link
        if path in _elsewhere():
            new = _elsewhere()[path]
        elif path.startswith("docs/"):
            new = path.removeprefix("docs/")
        else:
            new = f"repository/{path}"
        new = posixpath.relpath(new, posixpath.dirname(uri) or ".")
        return f"{new}#{anchor}" if anchor else new

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(relocate, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas to MathML, and each docs/x.md of a docstring to a link."""

    def render(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        latex = match[2].replace("&lt;", "<").replace("&gt;", ">")
        latex = latex.replace("&amp;", "&")
        return latex2mathml.converter.convert(latex.strip(), display=display)

    def link(match: re.Match[str]) -> str:
        guide = files.get_file_from_path(f"{match[1]}.md")
        if guide is None:
            raise PluginError(f"A docstring names {match[0]}, which is not there.")
        return f'<a href="{guide.url_relative_to(page.file)}">{match[0]}</a>'

    html = FORMULA.sub(render, html)
    return GUIDE.sub(link, html) if page.file.src_uri.startswith("api/") else html
