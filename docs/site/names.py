"""Compare dpjax's public names with the names on the API pages."""

import importlib
import inspect
import pathlib
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator

import dpjax

ROOT = pathlib.Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^::: (\S+)((?:\n +.+)*)", re.MULTILINE)


def public() -> Iterator[str]:
    """Yield the public names of all public modules."""
    for module in _modules():
        face = hasattr(module, "__path__")  # a package exports others' names
        names = getattr(module, "__all__", None) or [
            name
            for name, value in inspect.getmembers(module)
            if face or getattr(value, "__module__", None) == module.__name__
            if not isinstance(value, typing.TypeVar)
        ]
        yield from (f"{module.__name__}.{n}" for n in names if n[0] != "_")


def _modules() -> Iterator[types.ModuleType]:
    """Yield the public modules."""
    yield dpjax
    for found in pkgutil.walk_packages(dpjax.__path__, "dpjax."):
        if "._" not in found.name:
            yield importlib.import_module(found.name)


def resolve(name: str) -> object:
    """Return the object that a dotted name refers to, or None."""
    value: object = dpjax
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    if value is None:  # a function hides the module of the same name
        module, _, member = name.rpartition(".")
        if module in sys.modules:
            value = getattr(sys.modules[module], member, None)
    return value


def missing(documented: Iterable[str]) -> list[str]:
    """Return the public names of objects that are documented under no name."""
    held = [resolve(name) for name in documented]
    ids = {id(x) for x in held if x is not None}
    values = {name: resolve(name) for name in sorted(set(public()))}
    return [
        name
        for name, value in values.items()
        if not isinstance(value, types.ModuleType) and id(value) not in ids
    ]


def directives() -> dict[str, list[str]]:
    """Map each name in a directive of an API page to the members that it lists."""
    found = {}
    for page in sorted((ROOT / "docs/api").glob("*.md")):
        for name, options in DIRECTIVE.findall(page.read_text()):
            listed = re.search(r"members: \[([^\]]*)\]", options)
            found[name] = listed[1].replace(",", " ").split() if listed else []
    return found


def asked_for() -> Iterator[str]:
    """Yield every name that the API pages will show."""
    for name, members in directives().items():
        value = resolve(name)
        yield name
        if isinstance(value, types.ModuleType):
            own = (
                n
                for n, x in vars(value).items()
                if not n.startswith("_")
                and getattr(x, "__module__", name) == name
                and not isinstance(x, types.ModuleType)
            )
            yield from (f"{name}.{member}" for member in members or own)
