"""The discrete Gaussian: exact weights, an exact table, and draws that follow both."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import dpjax
from dpjax import noise
from dpjax.noise import _discrete

KEY = jax.random.wrap_key_data(np.array([0, 17], np.uint32))


@pytest.fixture(scope="module")
def exact_masses():
    """The masses of D_512 at −8192, ..., 8191, to 60 digits."""
    with mpmath.workdps(60):
        masses = [
            mpmath.exp(-(mpmath.mpf(z) ** 2) / (2 * _discrete.WIDTH**2))
            for z in range(-8192, 8192)
        ]
        # What lies beyond is below 1e-50 of the whole.
        total = mpmath.fsum(masses)
        return [mass / total for mass in masses]


def test_integer_weights_are_those_of_the_discrete_gaussian(exact_masses):
    weights = _discrete.integer_weights()
    assert sum(weights) == 2**112
    pairs = zip(weights, exact_masses, strict=True)
    with mpmath.workdps(60):
        gaps = (abs(mpmath.mpf(w) / 2**112 - m) for w, m in pairs)
        assert mpmath.fsum(gaps) / 2 < 2.0**-98 < _discrete.TOTAL_VARIATION


def test_alias_table_holds_the_weights_exactly():
    table = _discrete.alias_table()
    result = [0] * 2**14
    for column, (packed, second, (high, low)) in enumerate(
        zip(*(x.tolist() for x in table), strict=True)
    ):
        threshold = packed >> 14 << 80 | second << 48 | (high << 32 | low) >> 16
        result[column] += threshold
        result[packed & 0x3FFF] += 2**98 - threshold
    assert result == _discrete.integer_weights()


@pytest.mark.parametrize(("width", "scale"), [(8, 4), (5, 3)])
def test_sum_of_two_draws_is_a_wider_discrete_gaussian(width, scale):
    # The theorem behind `discrete_gaussian`, at small widths and to 60 digits.
    with mpmath.workdps(60):

        def mass(z, variance):
            return mpmath.exp(-(mpmath.mpf(z) ** 2) / (2 * variance))

        wide = width**2 * (1 + scale**2)
        v = width * width / mpmath.sqrt(wide)
        theta = 2 * sum(mpmath.exp(-2 * (mpmath.pi * v * k) ** 2) for k in range(1, 9))
        around = range(-30 * width, 30 * width + 1)
        one = mpmath.fsum(mass(z, width**2) for z in around)
        both = mpmath.fsum(mass(z, wide) for z in range(-999, 1000))
        for z in (0, 1, 7, 50):
            result = mpmath.fsum(
                mass(z - scale * x, width**2) * mass(x, width**2) for x in around
            )
            ratio = result / one**2 / (mass(z, wide) / both)
            assert abs(mpmath.log(ratio)) <= 4 * theta


def test_draws_follow_the_table(exact_masses):
    size = 1_000_000
    draws = np.asarray(jax.jit(lambda k: _discrete.draw_table(k, (size,)))(KEY))
    assert draws.dtype == np.int32
    edges = np.arange(-1600, 1601, 64)
    masses = np.array([float(x) for x in exact_masses]).cumsum()
    below = masses[edges - 1 + 8192]  # the probability of less than each edge
    expected = size * np.diff(np.concatenate([[0.0], below, [1.0]]))
    places = np.searchsorted(edges, draws, side="right")
    counts = np.bincount(places, minlength=expected.size)
    statistic = np.sum((counts - expected) ** 2 / expected)
    # Chi-square with 51 degrees of freedom: above 120 with probability 2e-7.
    assert statistic < 120


@pytest.mark.parametrize("draws", [2, 3])
def test_wide_draws_have_the_stated_width(draws):
    size, width = 200_000, _discrete.width(draws)
    values = np.asarray(
        jax.jit(lambda k: _discrete.discrete_gaussian(k, (size,), draws))(KEY), float
    )
    # z = 5.5 in two comparisons for each case: false alarm below 2e-7.
    assert abs(values.std() / width - 1) < 5.5 / math.sqrt(2 * size)
    assert abs(values.mean()) < 5.5 * width / math.sqrt(size)
    # All residues occur: nothing coarser than the integers.
    assert len(np.unique(values % 64)) == 64


def test_ties_are_decided_by_the_last_bits(monkeypatch):
    # The first bits of all thresholds are those of all draws, so that every draw ties;
    # three quarters of the last bits are below the threshold.
    size = 4096
    last = np.tile(np.array([[3 << 30, 0]], np.uint32), (2**14, 1))
    packed = np.full(2**14, (5 << 14) | 8192, np.uint32)  # the alias is the number 0
    table = _discrete.AliasTable(packed, np.full(2**14, 9, np.uint32), last)
    monkeypatch.setattr(_discrete, "alias_table", lambda: table)

    def tied_words(key, shape):
        del key
        column = 100
        word = jnp.full(shape, (5 << 14) | column, jnp.uint32)
        return word, jnp.full(shape, 9, jnp.uint32)

    monkeypatch.setattr(_discrete, "word_pairs", tied_words)
    draws = np.asarray(jax.jit(lambda: _discrete.draw_table(KEY, (size,)))())
    assert set(draws.tolist()) == {100 - 8192, 0}
    share = np.mean(draws == 100 - 8192)
    assert abs(share - 0.75) < 5.5 * math.sqrt(0.75 * 0.25 / size)


@pytest.mark.diagonal
@pytest.mark.parametrize("draws", [2, 3])
def test_released_numbers_are_integers_of_the_lattice(draws):
    stddev = 2.0**-9 * 3
    tx = dpjax.add_discrete_gaussian_noise(stddev, key=KEY, draws=draws)
    with jax.enable_x64(True):
        sums = jax.device_put(np.linspace(-5.0, 5.0, 4001))
        noisy = np.asarray(jax.jit(lambda x: tx.update(x, tx.init(x))[0])(sums))
    spacing = float(noise.lattice_spacing(stddev, draws))
    numbers = noisy / spacing
    np.testing.assert_allclose(numbers, np.rint(numbers), rtol=0, atol=1e-3)
    noise_alone = noisy - np.asarray(sums)
    # z = 5.5: false alarm below 4e-8.
    assert abs(noise_alone.std() / stddev - 1) < 5.5 / math.sqrt(2 * 4001)


def test_sums_without_noise_pass_unchanged():
    tx = dpjax.add_discrete_gaussian_noise(0.0, key=KEY)
    sums = np.float32([0.1, -3.0, 1e30])
    passed = jax.jit(lambda x: tx.update(x, tx.init(x))[0])(sums)
    np.testing.assert_array_equal(passed, sums)


def test_bad_updates_become_nan_and_large_ones_are_clipped():
    tx = dpjax.add_discrete_gaussian_noise(0.5, key=KEY)
    sums = np.array([1.0, np.nan, np.inf, 1e30], np.float32)
    noisy = np.asarray(jax.jit(lambda x: tx.update(x, tx.init(x))[0])(sums))
    assert np.isfinite(noisy[0])
    assert np.all(np.isnan(noisy[1:3]))
    most = 2.0**40 * float(noise.lattice_spacing(0.5))
    np.testing.assert_allclose(noisy[3], most, rtol=1e-6)


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"stddev": -1.0}, "stddev"),
        ({"draws": 4}, "draws"),
        ({"key": 3}, "key"),
    ],
)
def test_invalid_argument_raises(bad, name):
    given = {"stddev": 1.0, "key": KEY} | bad
    with pytest.raises(ValueError, match=name):
        dpjax.add_discrete_gaussian_noise(given.pop("stddev"), **given)
