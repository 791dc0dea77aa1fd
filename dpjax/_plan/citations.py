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
    """Return the BibTeX entries of this library and of the methods that a run uses.

    An entry of `papers.bib` is included if one of its keywords names an event, a
    record, a sampling or a kind of strategy of the run.
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
    """Yield the type name of each record in a value that `to_plain` has written."""
    if isinstance(plain, dict):
        yield plain["type"]
        plain = [*plain.values()]
    if isinstance(plain, list):
        for value in plain:
            yield from _types(value)
