"""The notebooks are committed with outputs of one run from the first cell to the last.

`notebooks/execute.py --check` runs them again and compares; this reads them.
"""

import importlib.util
import json
import pathlib
import re
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# An absolute path on a machine, or one in a home folder.
PLACE = re.compile(r"""(?:^|[\s"'(=:])(?:/\w+/[\w.]|[A-Z]:\\|~/)""")


def cells_of_kind(path, kind):
    notebook = json.loads(path.read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def cell_text(cell):
    return "".join(cell["source"])


def all_outputs(path):
    return [
        output for cell in cells_of_kind(path, "code") for output in cell["outputs"]
    ]


def test_there_are_eleven_notebooks():
    assert len(PATHS) == 11


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
class TestNotebook:
    def test_cells_ran_in_order(self, path):
        counts = [cell["execution_count"] for cell in cells_of_kind(path, "code")]
        assert counts == list(range(1, len(counts) + 1))

    def test_has_outputs_and_no_errors(self, path):
        kinds = {output["output_type"] for output in all_outputs(path)}
        assert {"stream", "display_data"} <= kinds  # numbers and pictures
        assert "error" not in kinds
        assert all(output.get("name") != "stderr" for output in all_outputs(path))

    def test_explains_before_it_computes(self, path):
        first, *_ = json.loads(path.read_text())["cells"]
        assert first["cell_type"] == "markdown"
        assert "".join(first["source"]).startswith("# ")
        assert (
            len(cells_of_kind(path, "markdown")) > len(cells_of_kind(path, "code")) / 2
        )

    def test_explains_random_key(self, path):
        prose = " ".join(map(cell_text, cells_of_kind(path, "markdown")))
        assert "dpjax.random_key()" in prose

    def test_contains_no_local_paths_or_metadata(self, path):
        notebook = json.loads(path.read_text())
        assert notebook["metadata"] == {
            "kernelspec": KERNEL,
            "language_info": {"name": "python"},
        }
        for cell in notebook["cells"]:
            assert cell["metadata"] in ({}, {"tags": ["trained"]})
        words = [cell_text(cell) for cell in notebook["cells"]]
        words += [json.dumps(output_text(output)) for output in all_outputs(path)]
        for result in words:
            assert not PLACE.search(result)

    def test_is_listed_on_the_notebooks_page(self, path):
        page = (ROOT / "docs/notebooks.md").read_text()
        assert page.count(f"(../notebooks/{path.name})") == 1

    def test_links_resolve(self, path):
        for cell in cells_of_kind(path, "markdown"):
            for link in re.findall(r"\]\(([^)#]+)\)", cell_text(cell)):
                assert (path.parent / link).exists(), link


def output_text(output):
    """The text of an output, without encoded images."""
    data = {k: v for k, v in output.get("data", {}).items() if "image" not in k}
    return [data, output.get("text", "")]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("File '/home/somebody/x.py'", True),
        ("in ~/data", True),
        ("see [plans](../docs/plan.md)", False),
        ("10 ln 8 / 15 and dε/dβ", False),
    ],
)
def test_local_paths_are_detected(words, found):
    assert bool(PLACE.search(words)) is found


@pytest.fixture(scope="module")
def execute():
    """The script, with stubs for the libraries that run kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("nbformat", "nbclient"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["nbclient"].NotebookClient = None
        spec = importlib.util.spec_from_file_location(
            "execute", ROOT / "notebooks/execute.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("old", "new", "trained", "same"),
    [
        ("ε = 1.234", "ε = 1.236", False, True),  # two units of the last digit
        ("ε = 1.234", "ε = 1.240", False, False),
        ("5 steps", "6 steps", False, False),  # whole numbers are exact
        ("δ = 1.00e-05", "δ = 1.02e-05", False, True),
        ("δ = 1.00e-05", "δ = 1.10e-05", False, False),
        ("accuracy 0.90", "accuracy 0.93", True, True),
        ("accuracy 0.90", "accuracy 0.99", True, False),
        ("loss 1.00e-03", "loss 1.02e-03", True, True),
        ("loss 1.00e-03", "loss 1.20e-03", True, False),
        ("accuracy 0.90", "precision 0.90", True, False),
        ("a 1.0", "a 1.0 b 2.0", False, False),
        ("ε = inf", "ε = 1.0", False, False),
    ],
)
def test_outputs_may_differ_within_tolerance(execute, old, new, trained, same):
    assert execute.alike(old, new, trained) is same
