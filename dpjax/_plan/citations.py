"""The papers to cite for a run, as BibTeX."""

import importlib.metadata
import importlib.resources
import re
from collections.abc import Iterator
from typing import Any

from dpjax._core.plain import to_plain
from dpjax._plan.parameters import RunParameters
from dpjax.accounting.events import Event

_LIBRARY = """@misc{{dpjax,
  author = {{{{The dpjax authors}}}},
  title = {{{{dpjax: differentially private training in JAX}}}},
  note = {{Version {version}}},
}}"""


def citations(run: RunParameters, event: Event) -> str:
    """The entries of `papers.bib` for what a run used, after one for the library.

    The keywords of an entry are the events, the records, the samplings and the kinds of
    strategies that it is cited for.
    """
    used = {run.sampling, *_types(to_plain(event)), *_types(to_plain(run.parameters()))}
    if run.shape is not None:
        tree, poles = run.shape.tree_decay is not None, run.shape.denominator
        used.add("tree" if tree else "rational" if poles else "banded")
    entries = [_LIBRARY.format(version=importlib.metadata.version("dpjax"))]
    papers = importlib.resources.files("dpjax._plan").joinpath("papers.bib")
    for entry in papers.read_text("utf-8").strip().split("\n\n"):
        entry, keywords, _ = re.split(r"  keywords = {(.*)},\n", entry)
        if used & {*keywords.split(", ")}:
            entries.append(entry + "}")
    return "\n\n".join(entries)


def _types(plain: Any) -> Iterator[str]:
    """The names of the types of all records in plain values."""
    if isinstance(plain, dict):
        yield plain["type"]
        plain = [*plain.values()]
    if isinstance(plain, list):
        for value in plain:
            yield from _types(value)
