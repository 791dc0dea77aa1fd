"""A fingerprint of a run's plan and random draws, which detects changes of either."""

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
from dpjax._core.plain import to_plain
from dpjax._core.typing import Key
from dpjax._plan.parameters import Bounded, RunParameters
from dpjax._plan.plan import Plan

# The version of the draws of samplers and noise. Raise the version if the same key
# gives other draws than before and `_probe` may not detect this change: `_probe` uses
# only the first steps of a plan, on one device.
DRAWS = 1
# Fields of a plan that are computed from its other fields.
_DERIVED = ("epsilon", "solved_for")
# The number of signs for each of two leaves. Two different streams agree in all 128
# signs of a step with probability 2⁻¹²⁸.
_SIGNS = 64


def fingerprint(plan: Plan, key: Key) -> str:
    """Compute a fingerprint, 32 hexadecimal digits, of a plan and its random draws.

    The fingerprint covers the draws from a fixed key that is no secret, with the same
    generator as `key`. The fingerprint does not depend on the secret bits of `key`.
    """
    found = {"plan": primary_fields(plan), "draws": describe_draws(plan, key)}
    return digest_of(found)[:32]


def primary_fields(run: RunParameters) -> dict[str, Any]:
    """Return a plan's fields as JSON values, without fields computed from others."""
    fields = to_plain(run.parameters())
    return {name: x for name, x in fields.items() if name not in _DERIVED}


def describe_draws(plan: Plan, key: Key) -> dict[str, Any]:
    """Describe how a key gives batches and noise under a plan, as JSON values.

    The description contains the name of the key's generator, a setting of JAX, the
    version of dpjax's random draws, and a digest of the draws from a public key. The
    description does not depend on the secret bits of the key.
    """
    generator = keys.generator_name(key)
    # This setting of JAX changes the bits that a threefry key gives.
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore
    return {
        "generator": generator,
        "jax_threefry_partitionable": bool(partitionable),
        "version": DRAWS,
        # The last three arguments only extend the cache's key: the draws may depend on
        # those settings as well.
        "of a public key": _probe(
            plan, generator, partitionable, default_float(), jax.default_backend()
        ),
    }


@functools.lru_cache(maxsize=64)
def _probe(plan: Plan, generator: str, *_: object) -> str:
    """The digest of the draws of a public key in the first two steps of a plan.

    The digest covers the batches and the signs of the noise. Rounding does not change a
    sign, so that machines with the same draws have the same digest.
    """
    key = jax.random.key(0, impl=keys.generator_of(generator))
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

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(draw(key)):
        digest.update(np.asarray(leaf).astype(np.int64).tobytes())
    return digest.hexdigest()[:32]


def canonical(value: Any) -> str:
    """Return a canonical JSON text of a value: equal values have equal texts."""
    return json.dumps(
        value,
        sort_keys=True,
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
    )


def digest_of(value: Any) -> str:
    """The SHA-256 of a value's canonical text, in hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def differences(kept: Any, given: Any, name: str) -> list[str]:
    """List the fields in which a saved and a given JSON value differ.

    Each line of the list has the name of a field, which begins with `name`, and both
    values of this field.
    """
    if isinstance(kept, dict) and isinstance(given, dict):
        return [
            line
            for key in sorted(kept.keys() | given.keys())
            for line in differences(kept.get(key), given.get(key), f"{name}.{key}")
        ]
    return [] if kept == given else [f"{name} (saved {kept!r}, given {given!r})"]
