"""The pages of the API reference have every public name."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def names():
    spec = importlib.util.spec_from_file_location("names", ROOT / "docs/site/names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_a_page(names):
    assert names.missing(names.asked_for()) == []


def test_a_name_that_is_on_no_page_is_found(names):
    asked = [name for name in names.asked_for() if "poisson" not in name]
    missing = names.missing(asked)
    assert "dpjax.sampling.poisson" in missing
    assert "dpjax.accounting.pld.epsilon" not in missing


def test_what_pages_ask_for_exists(names):
    assert [x for x in names.asked_for() if names.resolve(x) is None] == []
