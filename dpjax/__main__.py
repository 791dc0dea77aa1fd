"""The program `python -m dpjax`, which computes numbers of private runs.

Most options have the names of arguments of `dpjax.plan`. The numbers of the output come
from the plan that `dpjax.plan` makes. The program parses its options before it imports
JAX. So help texts and errors of the option parser do not wait for the import of JAX.
"""

import argparse
import importlib.metadata
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from dpjax._core.adjacency import Adjacency

PROGRAM = "python -m dpjax"
# A copy of the keys of `dpjax._plan.mechanisms.SAMPLINGS`, since that module imports
# JAX.
_SAMPLINGS = (
    *("poisson", "fixed_size", "fixed", "reshuffled"),
    *("cyclic_poisson", "random_bins", "fresh_bins"),
)
_COMMANDS = {
    "epsilon": (
        "Computes the ε of a run from its noise, batch size and steps.",
        "A loader that goes through all examples in each epoch is not a Poisson "
        "sampler: give --sampling reshuffled, or fixed if the loader does not "
        "shuffle. Give --num-epochs for such a loader: --num-steps counts epochs of "
        "n / b steps, rounded up, and a loader that drops the last, smaller batch "
        "has shorter epochs.",
        ("--num-examples 60000 --batch-size 256 --num-epochs 20",
         "--noise-multiplier 0.8 --delta 1e-6 --sampling poisson"),
    ),
    "noise": (
        "Computes the minimum noise multiplier at which a run has at most a given ε.",
        "The result is rounded up. The help of 'epsilon' explains --sampling.",
        ("--num-examples 60000 --batch-size 256 --num-steps 5000",
         "--epsilon 3 --delta 1e-6 --sampling poisson"),
    ),
    "plan": (
        "Computes one of ε, noise, steps and batch size from the others.",
        "With --json, the command prints the output of plan.guarantee.to_json(), "
        "which 'report' reads. With --sampling auto or --noise auto, the command "
        "chooses the mechanism with the least noise in SGD's parameters, and shows "
        "the comparison.",
        ("--num-examples 60000 --num-steps 5000 --noise-multiplier 0.9",
         "--epsilon 3 --delta 1e-6 --clip-norm 1 --sampling poisson"),
    ),
    "report": (
        "Writes the statement for a paper from the output of "
        "plan.guarantee.to_json().",
        "ε is computed again from the record's own numbers, and a record that claims "
        "a smaller ε is refused. No record can show whether its numbers are those of "
        "the run.",
        ("guarantee.json --html > report.html",),
    ),
}  # fmt: skip
_HELP = {
    "num_examples": ("n", "the size of the data set"),
    "batch_size": ("b", "the expected number of examples in a step"),
    "num_steps": ("T", "the number of steps of the run"),
    "num_epochs": (
        "E",
        "the number of epochs of n / b steps, rounded up, instead of steps",
    ),
    "epsilon": ("ε", "the ε of the whole run at δ"),
    "noise_multiplier": (
        "σ",
        "standard deviation of the noise on a sum, over the clip norm",
    ),
    "delta": ("δ", "the δ of the guarantee, well below 1 / n"),
    "clip_norm": ("C", "the bound on the L2 norm of one example's gradient"),
    "max_batch_size": (
        "m",
        "the maximum number of examples in a batch of random size; ",
    ),
    "momentum": ("β", "the momentum of SGD, needed unless noise is independent"),
}


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and end the process with exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `python -m dpjax`.

    Args:
      argv: the arguments after `python -m dpjax`; None for `sys.argv[1:]`.

    Returns:
      The exit code: 0 for success, or 2 after an error line on standard error. Invalid
      options end the process with exit code 2, and `--help` and `--version` end the
      process with exit code 0.
    """
    given = vars(_make_parser().parse_args(argv))
    command, as_json = given.pop("command"), given.pop("json")
    from dpjax._cli.plan import show_plan
    from dpjax._cli.report import report

    try:
        if command == "report":
            form = "json" if as_json else "html" if given["html"] else "text"
            print(report(given["guarantee"], form))
        else:
            print(show_plan(command, given, as_json))
    except (ValueError, ArithmeticError, OSError) as error:
        message = _use_option_values(" ".join(str(error).split()))
        print(f"{PROGRAM} {command}: {message}", file=sys.stderr)
        return 2
    return 0


def _use_option_values(message: str) -> str:
    """Replace names of adjacencies in an error message by the values of `--adjacency`.

    For instance, ADD_REMOVE is replaced by add_remove.
    """
    # "add_remove" replaces both Adjacency.ADD_REMOVE and ADD_REMOVE.
    for adjacency in Adjacency:
        message = message.replace(repr(adjacency), adjacency.value)
        message = message.replace(adjacency.name, adjacency.value)
    return message


def _make_parser() -> _Parser:
    """Make the parser with all commands and their options."""
    parser = _Parser(prog=PROGRAM, description="Computes the numbers of private runs.")
    version = f"dpjax {importlib.metadata.version('dpjax')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (summary, note, example) in _COMMANDS.items():
        lines = " \\\n    ".join(example)
        subparser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary}\n\n{textwrap.fill(note, 79)}",
            epilog=f"example:\n  {PROGRAM} {name} {lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        forms = subparser.add_mutually_exclusive_group()
        if name == "report":
            subparser.add_argument("guarantee", help="a file of JSON")
            forms.add_argument("--html", action="store_true", help="print a web page")
        else:
            _add_options(subparser, name)
        forms.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of a command to its parser."""
    planned = command == "plan"

    # argparse formats help texts with %, so a literal % must be written as %%.
    def add(name: str, kind: type, *, required: bool, to: Any = parser) -> None:
        symbol, text = _HELP[name]
        if name == "max_batch_size":
            text += "by default " + (
                "the least number that a search finds at which overflow costs at most "
                "1 %% of δ, and not below the mean plus three standard deviations (but "
                "at most n)"
                if planned
                else "n for Poisson batches"
            )
        option = f"--{name.replace('_', '-')}"
        to.add_argument(option, type=kind, required=required, metavar=symbol, help=text)

    def choose(
        name: str, values: tuple[str, ...], text: str, default: str | None = None
    ) -> None:
        parser.add_argument(
            f"--{name}",
            choices=values,
            default=default,
            required=default is None,
            help=f"{text}; by default {default}" if default else text,
        )

    add("num_examples", int, required=True)
    add("batch_size", int, required=not planned)
    steps = parser.add_mutually_exclusive_group(required=not planned)
    add("num_steps", int, required=False, to=steps)
    add("num_epochs", int, required=False, to=steps)
    if command != "epsilon":
        add("epsilon", float, required=not planned)
    if command != "noise":
        add("noise_multiplier", float, required=not planned)
    add("delta", float, required=True)
    if planned:
        add("clip_norm", float, required=True)
    add("max_batch_size", int, required=False)
    if planned:
        add("momentum", float, required=False)
    text = "how the training loop really draws examples"
    choose("sampling", (*_SAMPLINGS, *["auto"] * planned), text)
    text = "which data sets the guarantee compares"
    choose("adjacency", tuple(a.value for a in Adjacency), text, "add_remove")
    choose("unit", ("example", "user"), "the unit of privacy", "example")
    if planned:
        text = "whether later steps cancel noise of earlier steps"
        choose("noise", ("independent", "correlated", "auto"), text, "independent")


if __name__ == "__main__":
    sys.exit(main())
