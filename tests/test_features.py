"""Features of one example against loops of NumPy, and what makes them free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import features

IMAGES = np.random.default_rng(0).uniform(size=(6, 9, 7))
CELLS, ORIENTATIONS = 3, 8


@pytest.fixture(scope="module")
def histograms():
    """The features of a batch of images."""

    def of_one(image):
        return features.oriented_gradients(
            image, cells=CELLS, orientations=ORIENTATIONS
        )

    return jax.jit(jax.vmap(of_one))


def by_loops(image, cells, orientations):
    """The definition, pixel by pixel, in float64."""
    height, width = image.shape
    sums = np.zeros((cells, cells, orientations))

    def shares(place, size):
        centers = [(i + 0.5) * size / cells - 0.5 for i in range(cells)]
        raw = [max(0.0, 1 - abs(place - c) * cells / size) for c in centers]
        return [x / sum(raw) for x in raw]

    for row in range(height):
        for column in range(width):
            below, above = min(row + 1, height - 1), max(row - 1, 0)
            after, before = min(column + 1, width - 1), max(column - 1, 0)
            down = (image[below, column] - image[above, column]) / 2
            right = (image[row, after] - image[row, before]) / 2
            turn = np.angle(right + 1j * down) / (2 * np.pi) % 1 * orientations
            first = int(turn)
            rest = turn - first
            for i, of_row in enumerate(shares(row, height)):
                for j, of_column in enumerate(shares(column, width)):
                    vote = of_row * of_column * np.hypot(down, right)
                    sums[i, j, first % orientations] += (1 - rest) * vote
                    sums[i, j, (first + 1) % orientations] += rest * vote
    energy = (sums**2).sum(-1)
    result = np.empty_like(sums)
    for i in range(cells):
        for j in range(cells):
            near = [
                energy[min(max(i + k, 0), cells - 1), min(max(j + m, 0), cells - 1)]
                for k in (-1, 0, 1)
                for m in (-1, 0, 1)
            ]
            scale = np.sqrt(np.mean(near) + 0.1 * energy.mean())
            result[i, j] = np.sqrt(sums[i, j] / scale)
    flat = result.ravel() - result.mean()
    return flat / np.linalg.norm(flat)


def test_histograms_match_loops(histograms):
    result = histograms(jnp.asarray(IMAGES, jnp.float32))
    expected = [by_loops(image, CELLS, ORIENTATIONS) for image in IMAGES]
    # Square roots of small votes lose half of the digits of float32.
    np.testing.assert_allclose(result, expected, atol=2e-4)


def test_histograms_ignore_scale_and_offset(histograms):
    result = histograms(jnp.asarray(IMAGES, jnp.float32))
    for scale, offset in ((2.0**70, 0.0), (2.0**-80, 0.0), (0.5, 3.0)):
        transformed = histograms(jnp.asarray(scale * IMAGES + offset, jnp.float32))
        np.testing.assert_allclose(transformed, result, atol=3e-3)


def test_quarter_turn_moves_cells_and_orientations(histograms):
    square = jnp.asarray(IMAGES[:, :7], jnp.float32)
    shape = (len(square), CELLS, CELLS, ORIENTATIONS)
    result = np.reshape(histograms(square), shape)
    turned = np.reshape(histograms(jnp.rot90(square, axes=(1, 2))), shape)
    # Rows grow downwards: a counterclockwise turn lowers angles by a quarter.
    expected = np.roll(np.rot90(result, axes=(1, 2)), -ORIENTATIONS // 4, axis=-1)
    np.testing.assert_allclose(turned, expected, atol=2e-4)


def test_norms_are_one_and_never_above(histograms):
    norms = np.linalg.norm(np.float64(histograms(jnp.float32(IMAGES))), axis=1)
    assert np.all(norms <= 1)
    np.testing.assert_allclose(norms, 1, atol=1e-5)


def test_constant_image_gives_zeros_and_nan_is_not_hidden(histograms):
    flat = np.full((2, 9, 7), 0.7, np.float32)
    flat[1, 4, 4] = np.nan
    result = np.asarray(histograms(flat))
    assert np.all(result[0] == 0)
    assert not np.any(np.isfinite(result[1]))


def test_one_example_does_not_change_the_features_of_another(histograms):
    images = jnp.asarray(IMAGES, jnp.float32)
    other = images.at[0].set(100.0)
    assert np.array_equal(histograms(images)[1:], histograms(other)[1:])


def test_channels_add_up_and_dtype_stays():
    @jax.jit
    def of_one(image):
        return features.oriented_gradients(image, cells=2, orientations=4)

    gray = np.float32(IMAGES[0])
    color = np.stack([gray, gray], axis=-1)
    np.testing.assert_allclose(of_one(color), of_one(gray), atol=2e-4)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        result = jax.eval_shape(of_one, jax.ShapeDtypeStruct((9, 7), dtype))
        assert result.dtype == dtype
        assert result.shape == (16,)
    assert jax.eval_shape(of_one, gray.astype(np.uint8)).dtype == jnp.float32


def test_bins_match_searchsorted():
    edges = np.array([-1.0, 0.5, 2.0])
    values = np.float32([-3, -1, 0, 0.5, 1, 2, 9, -np.inf, np.inf, np.nan])
    *result, missing = np.asarray(
        jax.jit(jax.vmap(lambda x: features.bins(x, edges)))(values)
    )
    result, values = np.stack(result), values[:-1]
    places = np.searchsorted(edges, values, side="right")
    np.testing.assert_allclose(result[:, :4], np.eye(4)[places] / np.sqrt(2), rtol=1e-5)
    signs = np.where(values[:, None] >= edges, 1, -1) / np.sqrt(6)
    np.testing.assert_allclose(result[:, 4:], signs, rtol=1e-5)
    norms = np.linalg.norm(np.float64(result), axis=1)
    assert np.all((norms <= 1) & (norms > 1 - 1e-5))
    assert np.all(missing == 0)


def test_joined_features_have_norm_at_most_one():
    def of_one(values):
        return features.join(
            jnp.ones(1), *(features.bins(x, [0.0, 1.0]) for x in values)
        )

    joined = np.float64(jax.jit(of_one)(np.float32([-1.0, 0.5, 3.0])))
    assert 1 - 1e-5 < np.linalg.norm(joined) <= 1
    np.testing.assert_allclose(joined[0], 0.5, rtol=1e-5)
    integers = features.join(np.array([1, 0]), np.array([True]))
    np.testing.assert_allclose(integers, np.sqrt([0.5, 0, 0.5]), rtol=1e-5)


def test_decimal_edges_are_inside_of_the_range():
    result = features.decimal_edges(-10, 1000, parts=2)
    expected = [-5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 495, 500]
    np.testing.assert_allclose(result, expected)
    assert 0 in features.decimal_edges(-1, 1)
    widest = features.decimal_edges(-1.7e308, 1.7e308, parts=4)
    ends = [-1e308, -0.85e308, 0.85e308, 1e308]
    np.testing.assert_allclose([*widest[:2], *widest[-2:]], ends)
    assert (
        len(features.decimal_edges(0.98, 1.04, parts=3)) == 2
    )  # 1 is one of both kinds


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (
            lambda: features.oriented_gradients(np.ones(4), cells=1, orientations=4),
            "image",
        ),
        (
            lambda: features.oriented_gradients(IMAGES[0], cells=0, orientations=4),
            "cells",
        ),
        (
            lambda: features.oriented_gradients(IMAGES[0], cells=1, orientations=1),
            "orientations",
        ),
        (lambda: features.bins(1.0, [2.0, 1.0]), "edges"),
        (lambda: features.bins(1.0, []), "edges"),
        (lambda: features.bins(np.ones(2), [1.0]), "value"),
        (lambda: features.decimal_edges(1.0, 1.0), "high"),
        (lambda: features.decimal_edges(0.0, np.inf), "high"),
        (features.join, "parts"),
        (lambda: features.join(np.ones((2, 2))), "parts"),
        (
            lambda: features.oriented_gradients(
                np.ones((4, 4), complex), cells=1, orientations=2
            ),
            "image must be real",
        ),
    ],
)
def test_invalid_argument_raises(call, name):
    with pytest.raises(ValueError, match=name):
        call()
