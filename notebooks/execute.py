"""Run the notebooks from a clean state, in a fresh kernel each.

    pip install -e '.[notebooks]'
    python notebooks/execute.py [NAME ...]          # run, and write the outputs
    python notebooks/execute.py --check [NAME ...]  # run, and compare the outputs

`--check` fails if a cell raises, or if what it prints differs from what is committed.
Words must be the same. Numbers may differ as follows, pictures are not compared.

- In a cell with the tag "trained" by a twentieth of themselves: training and other
  descent is in float32, whose sums differ in their last bits between processors and
  compilers, and many steps carry that along.
- In all other cells by two units of their last printed digit: accountants compute in
  float64, and agree to what is printed but for how it is rounded.

Versions are not compared. Notebooks run on the CPU, so that outputs do not depend on
what else a machine has, and as many at a time as it has cores.
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
# The tests keep compiled programs there, too, and delete old ones.
CACHE = pathlib.Path(
    os.environ.get("DPJAX_TESTS_CACHE", pathlib.Path.home() / ".cache/dpjax-tests"),
    importlib.metadata.version("jaxlib"),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
VERSION = re.compile(r"\b(dpjax|jax) \d+(?:\.\d+)+\w*")
RELATIVE = 0.05  # where something was trained
# These begin first, so that no long notebook runs alone at the end.
LONGEST = ("choosing", "lora", "quickstart", "resume")


def execute(path):
    """The notebook with its outputs, without times and execution metadata."""
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
    """What was printed in one piece, however many writes it took."""
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
    """The texts of a cell's outputs, without those that stand in for pictures."""
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
    """One in the last digit that is printed, 0 for a whole number."""
    digits, _, exponent = number.partition("e")
    if "." not in digits and not exponent:
        return 0.0
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def alike(old, new, trained):
    """Whether two texts are the same but for what numbers may differ by."""
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (old, new)]
    if words[0] != words[1]:
        return False
    for a, b in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
        most = 2.5 * max(unit(a), unit(b))  # two, whatever floats make of them
        if trained:
            most = max(most, RELATIVE * abs(float(a)))
        if abs(float(a) - float(b)) > most:
            return False
    return True


def differences(old, new):
    """What to print of cells whose outputs are not alike."""
    for number, (a, b) in enumerate(zip(old.cells, new.cells, strict=True)):
        trained = "trained" in a.metadata.get("tags", ())
        if not alike(printed(a), printed(b), trained):
            yield f"cell {number}\n--- committed\n{printed(a)}\n+++ now\n{printed(b)}"


def main():
    """Run all notebooks, or those that are named."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", metavar="NAME")
    options.add_argument("--check", action="store_true")
    arguments = options.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.pop("DPJAX_DATA", None)  # committed is what runs anywhere
    # Several threads would wait actively for cores that other notebooks use.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # The programs of an earlier run are not compiled again.
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
    # A thread waits for a kernel, which is a process of its own.
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
