"""Write and read results: what a script measured, on what device, with which versions.

A result is a file NAME.json, with the date, versions, device, arguments, how times were
measured, and tables of numbers. Each column has a template of `str.format`. The script
prints the column's cells by this template, and `report.py` shows the cells in a
document by the same template. A cell of several numbers, such as a mean and its spread,
is a list. A script that can measure in parts writes a file NAME.PART.json for each
part. Measuring one part again leaves the files of the other parts unchanged, with the
versions that measured them.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).with_name("results")
OURS = ("jax", "jaxlib", "optax")


class Table(NamedTuple):
    """Rows of numbers, and a template for each column's heading."""

    name: str
    columns: dict[str, str]
    rows: list[list[Any]]

    def markdown(self) -> str:
        """Return the table in Markdown, as documents show it."""
        lines = [list(self.columns), ["---"] * len(self.columns)]
        for row in self.rows:
            pairs = zip(self.columns.values(), row, strict=True)
            lines.append([shown(template, cell) for template, cell in pairs])
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(template: str, cell: Any) -> str:
    """Format a cell: nothing for None, strings unchanged, numbers by the template."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    return template.format(*cell if isinstance(cell, list) else [cell])


def parser(doc: str, folder: pathlib.Path = FOLDER) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all scripts have."""
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--results", type=pathlib.Path, default=folder)
    return options


def require(peers: Sequence[str], without: bool) -> list[str]:
    """Return the installed modules of peers; unless `without`, exit if some miss."""
    result = [name for name in peers if importlib.util.find_spec(name)]
    missing = sorted(set(peers) - set(result))
    if missing and not without:
        raise SystemExit(
            f"{', '.join(missing)} not installed: install the extra that this script's "
            "first lines name, or leave cells empty by --without-peers."
        )
    return result


def print_tables(*tables: Table) -> None:
    """Print tables for the person who runs a script."""
    for table in tables:
        print(f"\n{table.name}\n\n{table.markdown()}", flush=True)


def write(
    name: str,
    arguments: argparse.Namespace,
    tables: Sequence[Table],
    *,
    packages: Sequence[str] = OURS,
    device: str | None = None,
    times: str | None = None,
) -> None:
    """Write a result into the folder that the arguments name."""
    import jax

    result = {
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{p.replace("_", "-"): importlib.metadata.version(p) for p in packages},
        },
        "device": device or jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "arguments": {
            key: value
            for key, value in vars(arguments).items()
            if not isinstance(value, pathlib.Path)  # do not publish local paths
        },
        "times": times,
        "tables": {
            table.name: {"columns": table.columns, "rows": table.rows}
            for table in tables
        },
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"{name}.json"
    path.write_text(text(rounded(result)) + "\n", encoding="utf-8")
    print(f"\nResult: {path}")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read a result, with its tables as `Table`s by name."""
    result = json.loads(path.read_text(encoding="utf-8"))
    tables = {name: Table(name, **table) for name, table in result["tables"].items()}
    return {**result, "tables": tables}


def rounded(value: Any) -> Any:
    """Convert numbers of any library to Python's, rounded to eight digits."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return float(f"{float(value):.8g}")


def written(value: Any) -> str:
    """Return JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def text(value: Any, indent: str = "") -> str:
    """Return JSON with each row of a table on one line."""
    deeper = indent + " "
    if isinstance(value, dict) and value:
        items = [f"{written(k)}: {text(v, deeper)}" for k, v in value.items()]
        brackets = "{}"
    elif isinstance(value, list) and value and isinstance(value[0], list):
        items = [written(row) for row in value]
        brackets = "[]"
    else:
        return written(value)
    lines = ",\n".join(deeper + item for item in items)
    return f"{brackets[0]}\n{lines}\n{indent}{brackets[1]}"
