"""The assumptions of guarantees that no code checks, in words, each stated once."""

from typing import Literal

import numpy as np

from dpjax.accounting.iteration import Setting

Order = Literal["fixed", "reshuffled"]  # the order of the examples in each epoch
Batches = Literal["full", "fixed", "reshuffled", "random"]

_BATCHES: dict[Batches, str] = {
    "full": "every step uses all examples",
    "fixed": "an example is in the same step of every epoch",
    "reshuffled": "an example is in one step of every epoch, chosen by a key that has "
    "nothing to do with the data",
    "random": "each batch is a fresh uniformly random subset that nobody learns",
}
# Assumptions of every guarantee.
_ALWAYS = (
    "n, all shapes, the initial parameters and the hyperparameters are public",
    "arithmetic is real and Gaussian noise ideal",
)
# Assumptions of guarantees that hold for the last iterate alone.
_CONTRACTION = (
    "nothing but the last iterate is released: no other iterate, loss or count",
    "what the setting says of the loss (convexity, smoothness, and the norm of "
    "gradients unless they are clipped) is true of every possible example",
    "prox does not depend on the data and never moves two points apart",
)
# The rounding bound of `_precision` assumes this error of gradients and prox.
_PRECISION = (
    "gradients and prox are as exact as a dot product in float64 (those of "
    "dpjax.solvers are)"
)


def every_step(batches: Batches) -> tuple[str, ...]:
    """The assumptions of a guarantee that composes all steps."""
    return (_BATCHES[batches], *_ALWAYS)


def assume_last_iterate(batches: Batches, setting: Setting) -> tuple[str, ...]:
    """The assumptions of a guarantee for the last iterate of contracting steps."""
    return (_BATCHES[batches], *_contracting(setting))


def assume_one_draw(setting: Setting) -> tuple[str, ...]:
    """The assumptions of a guarantee with one draw of noise, after all steps."""
    return (_PRECISION, *_contracting(setting))


def _contracting(setting: Setting) -> tuple[str, ...]:
    """The assumptions under which steps contract as the setting states."""
    more: tuple[str, ...] = ()
    if np.any(np.asarray(setting["diameter"]) < np.inf):
        more += ("prox maps into a set of the stated diameter",)
    if np.any(np.asarray(setting["strong_convexity"]) > 0):
        # An example that is left out contributes no curvature.
        more += ("every possible example is finite",)
    return more + _CONTRACTION + _ALWAYS
