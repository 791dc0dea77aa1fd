"""Where modules were: import paths that go in the next release."""

import importlib
import sys

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
}


def modules(package: str) -> None:
    """Let what was in the package be imported from there.

    A name that the package has otherwise stays what it is.
    """
    for old, new in MOVED.items():
        parent, _, name = old.rpartition(".")
        if parent == package:
            sys.modules[old] = importlib.import_module(new)
            if not hasattr(sys.modules[parent], name):
                setattr(sys.modules[parent], name, sys.modules[old])
