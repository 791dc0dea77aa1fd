"""Where modules and names were: import paths that go in the next release."""

import importlib
import sys
import types

MOVED = {
    "dpjax.explain": "dpjax._explain",
    "dpjax.accounting.descent": "dpjax.accounting.iteration._cyclic_gd",
    "dpjax.accounting.langevin": "dpjax.accounting.iteration._langevin",
    "dpjax.accounting.lipschitz": "dpjax.accounting.iteration._lipschitz",
    "dpjax.accounting.noisy_sgd": "dpjax.accounting.iteration._noisy_sgd",
    "dpjax.accounting.published": "dpjax.accounting.iteration.printed",
    "dpjax.accounting.random_assignment": (
        "dpjax.accounting.iteration._random_assignment"
    ),
    "dpjax.accounting.reduced_momentum": "dpjax.accounting.tree._reduced_momentum",
    "dpjax.accounting.scheduled": "dpjax.accounting.iteration._scheduled_gd",
    "dpjax.accounting.stability": "dpjax.accounting.iteration._stability",
    "dpjax.solvers.dp_nsgd": "dpjax.solvers._dp_nsgd",
    "dpjax.solvers.noisy_cyclic_gd": "dpjax.solvers._noisy_cyclic_gd",
    "dpjax.solvers.noisy_gd": "dpjax.solvers._noisy_gd",
    "dpjax.solvers.noisy_sgd": "dpjax.solvers._noisy_sgd",
    "dpjax.solvers.output_perturbation": "dpjax.solvers._output_perturbation",
    "dpjax.solvers.random_round_sgd": "dpjax.solvers._random_round_sgd",
    "dpjax.solvers.sensitivity_reduced_nsgd": (
        "dpjax.solvers._sensitivity_reduced_nsgd"
    ),
}

# Names that such a module had and its successor has not: where they are.
NAMES = {
    "dpjax.solvers.dp_nsgd": {
        "PrintedParameters": "printed.PrintedParameters",
        "printed_noise_multiplier": "printed.dp_nsgd_noise_multiplier",
        "printed_parameters": "printed.dp_nsgd_parameters",
    },
    "dpjax.solvers.output_perturbation": {
        "printed_scale": "printed.output_perturbation_scale",
    },
    "dpjax.solvers.random_round_sgd": {
        "printed_noise_multiplier": "printed.random_round_noise_multiplier",
    },
    "dpjax.solvers.sensitivity_reduced_nsgd": {"Curve": "_results.Curve"},
}


def modules(package: str) -> None:
    """Let what was in the package be imported from there.

    A name that the package has otherwise stays what it is.
    """
    for old, new in MOVED.items():
        parent, _, name = old.rpartition(".")
        if parent == package:
            former = types.ModuleType(old, f"Moved to {new}.")
            vars(former).update(_public(importlib.import_module(new)))
            for moved, place in NAMES.get(old, {}).items():
                module, _, member = place.rpartition(".")
                home = importlib.import_module(f"{parent}.{module}")
                setattr(former, moved, getattr(home, member))
            sys.modules[old] = former
            if not hasattr(sys.modules[parent], name):
                setattr(sys.modules[parent], name, former)


def _public(module: types.ModuleType) -> dict[str, object]:
    return {k: v for k, v in vars(module).items() if not k.startswith("_")}
