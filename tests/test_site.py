"""The documentation site, as far as it needs no generator."""

import importlib
import json
import pathlib
import sys

import pytest

SITE = pathlib.Path(__file__).parent.parent / "docs/site"


@pytest.fixture
def load_module(monkeypatch):
    """Function that imports a module of the site, for one test."""
    monkeypatch.syspath_prepend(SITE)
    own = {path.stem for path in SITE.glob("*.py")}
    yield importlib.import_module
    for name in own & set(sys.modules):
        del sys.modules[name]


def test_every_public_name_is_on_an_api_page(load_module):
    names = load_module("names")
    assert names.missing(names.asked_for()) == []


def test_undocumented_public_name_is_detected(load_module):
    names = load_module("names")
    missing = names.missing(x for x in names.asked_for() if "poisson" not in x)
    assert "dpjax.sampling.poisson" in missing
    assert "dpjax.accounting.pld.epsilon" not in missing


def test_names_on_api_pages_exist(load_module):
    names = load_module("names")
    assert [x for x in names.asked_for() if names.resolve(x) is None] == []


def test_errors_in_a_built_page_are_detected(load_module, monkeypatch, tmp_path):
    check = load_module("check")
    monkeypatch.setattr(check, "SITE", tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/index.html").write_text('<h1 id="here">Here</h1>')
    page = tmp_path / "index.html"
    page.write_text(
        '<a href="other/#here">a</a> <a href="/other/">b</a> <a href="https://x.y">c</a>'
        '<a href="none/">d</a> <a href="other/#there">e</a> <a href="#f">f</a>'
        '<script src="https://x.y/z.js"></script> <span class="arithmatex">x</span>'
        "<p>Privacy: none</p>"
    )
    assert check.broken(page) == [
        "no file: none/",
        "no anchor: other/#there",
        "no anchor: #f",
        "loaded from elsewhere: https://x.y/z.js",
        "a formula that is not MathML",
        "a section of a docstring that is none",
    ]


def test_notebook_converts_to_markdown_with_outputs(load_module, tmp_path):
    markdown = load_module("notebook_pages").markdown
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "\n", "Words."]},
        {
            "cell_type": "code",
            "source": "draw()",
            "outputs": [
                {"output_type": "stream", "text": ["printed\n"]},
                {"data": {"image/png": "aGVsbG8=", "text/plain": "<Figure>"}},
                {"data": {"text/plain": ["shown"]}},
            ],
        },
        {"cell_type": "code", "source": "", "outputs": []},
    ]
    path = tmp_path / "some.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    text, pictures = markdown(path)
    assert pictures == {"some-1.png": b"hello"}
    assert text.startswith("# A title\n\nWords.\n\n```python\ndraw()\n```\n")
    assert "```text\nprinted\n```" in text
    assert "](some-1.png)" in text
    assert "```text\nshown\n```" in text
    assert "Figure" not in text
