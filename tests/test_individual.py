"""Individual privacy losses: sums against NumPy, rounding, padding, invalid values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting import gdp, individual

N, B, STEPS, CLIP, STDDEV = 23, 6, 40, 0.7, 3.1


def drawn_steps():
    rng = np.random.default_rng(1)
    indices = np.stack([rng.permutation(N)[:B] for _ in range(STEPS)])
    norms = rng.exponential(0.7, (STEPS, B)).astype(np.float32)
    return norms, indices.astype(np.int32), rng.uniform(size=(STEPS, B)) < 0.8


@jax.jit
def accumulated(steps):
    def one(losses, step):
        norms, indices, mask = step
        losses = individual.update(
            losses, norms, indices, mask=mask, clip_norm=CLIP, stddev=STDDEV
        )
        return losses, None

    losses, _ = jax.lax.scan(one, individual.init(N), steps)
    return individual.gdp(losses)


def test_individual_mu_is_the_root_of_the_sum_of_squares():
    norms, indices, mask = steps = drawn_steps()
    squares = np.zeros(N)
    for t, j in np.argwhere(mask):
        squares[indices[t, j]] += (min(float(norms[t, j]), CLIP) / STDDEV) ** 2
    exact, result = np.sqrt(squares), np.asarray(accumulated(steps), np.float64)
    assert np.all(result >= exact)
    # At most 17 eps for each of about nine participations.
    np.testing.assert_allclose(result, exact, rtol=2e-5)


def test_individual_mu_of_clipped_examples_equals_composition():
    norms, indices, _ = drawn_steps()
    full = np.full_like(norms, 10.0)
    full[0] = np.nan
    indices[:] = np.arange(B)
    result = accumulated((full, indices, np.full(norms.shape, True)))
    composed = float(gdp.compose(np.full(STEPS, CLIP / STDDEV)))
    np.testing.assert_allclose(result[:B], composed, rtol=1e-4)
    assert np.all(result[:B] >= composed)
    assert np.all(result[B:] == 0)


def test_invalid_indices_give_no_privacy_unless_they_are_padding():
    norms, indices, mask = drawn_steps()
    for wrong in (N, -1):
        changed = indices.copy()
        changed[3, 0] = wrong
        for valid in (True, False):
            shown = mask.copy()
            shown[3, 0] = valid
            result = np.asarray(accumulated((norms, changed, shown)))
            assert np.all(np.isinf(result)) == valid


def test_wide_integers_keep_their_values():
    # JAX keeps the lowest 32 bits of an integer. Inside jit, these arrays are concrete.
    of_step = {"mask": np.ones(2, bool), "clip_norm": 1.0, "stddev": 2.0}

    @jax.jit
    def losses():
        start = individual.init(2)
        steps = [(np.array([2**33, 1]), np.arange(2))]
        for wrong in (2**32 + 1, -(2**32) + 1, -(2**63)):
            steps.append((np.ones(2), np.array([0, wrong])))
        return [individual.update(start, *x, **of_step).squares for x in steps]

    wide_norms, *wide_indices = losses()
    np.testing.assert_allclose(wide_norms, 0.25, rtol=1e-5)
    assert np.all(np.isinf(wide_indices))


def test_invalid_arguments_raise():
    usual = {"mask": np.ones(2, bool), "clip_norm": 1.0, "stddev": 2.0}
    for changed, name in (
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"stddev": -1.0}, "stddev"),
        ({"mask": np.ones(3, bool)}, "same shape"),
        ({"mask": np.ones(2)}, "boolean"),
    ):
        with pytest.raises(ValueError, match=name):
            individual.update(
                individual.PrivateLosses(np.zeros(3, np.float32)),
                np.ones(2, np.float32),
                np.arange(2),
                **{**usual, **changed},
            )
    with pytest.raises(ValueError, match="num_examples"):
        individual.init(0)
    assert individual.init(2).squares.dtype == jnp.float32
