"""What holds of the project as a whole."""

import ast
import importlib
import pathlib
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted((ROOT / "dpjax").rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_training_and_accounting_do_not_import_each_other(path):
    inside = path.relative_to(ROOT / "dpjax")
    if inside.parts[0] in ("solvers", "__init__.py"):
        return
    shared = ("dpjax._validate", "dpjax._float64", "dpjax.adjacency")
    for name in imports(path):
        if inside.parts[0] == "accounting":
            own = name.startswith("dpjax.accounting")
            assert own or not name.startswith("dpjax") or allowed(name, shared), name
        else:
            assert not name.startswith(("dpjax.accounting", "dpjax.solvers")), name


def allowed(name, shared):
    modules = [s.removeprefix("dpjax.") for s in shared]
    return name.startswith(shared) or name.removeprefix("dpjax.") in modules


@pytest.mark.parametrize("folder", ["solvers"])
def test_a_module_without_underscore_is_on_its_folders_face(folder):
    face = importlib.import_module(f"dpjax.{folder}")
    for path in (ROOT / "dpjax" / folder).glob("[!_]*.py"):
        # The module itself: no function shadows it.
        module = importlib.import_module(f"dpjax.{folder}.{path.stem}")
        assert getattr(face, path.stem) is module


def test_continuous_integration_runs_the_command_of_the_readme():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    commands = [line for line in readme.splitlines() if line.endswith("-m pytest")]
    assert len(commands) == 1
    assert commands[0] in ci.splitlines()


def test_continuous_integration_tests_the_oldest_versions_too():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = {d.replace(">=", "==") for d in project["dependencies"]}
    constraints = (ROOT / ".ci/oldest.txt").read_text().split()
    assert oldest == set(constraints)


def test_the_program_in_the_readme_runs(capsys):
    readme = (ROOT / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    exec(compile(program, "README.md", "exec"), {})
    assert "noise multiplier 22.9" in capsys.readouterr().out
