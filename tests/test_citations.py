"""The papers to cite for a run: what each is cited for, and its section in the docs."""

import pathlib
import re
import tomllib

import pytest

import dpjax
from dpjax._matrices.strategy import StrategySpec
from dpjax._plan.guarantee import RunGuarantee
from dpjax._plan.mechanisms import SAMPLINGS
from dpjax._plan.parameters import RunParameters
from dpjax.accounting import events

ROOT = pathlib.Path(__file__).parent.parent
ENTRIES = (ROOT / "dpjax/_plan/papers.bib").read_text().strip().split("\n\n")
SECTIONS = re.split(r"^## ", (ROOT / "docs/papers.md").read_text(), flags=re.MULTILINE)


def fields_of(entry):
    return dict(re.findall(r"^  (\w+) = {(.*)},$", entry, flags=re.MULTILINE))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda x: x.split("{")[1].split(",")[0])
def test_entry_has_a_section_of_the_papers_page(entry):
    fields = fields_of(entry)
    title = fields["title"].strip("{}")
    (section,) = (x for x in SECTIONS if f"*{title}*" in " ".join(x.split()))
    heading = section.partition("\n")[0]
    assert f"({fields['year']})" in heading
    assert f"<{fields['url']}>" in section
    # The first author, and all if the page names all.
    authors = [x.partition(",")[0] for x in fields["author"].split(" and ")]
    assert heading.startswith(authors[0])
    if "et al." not in heading:
        assert re.split(r", | and ", heading.partition(" (")[0]) == authors
    # Unbalanced braces would hide the entries that follow.
    assert entry.count("{") == entry.count("}")


def test_keywords_name_what_a_run_has():
    known = {x for x in dir(events) if x[0].isupper()} | SAMPLINGS.keys()
    known |= {"RunParameters", "QuantileClip", "StrategySpec"}
    known |= {"tree", "rational", "banded"}
    keywords = [fields_of(entry)["keywords"].split(", ") for entry in ENTRIES]
    assert {x for row in keywords for x in row} <= known


def cited(sampling, **changes):
    numbers = {
        "num_examples": 1000,
        "batch_size": 100,
        "num_steps": 20,
        "noise_multiplier": 2.5,
        "clip_norm": 1.0,
        "max_batch_size": 180,
        "epsilon": 1.0,
        "delta": 1e-5,
        "noise": "independent",
        "adjacency": dpjax.Adjacency.REPLACE,
        "solved_for": "epsilon",
    }
    run = RunParameters(sampling=sampling, **numbers | changes)
    text = RunGuarantee(run, 20).citations()
    library, _, rest = text.partition("\n\n")
    assert library.startswith("@misc{dpjax,")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Version {project['version']}" in library
    assert "keywords" not in rest
    assert re.fullmatch(r"(@\w+{\w+,\n(  \w+ = {.*},\n)+}\n\n)+", rest + "\n\n")
    return set(re.findall(r"^@\w+{(\w+),", rest, flags=re.MULTILINE))


ALWAYS = {"abadi2016"}
SAMPLED = {"doroshenko2022", "zhu2022"} | ALWAYS
IN_ORDER = {"balle2018", "dong2022"} | ALWAYS
CORRELATED = {"denisov2022", "kalinin2024"} | IN_ORDER
TREE = StrategySpec(tree_decay=0.9)


@pytest.mark.parametrize(
    ("sampling", "changes", "expected"),
    [
        ("poisson", {}, SAMPLED | {"chua2024"}),
        ("poisson", {"max_batch_size": 1000}, SAMPLED),
        ("fixed_size", {}, SAMPLED | {"bok2024", "dong2022"}),
        ("fixed", {}, IN_ORDER),
        ("reshuffled", {}, IN_ORDER),
        ("reshuffled", {"arithmetic": "discrete"}, IN_ORDER | {"canonne2020"}),
        ("fixed", {"quantile": dpjax.QuantileClip(0.1)}, IN_ORDER | {"andrew2021"}),
        ("fixed", {"shape": TREE}, CORRELATED | {"tran2022"}),
        (
            "fixed",
            {"shape": StrategySpec((-0.5,), (-0.9,))},
            CORRELATED | {"mcmahan2024"},
        ),
        (
            "cyclic_poisson",
            {"shape": StrategySpec((0.5,))},
            SAMPLED | {"chua2024", "choquettechoo2023", "denisov2022"},
        ),
        ("random_bins", {}, {"feldman2025"} | ALWAYS),
        ("fresh_bins", {}, {"feldman2025"} | ALWAYS),
    ],
)
def test_run_is_cited_by_what_it_used(sampling, changes, expected):
    assert cited(sampling, **changes) == expected
