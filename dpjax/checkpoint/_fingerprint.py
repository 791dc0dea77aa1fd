"""What must not change while a run goes on: its plan, and what its key draws."""

import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import keys
from dpjax._core.float64 import default_float
from dpjax._core.typing import Key
from dpjax._plan import Bounded, Plan

# The draws of samplers and noise. Raise it where the same key gives others than before
# and `_probe` may not see it: it looks at the first steps of a plan on one device.
DRAWS = 1
# These follow from the others.
_DERIVED = ("epsilon", "solved_for")
# As many signs tell two streams apart but for a chance of 2⁻¹²⁸ a step.
_SIGNS = 64


def fingerprint(plan: Plan, key: Key) -> str:
    """32 hexadecimal digits for what a run of this plan with this key rests on."""
    found = {"plan": primary_fields(plan.to_dict()), "draws": describe_draws(plan, key)}
    return hashlib.sha256(canonical(found).encode()).hexdigest()[:32]


def primary_fields(of_plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan's record holds but for what follows from it."""
    return {name: x for name, x in of_plan.items() if name not in _DERIVED}


def describe_draws(plan: Plan, key: Key) -> dict[str, Any]:
    """What decides which batches and noise such a key draws, as plain values."""
    generator = keys.generator_name(key)
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore
    return {
        "generator": generator,
        "jax_threefry_partitionable": bool(partitionable),
        "version": DRAWS,
        # With what its draws may depend on besides.
        "of a public key": _probe(
            plan, generator, partitionable, default_float(), jax.default_backend()
        ),
    }


@functools.lru_cache(maxsize=64)
def _probe(plan: Plan, generator: str, *_: object) -> str:
    """The digest of what a key that everybody knows draws in the first two steps.

    The batches, and the signs of the noise, which no rounding turns: the same on all
    machines that draw the same.
    """
    key = jax.random.key(0, impl=generator)
    steps = min(2, plan.num_steps)

    @jax.jit
    def draw(key: Key) -> tuple[list[Any], list[Any]]:
        tree = {name: jnp.zeros(_SIGNS, jnp.float32) for name in "ab"}
        sums = Bounded(tree, jnp.zeros((), jnp.float32)) if plan.quantile else tree
        tx = plan.optimizer(optax.identity(), key=key)
        state, signs = tx.init(tree), []
        for _ in range(steps):
            noise, state = tx.update(sums, state)
            signs.append(jax.tree.map(lambda x: jnp.sign(x).astype(jnp.int8), noise))
        return [plan.batch(step, key) for step in range(steps)], signs

    found = hashlib.sha256()
    for leaf in jax.tree.leaves(draw(key)):
        found.update(np.asarray(leaf).astype(np.int64).tobytes())
    return found.hexdigest()[:32]


def canonical(found: Any) -> str:
    """JSON that is the same for the same values."""
    return json.dumps(
        found,
        sort_keys=True,
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
    )


def differences(kept: Any, given: Any, name: str = "") -> list[str]:
    """What differs between two records, by name."""
    if isinstance(kept, dict) and isinstance(given, dict):
        return [
            line
            for key in sorted(kept.keys() | given.keys())
            for line in differences(
                kept.get(key), given.get(key), f"{name}.{key}" if name else key
            )
        ]
    return [] if kept == given else [f"{name} (kept {kept!r}, given {given!r})"]
