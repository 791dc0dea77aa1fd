"""What must not change while a run goes on: its plan, and what its key draws."""

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import keys
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import default_float
from dpjax._core.typing import Key
from dpjax._matrices.spec import Shape
from dpjax._plan import Bounded, Plan, QuantileClip
from dpjax._plan.schedule import Piece

# The draws of samplers and noise. Raise it where the same key gives others than before
# and `_probe` may not see it: it looks at the first steps of a plan on one device.
DRAWS = 1
# These follow from the others.
_DERIVED = ("epsilon", "solved_for")
# Which Python types are accepted for a field that is declared with a type.
_KINDS: dict[Any, Any] = {int: int, float: int | float, str: str}
# As many signs tell two streams apart but for a chance of 2⁻¹²⁸ a step.
_SIGNS = 64


def record(plan: Plan) -> dict[str, Any]:
    """A plan as plain values; an ε without bound is None."""
    found = {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if field.compare  # two plans are one that differ in how they were found
    }
    return found | {
        "epsilon": plan.epsilon if math.isfinite(plan.epsilon) else None,
        "adjacency": plan.adjacency.name,
        "schedule": [list(piece) for piece in plan.schedule],
        "quantile": plan.quantile and plan.quantile._asdict(),
        "shape": plan.shape and json.loads(canonical(plan.shape._asdict())),
    }


def from_record(found: dict[str, Any]) -> Plan:
    """The plan of a record, with the same numbers bit for bit.

    Raises:
      ValueError: no plan has this record.
    """
    try:
        plan = _plan(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no plan has this record: {error!r}") from error
    for field in dataclasses.fields(plan):
        value, kinds = getattr(plan, field.name), _KINDS.get(field.type, object)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"no plan has {field.name} {value!r}")
    return plan


def _plan(found: dict[str, Any]) -> Plan:
    """The plan of a record, whatever the types of its numbers."""
    shape, quantile = found["shape"], found["quantile"]
    rows: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x
        for name, x in (shape or {}).items()
    }
    made = {
        "epsilon": math.inf if found["epsilon"] is None else found["epsilon"],
        "adjacency": Adjacency[found["adjacency"]],
        "schedule": tuple(Piece(*piece) for piece in found["schedule"]),
        "quantile": quantile and QuantileClip(**quantile),
        "shape": Shape(**rows) if rows else None,
    }
    return Plan(**(found | made))


def mark(plan: Plan, key: Key) -> str:
    """32 hexadecimal digits for what a run of this plan with this key rests on."""
    found = {"plan": given(record(plan)), "draws": draws(plan, key)}
    return hashlib.sha256(canonical(found).encode()).hexdigest()[:32]


def given(of_plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan's record holds but for what follows from it."""
    return {name: x for name, x in of_plan.items() if name not in _DERIVED}


def draws(plan: Plan, key: Key) -> dict[str, Any]:
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
