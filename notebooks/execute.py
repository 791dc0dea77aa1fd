"""Run each notebook from a clean state, in a fresh kernel.

    pip install -e '.[notebooks]'
    python notebooks/execute.py [NAME ...]          # run, and write the outputs
    python notebooks/execute.py --check [NAME ...]  # run, and compare the outputs

`--check` writes nothing. It fails if a cell raises an error, or if the printed output
of a cell differs from the committed output. Words must be equal. Numbers may differ as
follows:

- in a cell with the tag "trained", by a twentieth of the committed number (or as in
  other cells, if this is more). Training is in float32, where sums differ in the last
  bits between processors and compilers, and many steps amplify these differences.
- in all other cells, by two units of the last printed digit. Accountants compute in
  float64, so that their results differ only in the rounding of the printed digits.

Pictures and the versions of dpjax and jax are not compared. Notebooks run on the CPU,
so that outputs do not depend on other devices of the machine. As many notebooks run at
a time as the machine has cores.
"""

import argparse
import concurrent.futures
import importlib.metadata
import os
import pathlib
import re
import time

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent
# The tests store compiled programs in the same folder, and delete old programs.
CACHE = pathlib.Path(
    os.environ.get("DPJAX_TESTS_CACHE", pathlib.Path.home() / ".cache/dpjax-tests"),
    importlib.metadata.version("jaxlib"),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
VERSION = re.compile(r"\b(dpjax|jax) \d+(?:\.\d+)+\w*")
RELATIVE = 0.05  # for cells with the tag "trained"
# These notebooks start first, so that no long notebook runs alone at the end.
LONGEST = ("audit", "choosing", "lora", "quickstart", "resume")


def execute(path):
    """Run a notebook; return it with its outputs, without times and other metadata."""
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [*joined(cell.outputs)]
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return notebook


def joined(outputs):
    """Yield outputs; consecutive texts of one stream are joined into one output."""
    last = None
    for output in outputs:
        if last is not None and output.get("name") == last.get("name") is not None:
            last.text += output.text
            continue
        if last is not None:
            yield last
        last = output
    if last is not None:
        yield last


def printed(cell):
    """Return the printed text of a cell's outputs, without pictures and versions."""
    texts = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type == "error":
            texts.append(f"{output.ename}: {output.evalue}")
        elif "image/png" not in output.data:
            texts.append(output.data.get("text/plain", ""))
    return VERSION.sub(r"\1", "\n".join(texts))


def unit(number):
    """Return one unit of a number's last printed digit, or 0 for a whole number."""
    digits, _, exponent = number.partition("e")
    if "." not in digits and not exponent:
        return 0.0
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def alike(old, new, trained):
    """Return whether two texts agree, up to the permitted differences of numbers."""
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (old, new)]
    if words[0] != words[1]:
        return False
    for a, b in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
        most = 2.5 * max(unit(a), unit(b))  # two units, and room for rounding
        if trained:
            most = max(most, RELATIVE * abs(float(a)))
        if abs(float(a) - float(b)) > most:
            return False
    return True


def differences(old, new):
    """Yield a report on each cell whose two outputs are not alike."""
    for number, (a, b) in enumerate(zip(old.cells, new.cells, strict=True)):
        trained = "trained" in a.metadata.get("tags", ())
        if not alike(printed(a), printed(b), trained):
            yield f"cell {number}\n--- committed\n{printed(a)}\n+++ now\n{printed(b)}"


def main():
    """Run the named notebooks, or all notebooks if none is named."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", metavar="NAME")
    options.add_argument("--check", action="store_true")
    arguments = options.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.pop("DPJAX_DATA", None)  # committed outputs use no local data
    # More threads would occupy, while they wait, cores that other notebooks need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # With this cache, the programs of an earlier run are not compiled again.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    names = [pathlib.Path(name).stem for name in arguments.names]
    paths = [
        path
        for path in sorted(FOLDER.glob("*.ipynb"))
        if not names or path.stem in names
    ]
    paths.sort(key=lambda path: path.stem not in LONGEST)
    failed = False
    # Each thread waits for one kernel, which is a separate process.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for path, notebook in zip(paths, threads.map(execute, paths), strict=True):
            if not arguments.check:
                nbformat.write(notebook, path)
                continue
            found = [*differences(nbformat.read(path, as_version=4), notebook)]
            print(*found, sep="\n", end="\n" if found else "")
            failed |= bool(found)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
