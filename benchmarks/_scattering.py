"""Compute a scattering transform of order 2 in JAX: two layers of fixed wavelets.

Reference: Bruna and Mallat (2013), https://arxiv.org/abs/1203.1513. The wavelets are
Morlet wavelets. The transform maps each image separately.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

SCALES, ANGLES = 2, 8
STRIDE = 2**SCALES
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2 * math.comb(SCALES, 2)


def _gabor(size, width, frequency, angle, slant):
    """Return a periodic Gaussian window times a wave along an angle."""
    places = np.arange(size)
    result = np.zeros((size, size), complex)
    for down, right in itertools.product(range(-2, 3), repeat=2):
        y, x = np.meshgrid(places + down * size, places + right * size, indexing="ij")
        along = x * math.cos(angle) + y * math.sin(angle)
        across = -x * math.sin(angle) + y * math.cos(angle)
        window = np.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
        result += window * np.exp(1j * frequency * along)
    return result * slant / (2 * math.pi * width**2)


@functools.cache
def _filters(size):
    """Return Fourier transforms of wavelets [scale][angle, size, size] and average."""
    wavelets = []
    for scale in range(SCALES):
        width, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
        row = []
        for number in range(ANGLES):
            angle = number * math.pi / ANGLES
            wave = _gabor(size, width, frequency, angle, 4 / ANGLES)
            still = _gabor(size, width, 0.0, angle, 4 / ANGLES)
            # A wavelet has mean zero.
            row.append(np.fft.fft2(wave - still * wave.sum() / still.sum()))
        wavelets.append(np.array(row, np.complex64))
    average = np.fft.fft2(_gabor(size, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0))
    return wavelets, average.astype(np.complex64)


def scattering(image):
    """Return the coefficients f[channels, h / 4, w / 4] of one square image.

    h / 4 must be a whole number.
    """
    pad = STRIDE // 2
    padded = jnp.pad(image, pad, mode="reflect")
    wavelets, average = _filters(len(padded))

    def averaged(transforms):
        """Smooth the transforms, and sample at the middle of each cell."""
        smooth = jnp.fft.ifft2(transforms * average).real
        return smooth[..., STRIDE::STRIDE, STRIDE::STRIDE]

    whole = jnp.fft.fft2(padded)
    parts = [averaged(whole[None])]
    first = [jnp.fft.fft2(jnp.abs(jnp.fft.ifft2(whole * w))) for w in wavelets]
    parts += [averaged(transform) for transform in first]
    for low, high in itertools.combinations(range(SCALES), 2):
        again = first[low][:, None] * wavelets[high][None]
        second = jnp.fft.fft2(jnp.abs(jnp.fft.ifft2(again)))
        parts.append(averaged(second.reshape(-1, *whole.shape)))
    return jnp.concatenate(parts)


def grouped(coefficients, groups):
    """Normalise one image's channels in groups, as one vector of norm at most 1."""
    x = coefficients.reshape(groups, -1)
    x = x - x.mean(axis=1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=1, keepdims=True) + 1e-5)
    return x.reshape(-1) / math.sqrt(x.size)


def of_images(images, groups=27):
    """Return normalised coefficients f[n, d] of square images f[n, h · w]."""
    side = math.isqrt(images.shape[1])

    def of_one(image):
        return grouped(scattering(image.reshape(side, side)), groups)

    # Images are mapped in parts, since wavelets need 80 times the memory of an image.
    return jax.jit(lambda x: jax.lax.map(of_one, x, batch_size=64))(images)
