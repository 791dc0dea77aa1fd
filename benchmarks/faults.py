"""Count the faults that the tests cause, and how many of them the library survives.

    python benchmarks/faults.py

The script runs the tests of each kind of fault, and counts the cases in pytest's
output. For killed processes, the script counts the kills, and passes their number to
the test.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET

from _results import Table, parser, print_tables, write

TESTS = pathlib.Path(__file__).parents[1] / "tests"
KINDS = {
    "NaN or infinity in a shard of the batch, by engine and mesh": (
        "test_faults.py",
        "nan_in_a_shard",
    ),
    "the same between clipping and noise, by transformation": (
        "test_faults.py",
        "nan_between",
    ),
    "empty batches, and such that overflow": ("test_faults.py", "empty_and_overflow"),
    "another clock, other seeds": ("test_faults.py", "clocks"),
    "reading that fails": ("test_plan_batches.py", "reading_error"),
    "a full disk": ("test_checkpoint.py", "full_disk"),
    "a save that ends between its writes": ("test_checkpoint.py", "checkpoint_or_none"),
    "damaged bits": ("test_checkpoint.py", "changed_or_missing"),
    "another mesh": ("test_checkpoint.py", "onto_another_mesh"),
    "a process that is killed": ("test_checkpoint.py", "killed_fifty_times"),
}
KILLS = re.compile(r"kill_and_resume\(tmp_path, plan, random\.Random\(2\), (\d+)\)")


def counted(file, name):
    """Return the number of cases of a test, and the number of passed cases."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", TESTS / file]
        command += ["-k", name, "-m", "slow or not slow", f"--junitxml={report}"]
        subprocess.run(command, cwd=TESTS.parent, check=False, capture_output=True)
        cases = list(ET.parse(report).getroot().iter("testcase"))
    passed = sum(
        not case.findall("failure") and not case.findall("error") for case in cases
    )
    if "killed" in name:
        (kills,) = KILLS.findall((TESTS / file).read_text(encoding="utf-8"))
        return int(kills), int(kills) * passed
    return len(cases), passed


def main():
    """Run the tests, print and write the table."""
    arguments = parser(__doc__).parse_args()
    rows = [[kind, *counted(*test)] for kind, test in KINDS.items()]
    columns = {"fault": "{}", "cases": "{}", "survived": "{}"}
    table = Table("faults", columns, rows)
    print_tables(table)
    write("faults", arguments, [table])


if __name__ == "__main__":
    main()
