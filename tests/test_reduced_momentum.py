"""Momentum of reduced sensitivity against Algorithm 4, its privacy by brute force."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import Adjacency
from dpjax._core.keys import stream
from dpjax.accounting import tree as accounting
from dpjax.noise import _reduced_momentum as reduced_momentum
from dpjax.noise import tree
from dpjax.noise._gaussian import gaussian_like
from dpjax.noise._reduced_momentum import Terms

# The key of seed 21, made without compiling anything.
KEY = jax.random.wrap_key_data(np.array([0, 21], np.uint32))


def released_nodes(num_steps, n):
    """The nodes of each tree, found from the cover of every sum that is needed."""
    anchor, change, drift = set(), set(), set()
    for t in range(1, num_steps + 1):
        nodes = tree.compose(max(t - n, 0) + 1, t)
        (anchor if t < 2 * n else change).update(nodes)
        drift.update(tree.compose(1, t))
    return Terms(anchor, change, drift)


def weighted_sum(leaves, y, z, beta):
    return sum(beta ** (z - i) * leaves[i - 1] for i in range(y, z + 1))


SHAPES = [(1, 1), (5, 1), (8, 4), (9, 3), (20, 5), (24, 8), (28, 7), (33, 11), (6, 6)]


@pytest.mark.diagonal
@pytest.mark.parametrize("shape", [*SHAPES, (17, 5), (40, 6)])
@pytest.mark.parametrize("beta", [0.0, 0.6, 0.95])
def test_mu_equals_that_of_the_released_nodes(beta, shape, x64):
    noises = Terms(1.3, 0.4, 2.2)
    num_steps, n = shape
    trees = released_nodes(num_steps, n)
    worst = 0.0
    for place in range(1, n + 1):
        steps = range(place, num_steps + 1, n)
        worst = max(
            worst,
            sum(
                sum(beta ** (z - i) for i in steps if y <= i <= z) ** 2 / s**2
                for nodes, s in zip(trees, noises, strict=True)
                for y, z in nodes
            ),
        )
    mu = accounting.reduced_momentum_mu(
        noises,
        num_steps=num_steps,
        decay=beta,
        steps_per_epoch=n,
        adjacency=Adjacency.REPLACE,
    )
    np.testing.assert_allclose(mu, 2 * math.sqrt(worst), rtol=1e-12)
    assert mu >= 2 * math.sqrt(worst) * (1 - 1e-15)


def test_aligned_contributions_are_the_worst_case():
    # Contributions in the unit ball of the plane, different in every tree and epoch.
    num_steps, n, beta = 20, 5, 0.8
    trees, rng = released_nodes(num_steps, n), np.random.default_rng(0)
    noises = Terms(1.3, 0.4, 2.2)
    mu = accounting.reduced_momentum_mu(
        noises,
        num_steps=num_steps,
        decay=beta,
        steps_per_epoch=n,
        adjacency=Adjacency.ZERO_OUT,
    )

    def squared_mu(place, vectors):
        return sum(
            np.sum(
                sum(
                    beta ** (z - i) * vectors[k][(i - 1) // n]
                    for i in range(place, num_steps + 1, n)
                    if y <= i <= z
                )
                ** 2
            )
            / noises[k] ** 2
            for k, nodes in enumerate(trees)
            for y, z in nodes
            if any(y <= i <= z for i in range(place, num_steps + 1, n))
        )

    for _ in range(100):
        vectors = rng.normal(size=(3, 4, 2))
        vectors /= np.maximum(1, np.linalg.norm(vectors, axis=-1, keepdims=True))
        for place in range(1, n + 1):
            assert squared_mu(place, vectors) <= float(mu) ** 2
    aligned = np.broadcast_to([0.6, 0.8], (3, 4, 2))
    attained = max(squared_mu(place, aligned) for place in range(1, n + 1))
    np.testing.assert_allclose(attained, float(mu) ** 2, rtol=1e-6)


def draw_node_noise(num_steps, n, d, stddevs, keys):
    """The noise of each node of the three trees, as the implementation draws it."""
    trees = [sorted(nodes) for nodes in released_nodes(num_steps, n)]

    def draw_tree(name, key, nodes, stddev):
        if not nodes:
            return ()
        if name == "drift":  # the node that ends at a step has the step's key
            return jax.vmap(
                lambda end: gaussian_like(
                    jax.random.fold_in(key, end), jnp.zeros(d), stddev
                )
            )(np.array([z for _, z in nodes]))
        levels = np.array([(z - y + 1).bit_length() - 1 for y, z in nodes])
        index = np.array([z for _, z in nodes]) >> levels
        draw = jax.vmap(
            lambda level, i: tree.node_noise(key, level, i, jnp.zeros(d), stddev)
        )
        return draw(levels, index)

    @jax.jit
    def all_draws(keys):
        keys = Terms(*(stream(k, "windows") for k in keys[:2]), keys.drift)
        return [
            draw_tree(*of)
            for of in zip(Terms._fields, keys, trees, stddevs, strict=True)
        ]

    return Terms(
        *(
            dict(zip(nodes, np.float64(noise), strict=True))
            for nodes, noise in zip(trees, all_draws(keys), strict=True)
        )
    )


def algorithm_4(terms, num_steps, n, beta, gamma, draws):
    """Every momentum directly from the nodes, by the double sum over earlier epochs."""
    G, H, R = (
        {node: weighted_sum(np.float64(x), *node, beta) + noise[node] for node in nodes}
        for x, nodes, noise in zip(
            terms, released_nodes(num_steps, n), draws, strict=True
        )
    )

    def rebuild_momentum(nodes, a, b):
        if b < a:
            return 0.0
        return sum(beta ** (b - z) * nodes[y, z] for y, z in tree.compose(a, b))

    out = []
    for t in range(1, num_steps + 1):
        q, r = divmod(t, n)
        total = beta ** (t - r) * rebuild_momentum(G, 1, r)
        for i in range(q):
            total = total + beta ** (n * i) * (1 - gamma) ** (
                q - i - 1
            ) * rebuild_momentum(G, r + 1, r + n)
        for i in range(1, q):
            weight = sum((1 - gamma) ** j * beta ** ((i - 1 - j) * n) for j in range(i))
            total = total + weight * rebuild_momentum(H, t - i * n + 1, t - (i - 1) * n)
        out.append((1 - beta) * (total + rebuild_momentum(R, 1, t)))
    return np.array(out)


def run_recursion(terms, num_steps, n, beta, gamma, stddevs, keys):
    def step(state, inputs):
        number, term = inputs
        momentum, state = reduced_momentum.update(
            state,
            number,
            term,
            steps_per_epoch=n,
            decay=jnp.asarray(beta),
            refresh=jnp.asarray(gamma),
            stddevs=stddevs,
            keys=keys,
        )
        return state, momentum

    state = reduced_momentum.init(num_steps, n, terms.drift.shape[1])
    steps = jnp.arange(1, num_steps + 1)
    return jax.lax.scan(step, state, (steps, terms))[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "n"), [(20, 5), (24, 8), (28, 7), (6, 6), (7, 1)]
)
def test_recursion_equals_algorithm_4(num_steps, n):
    rng = np.random.default_rng(num_steps)
    terms = Terms(*(np.float32(rng.normal(size=(num_steps, 3))) for _ in range(3)))
    keys = Terms(*jax.random.split(KEY, 3))
    for stddevs in (Terms(0.0, 0.0, 0.0), Terms(0.7, 0.3, 1.1)):
        args = (terms, num_steps, n, 0.9, 0.2)
        result = jax.jit(lambda args=args, s=stddevs: run_recursion(*args, s, keys))()
        draws = draw_node_noise(num_steps, n, 3, stddevs, keys)
        np.testing.assert_allclose(result, algorithm_4(*args, draws), atol=1e-5)


@pytest.mark.matrix
def test_unclipped_reduced_momentum_equals_momentum():
    # Telescoping: with the true changes, any γ gives Σ β^{t−i} (g_i + drift_i).
    rng = np.random.default_rng(3)
    num_steps, n, beta, gamma = 32, 8, 0.9, 0.3
    g = rng.normal(size=(num_steps, 2))
    h = g.copy()
    h[n:] = (1 - gamma) * (g[n:] - g[:-n]) + gamma * g[n:]
    drift = rng.normal(size=(num_steps, 2))
    terms, quiet = Terms(*map(np.float32, (g, h, drift))), Terms(0.0, 0.0, 0.0)
    momentum, expected = np.zeros(2), []
    for x in g + drift:
        momentum = beta * momentum + (1 - beta) * x
        expected.append(momentum)

    @jax.jit
    def momenta():
        keys = Terms(*jax.random.split(KEY, 3))
        return run_recursion(terms, num_steps, n, beta, gamma, quiet, keys)

    result = momenta()
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_noise_has_stated_variance_and_differs_by_node():
    num_steps, n, beta, gamma, d = 20, 5, 0.8, 0.25, 20_000
    variance = reduced_momentum.momentum_variance(
        num_steps, n, decay=beta, refresh=gamma
    )

    @jax.jit
    def draw(stddevs):
        zeros = Terms(*(jnp.zeros((num_steps, d)) for _ in range(3)))
        keys = Terms(*jax.random.split(KEY, 3))
        return run_recursion(zeros, num_steps, n, beta, gamma, stddevs, keys)

    for stddevs in (Terms(0.7, 0.3, 1.1), Terms(0.0, 2.0, 0.0), Terms(2.0, 0.0, 0.0)):
        noise = np.asarray(draw(stddevs))
        stated = (1 - beta) * np.sqrt(
            sum(v * s * s for v, s in zip(variance, stddevs, strict=True))
        )
        # 20 standard deviations of 20,000 draws each: five of their standard errors.
        np.testing.assert_allclose(
            np.std(noise, axis=1), stated, rtol=5 / math.sqrt(2 * d), atol=1e-6
        )


def test_window_variance_matches_brute_force():
    for num_steps, n in SHAPES:
        for beta in (0.0, 0.7):
            brute = [
                sum(
                    beta ** (2 * (t - z)) for _, z in tree.compose(max(t - n, 0) + 1, t)
                )
                for t in range(1, num_steps + 1)
            ]
            result = reduced_momentum.window_variance(num_steps, n, beta)
            np.testing.assert_allclose(result, brute, rtol=1e-12)


def test_invalid_arguments_raise():
    mu = functools.partial(
        accounting.reduced_momentum_mu,
        num_steps=8,
        decay=0.5,
        steps_per_epoch=4,
        adjacency=Adjacency.REPLACE,
    )
    assert mu((0.0, 1.0, 1.0)) == np.inf
    assert mu((1.0, 1.0, np.inf)) < mu((1.0, 1.0, 1.0))
    for name, bad in [
        ("num_steps", {"num_steps": 0}),
        ("decay", {"decay": 1.0}),
        ("steps_per_epoch", {"steps_per_epoch": 0}),
        ("adjacency", {"adjacency": None}),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            mu((1.0, 1.0, 1.0), **bad)
    with pytest.raises(ValueError, match="^noise_multipliers must"):
        mu((1.0, -1.0, 1.0))
