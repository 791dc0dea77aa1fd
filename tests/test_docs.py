"""The programs of the pages run, and print the output that the pages show.

A page's blocks of Python share one namespace, in order. The output of each is in the
text block right after it. A block of another library's code is not run, and a comment
before it says so.

    python tests/test_docs.py PAGE ...

writes into pages, named as in `PAGES`, what their programs print now.
"""

import contextlib
import importlib.util
import io
import pathlib
import re
import sys
import tempfile
import tomllib

import jax
import pytest

from dpjax import Adjacency
from dpjax._plan.mechanisms import SAMPLINGS

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    "questions.md",
    "choosing.md",
    "choosing-a-mechanism.md",
    "reporting.md",
    "pitfalls.md",
    "migration.md",
    "map.md",
    "correlated.md",
    "auditing.md",
    "bits.md",
    "budget.md",
    "statistics.md",
    "recipe.md",
    "amplification.md",
    "published-runs.md",
    "selection.md",
    "howto/batchnorm-and-dropout.md",
    "howto/keras.md",
    "howto/metrics.md",
    "howto/augmentation.md",
    "howto/averaging.md",
    "howto/devices.md",
    "howto/accumulation.md",
    "howto/streaming.md",
    "howto/large-models.md",
    "howto/language-model.md",
    "howto/resume.md",
    "howto/regression.md",
    "howto/users.md",
]
# Pages that take a second or two; the others search for noise multipliers.
QUICK = {"pitfalls.md", "map.md", "howto/language-model.md"}
# Pages whose programs need an optional library.
NEEDED = {"howto/keras.md": "keras"}
# Pages whose programs take longer to run than to compile.
OPTIMIZED = {"choosing-a-mechanism.md", "correlated.md"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: [\w. ]+ -->\n\n$")


def iter_programs(text):
    """Yield each program that is run, and the block after it that shows its output."""
    blocks = list(FENCE.finditer(text))
    assert text.count("\n```") == 2 * len(blocks), "a fence that is not understood"
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] != "python" or NOT_RUN.search(text[: block.start()]):
            continue
        shown = following and following[1] == "text"
        if shown and text[block.end() : following.start()].strip():
            shown = False  # there are words between
        yield block[2], following if shown else None


def render_page(page):
    """The page with the output that its programs print now."""
    text, names, place, parts = (DOCS / page).read_text(encoding="utf-8"), {}, 0, []
    for program, shown in iter_programs(text):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(program, page, "exec"), names)
        out = printed.getvalue()
        assert shown or not out, f"{page} does not show what is printed: {out}"
        if shown:
            parts += [text[place : shown.start(2)], out]
            place = shown.end(2)
    return "".join([*parts, text[place:]])


@pytest.mark.whole
@pytest.mark.parametrize(
    "page",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in PAGES],
)
def test_programs_print_the_output_on_the_page(page, tmp_path, monkeypatch, request):
    if page in NEEDED and not importlib.util.find_spec(NEEDED[page]):
        pytest.skip(f"{NEEDED[page]} is not installed")
    if page in OPTIMIZED:
        request.getfixturevalue("optimized")
    monkeypatch.chdir(tmp_path)  # a page may write a file
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        assert render_page(page) == (DOCS / page).read_text(encoding="utf-8")


def test_program_and_output_blocks_are_extracted():
    text = "\n```python\nx = 1\n```\n\n```text\n1\n```\n\n"
    other = "<!-- not run: Opacus -->\n\n```python\ny\n```\n"
    between = "```python\nz\n```\n\nwords\n\n```text\nw\n```\n"
    (first, shown), (second, nothing) = iter_programs(text + other + between)
    assert (first, shown[2]) == ("x = 1\n", "1\n")
    assert (second, nothing) == ("z\n", None)


def test_plan_page_lists_adjacencies_of_each_sampling():
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    named = {}
    for samplings, adjacencies in re.findall(
        r"^\| ((?:`\"\w+\"`(?:, )?)+) \| .* \| (.*) \|$", page, re.MULTILINE
    ):
        covers = {Adjacency[name] for name in re.findall("`([A-Z_]+)`", adjacencies)}
        for sampling in re.findall(r'"(\w+)"', samplings):
            named[sampling] = set(Adjacency) if adjacencies == "any" else covers
    assert named == {name: set(kind.adjacencies) for name, kind in SAMPLINGS.items()}


def test_every_question_has_an_answer_with_a_link():
    page = (DOCS / "questions.md").read_text(encoding="utf-8")
    _, *answers = page.split("\n### ")
    assert len(answers) >= 22
    for answer in answers:
        question, words = answer.split("\n", 1)
        assert question.endswith("?"), question
        assert re.search(r"\]\([^)]+\)", words), question


def test_citation_has_the_current_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in sys.argv[1:]:
            (DOCS / name).write_text(render_page(name), encoding="utf-8")
