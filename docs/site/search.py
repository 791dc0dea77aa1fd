"""Check that the site's search puts the right page first.

The build writes an index, and the theme searches this index with lunr.js. The package
`lunr` is a version of lunr.js in Python. As in the theme, words are not stemmed, titles
weigh more than text (`FIELDS`), the last letters of a word may be missing, and a page
ranks by its best section.
"""

import json
import pathlib

import lunr
from lunr.stemmer import stemmer

FIELDS = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
# From the words of a search to the page that must come first.
EXPECTED = {
    "epsilon": "choosing",
    "learning rate": "choosing",
    "keras": "howto/keras",
    "opacus": "migration",
    "tpu": "howto/devices",
    "lora": "howto/large-models",
    "batchnorm": "howto/batchnorm-and-dropout",
    "hyperparameter": "selection",
    "last iterate": "iteration",
    "microbatch": "howto/accumulation",
}


def problems(site: pathlib.Path) -> list[str]:
    """Return a line for each search whose first result is another page."""
    sections = json.loads((site / "search/search_index.json").read_text())["docs"]
    builder = lunr.get_default_builder()
    for pipeline in (builder.pipeline, builder.search_pipeline):
        pipeline.remove(stemmer)
    index = lunr.lunr(
        ref="location",
        fields=FIELDS,
        documents=[(x, {"boost": x.get("boost", 1)}) for x in sections],
        builder=builder,
    )
    index.inverted_index = _Postings(index.inverted_index)
    first = {words: _first_page(index, words) for words in EXPECTED}
    return [
        f"search for {words!r} puts {page} first, not {EXPECTED[words]}"
        for words, page in first.items()
        if page != EXPECTED[words]
    ]


class _Postings(dict):
    """The index of words, in which a word that no page contains has no pages.

    If the last letters of a word may be missing, `lunr` 0.8 also looks up a few words
    that no page contains, such as the union of two numbers.
    """

    def __missing__(self, word: str) -> dict:
        return {"_index": 0} | {field["field_name"]: {} for field in FIELDS}


def _first_page(index: lunr.index.Index, words: str) -> str:
    found = index.search(" ".join(f"+{word}*" for word in words.split()))
    return found[0]["ref"].split("#")[0].rstrip("/") if found else "nothing"
