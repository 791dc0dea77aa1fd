"""Properties of the project as a whole: layers, exports, references, CI."""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib
import types

import jax
import jax.numpy as jnp
import pytest

import dpjax

ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted((ROOT / "dpjax").rglob("*.py"))
# The packages by layer, the lowest first. A package imports only packages of lower
# layers, and none of its own layer.
LAYERS = (
    ("_core",),
    ("_matrices",),
    ("workloads", "features", "sampling", "clipping", "accounting"),
    ("noise", "strategies", "auditing"),
    ("solvers", "statistics", "_plan"),
    ("checkpoint",),
    ("ledger",),
    ("plot", "_cli"),
    ("__init__", "__main__"),
)
FLOORS = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}


def module_name(path):
    """The module's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = sorted({module_name(path) for path in MODULES} - {"dpjax"})


def test_public_modules_are_exported_by_their_package():
    """The package exports either the module itself or a name from it."""
    for name in NAMES:
        folder, _, own = name.rpartition(".")
        if "._" in name:
            continue
        face = ROOT / folder.replace(".", "/") / "__init__.py"
        exported = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(face.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname == alias.name
        }
        assert any(e == name or e.startswith(f"{name}.") for e in exported), own


def test_modules_are_not_shadowed_by_functions():
    for name in NAMES:
        folder, _, own = name.rpartition(".")
        importlib.import_module(name)
        value = getattr(importlib.import_module(folder), own, None)
        assert isinstance(value, types.ModuleType), name


def test_package_exports_agree_for_type_checkers_and_at_runtime():
    text = (ROOT / "dpjax/__init__.py").read_text()
    listed = {
        alias.name: node.module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    names = set(listed)
    assert names | {"__version__", "__doc__"} == set(dir(dpjax))
    assert names - {"plot"} == set(dpjax.__all__)
    for name, module in listed.items():
        home = importlib.import_module(module)
        expected = getattr(home, name, None) or importlib.import_module(
            f"{module}.{name}"
        )
        assert getattr(dpjax, name) is expected
    with pytest.raises(AttributeError, match="no attribute 'pln'"):
        _ = dpjax.pln


_HELP = """
import runpy, sys
sys.argv = ["dpjax", "--version"]
try:
    runpy.run_module("dpjax", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code
"""


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import dpjax; dpjax.Adjacency", {"jax", "numpy", "optax"}),
        (_HELP, {"jax", "numpy", "optax"}),
        pytest.param(
            "import dpjax; [getattr(dpjax, name) for name in dpjax.__all__]",
            {f"scipy.{x}" for x in ("linalg", "optimize", "signal", "special", "stats")}
            | {"matplotlib", "orbax", "flax"},
            marks=pytest.mark.whole,  # which imports JAX once more
        ),
    ],
    ids=["import", "version", "names"],
)
def test_imports_are_lazy(program, absent):
    program += f"\nimport sys; assert not {absent!r} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@functools.cache
def ast_nodes(path):
    return tuple(ast.walk(ast.parse(path.read_text())))


def imported_names(path):
    for node in ast_nodes(path):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_packages(path):
    """The packages of dpjax that a file imports."""
    for name in imported_names(path):
        if name.startswith("dpjax."):
            yield name.split(".")[1]


def test_packages_import_only_lower_layers():
    upwards = []
    for path in MODULES:
        capacity = path.relative_to(ROOT / "dpjax").parts[0].removesuffix(".py")
        for other in {*imported_packages(path)} - {capacity}:
            if FLOORS[other] >= FLOORS[capacity]:
                upwards.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not upwards


def test_training_and_accounting_are_independent():
    """Neither directly nor through a shared package: each imports the lowest layers."""
    allowed = {
        "accounting": {"_core", "_matrices"},
        "sampling": {"_core"},
        "clipping": {"_core"},
        "noise": {"_core", "_matrices", "clipping"},
    }
    for capacity, others in allowed.items():
        files = (ROOT / "dpjax" / capacity).rglob("*.py")
        assert {r for path in files for r in imported_packages(path)} <= others | {
            capacity
        }, capacity


def test_ci_runs_the_readme_test_command():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    commands = [line for line in readme.splitlines() if line.endswith("-m pytest")]
    assert len(commands) == 1
    assert commands[0] in ci.splitlines()


def test_ci_tests_the_oldest_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounded = [d for d in project["dependencies"] if ">=" in d]
    oldest = {d.partition(",")[0].replace(">=", "==") for d in bounded}
    constraints = (ROOT / ".ci/oldest.txt").read_text().split()
    assert oldest == set(constraints)


@pytest.mark.whole
def test_readme_program_runs(capsys):
    readme = (ROOT / "README.md").read_text()
    _, program = readme.split("```python\n")
    exec(compile(program.split("```")[0], "README.md", "exec"), {})
    assert "(3.000, 1e-05)-diff" in capsys.readouterr().out


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 600


@pytest.mark.slow
def test_plan_page_programs_run(capsys):
    page, names = (ROOT / "docs/plan.md").read_text(), {}
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        for program in page.split("```python\n")[1:]:
            exec(compile(program.split("```")[0], "plan.md", "exec"), names)
    printed = capsys.readouterr().out
    for words in ("capacity", "had it stopped", "True", "one user", "% clipped"):
        assert words in printed


# The statements that a reference may name, as a row of docs/papers.md does.
STATEMENT = (
    r"\(\d\.\d\)|(?:Theorem|Lemma|Proposition|Corollar|Algorithm|Definition)\w* "
)
STATEMENT += (
    r"[A-Z\d][\w.]*(?:\(\w\))?(?:(?:, | and | to )[A-Z]?\.?\d[\w.]*(?:\(\w\))?)*"
)
PAPER = r"(?:[A-Z][\w-]+(?:, | and | et al\.)?)+ \(\d{4}\)"


def iter_references():
    """The text after each "Reference:" of a docstring."""
    for path in MODULES:
        for node in ast_nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                for text in (ast.get_docstring(node) or "").split("Reference: ")[1:]:
                    yield path.name, " ".join(text.split("\n\n")[0].split())


def expand_statement(statement):
    """Theorem 4.1, Theorem 4.2, … for "Theorems 4.1 to 4.3"."""
    if statement.startswith("("):
        return [statement]
    kind, rest = statement.split(" ", 1)
    kind = re.sub("(s|ies|y)$", "", kind) + ("y" if "Corollar" in kind else "")
    numbers = []
    for number in re.split(", | and ", rest.rstrip(".")):
        first, _, last = number.partition(" to ")
        head, _, low = first.rpartition(".")
        high = last.rpartition(".")[2] or low
        count = range(int(low), int(high) + 1) if last else [low]
        numbers += [f"{head}.{i}" if head else f"{i}" for i in count]
    return [f"{kind} {number}" for number in numbers]


def read_papers_page():
    """The rows of docs/papers.md by paper, four cells each."""
    result = {}
    for section in (ROOT / "docs/papers.md").read_text().split("\n## ")[1:]:
        title, *lines = section.splitlines()
        rows = [line.strip("|").split(" | ") for line in lines if line.startswith("|")]
        result[title] = [[cell.strip() for cell in row] for row in rows[2:]]
    return result


def test_every_reference_is_on_the_papers_page():
    page = {
        title: {row[0] for row in rows} for title, rows in read_papers_page().items()
    }
    for where, text in iter_references():
        cited = re.split(f"({PAPER})", text)
        for paper, rest in zip(cited[1::2], cited[2::2], strict=True):
            assert paper in page, (where, paper)
            named = [
                s
                for group in re.findall(STATEMENT, rest)
                for s in expand_statement(group)
            ]
            assert set(named) <= page[paper], (where, paper, named)


def resolve_name(name):
    """The object with this dotted name below dpjax."""
    parts, value = name.split("."), importlib.import_module("dpjax")
    for i, part in enumerate(parts):
        if not hasattr(value, part):
            value = importlib.import_module(".".join(["dpjax", *parts[:i]]))
        value = getattr(value, part)
    return value


def test_papers_page_names_existing_functions_and_tests():
    for title, rows in read_papers_page().items():
        for row in rows:
            assert len(row) == 4, (title, row)
            for name in re.findall(r"`([^`]+)`", row[1]):
                assert callable(resolve_name(name)), (title, name)
            for name in re.findall(r"`([^`]+)`", row[2]):
                file, test = name.split("::")
                assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name
            assert "`" in row[1], (title, row)
            assert "`" in row[2], (title, row)


def test_dir_lists_only_public_names():
    import dpjax

    assert all(hasattr(dpjax, name) for name in dir(dpjax))
    assert {"plan", "clipped_grad", "__version__"} <= set(dir(dpjax))
    private = {name for name in dir(dpjax) if name.startswith("_")}
    assert private == {"__doc__", "__version__"}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert dpjax.__version__ == pyproject["project"]["version"]
    assert (ROOT / "dpjax/py.typed").exists()


def test_signatures_show_types_by_name():
    modules = [getattr(dpjax, name) for name in dpjax.__all__]
    modules = [x for x in modules if inspect.ismodule(x)]
    modules += [x for x in vars(dpjax.accounting).values() if inspect.ismodule(x)]
    functions = {
        f"{module.__name__}.{name}": value
        for module in [dpjax, *modules]
        for name in dir(module)
        if inspect.isfunction(value := getattr(module, name))
    }
    assert len(functions) > 100
    for name, function in functions.items():
        text = str(inspect.signature(function))
        # A union that is spelled out names the scalars of NumPy.
        assert "numpy.number" not in text, name
        assert text.count("fresh_bins") <= 1, name
    assert "delta: ArrayLike)" in str(inspect.signature(dpjax.accounting.gdp.epsilon))


def test_imported_packages_are_declared_dependencies():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = pyproject["project"]["dependencies"]
    declared = {re.match(r"[\w-]+", x)[0].replace("-", "_") for x in required}
    # Used only where they are installed, or dependencies of an extra.
    optional = {"flax", "matplotlib", "orbax", "dp_accounting"}
    result = {
        name.split(".")[0]
        for path in MODULES
        for name in imported_names(path)
        if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert result - {"dpjax"} <= declared | optional


def test_records_have_readable_reprs():
    import dpjax
    from dpjax.accounting import pld

    step = pld.poisson_gaussian(1.1, 0.01, adjacency=dpjax.Adjacency.ADD_REMOVE)
    both = pld.convolve(pld.compose(step, 1000), pld.gaussian(0.3))
    assert repr(both) == (
        "PLD(\n  1000 x PoissonGaussian(noise_multiplier=1.1, sampling_rate=0.01, "
        "adjacency=Adjacency.ADD_REMOVE),\n  1 x Gaussian(mu=0.3)\n)"
    )
    assert repr(pld.PLD(())) == "PLD()"

    def loss(w, x):
        return w @ x

    assert repr(dpjax.clipped_grad(loss, 0.3)).startswith(
        "clipped_grad(loss, clip_norm=0.3, "
    )
    table = dpjax.explain(loss, jnp.ones(3), jnp.ones((2, 3)))
    assert repr(table) == str(table)
    assert "auto:" in repr(table)
