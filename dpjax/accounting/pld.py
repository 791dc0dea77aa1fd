"""Privacy-loss distributions of Gaussian and subsampled mechanisms, from above.

A PLD here is the recipe, not a grid: which mechanisms, with which parameters, how
often. Composition therefore costs nothing, and whoever asks for δ(ε) or ε(δ) gets a
grid made for that question (`_pld.composition`). Two steps lie between, each an upper
bound, each in its own file: a discrete pair that is easier to tell apart than the
mechanism (`_pld.pairs`), and the inversion of its composed characteristic function
(`_pld.inversion`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax.accounting._numerics.pld import composition


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One mechanism of a `PLD`, repeated.

    Attributes:
      parameter: μ for the kinds "gaussian" and "fixed_size", the noise multiplier for
        the others, f[*b].
      sampling_rate: the probability that an example takes part, f[*b].
      count: how many times it runs, f[*b], a whole number.
      kind: "gaussian", "fixed_size", "poisson", "poisson_replace", "truncated",
        "truncated_replace", "allocation" or "allocation_replace".
      num_examples: the size of the larger data set, f[*b], for truncated kinds; for an
        allocation, the number of steps that an example takes part in one of.
      max_batch_size: how many examples there is room for, f[*b], for truncated kinds.
    """

    parameter: jax.typing.ArrayLike
    sampling_rate: jax.typing.ArrayLike
    count: jax.typing.ArrayLike
    kind: str = dataclasses.field(metadata={"static": True})
    num_examples: jax.typing.ArrayLike = 2
    max_batch_size: jax.typing.ArrayLike = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PLD:
    """The privacy-loss distribution of mechanisms run one after the other.

    A pytree of parameters, which passes through `jax.jit`, `jax.vmap` and `jax.grad`.

    Attributes:
      mechanisms: what runs on the same data. A mechanism may depend on the outputs of
        earlier ones; its parameters must be fixed before any output is seen.
    """

    mechanisms: tuple[Mechanism, ...]

    def __repr__(self) -> str:
        """One line a mechanism: how often it runs, and with which numbers."""
        lines = []
        for m in self.mechanisms:
            of_mu = m.kind in ("gaussian", "fixed_size")
            words = f"{'mu' if of_mu else 'noise_multiplier'}={m.parameter}"
            if m.kind.startswith("allocation"):
                words += f", num_steps={m.num_examples}"
            elif m.kind != "gaussian":
                words += f", sampling_rate={m.sampling_rate}"
            if m.kind.startswith("truncated"):
                words += f", n={m.num_examples}, max_batch_size={m.max_batch_size}"
            lines.append(f"\n  {m.count} x {m.kind}({words})")
        return f"PLD({','.join(lines)}\n)" if lines else "PLD()"


def _parameters(pld: PLD) -> tuple[list[jax.typing.ArrayLike], tuple[str, ...]]:
    """What the compiled functions take: all numbers, and the kinds."""
    if not isinstance(pld, PLD):
        raise ValueError(f"pld must be a dpjax.accounting.pld.PLD; got {pld!r}.")
    numbers = [
        x
        for m in pld.mechanisms
        for x in (
            m.parameter,
            m.sampling_rate,
            m.count,
            m.num_examples,
            m.max_batch_size,
        )
    ]
    return numbers, tuple(m.kind for m in pld.mechanisms)


def gaussian(mu: jax.typing.ArrayLike) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism.

    Args:
      mu: the GDP parameter, f[*b], at least 0: sensitivity over noise standard
        deviation for a Gaussian mechanism.

    Returns:
      A `PLD`. Composed with its like alone, its δ and ε are those of `gdp`, exactly.

    Raises:
      ValueError: a static μ is negative.

    Reference: Dong, Roth and Su (2022), Definition 6.

    Example:
      >>> print(f"{epsilon(compose(gaussian(0.1), 100), 1e-5):.4f}")
      4.3772
    """
    validate.nonnegative("mu", mu, finite=False)
    return PLD((Mechanism(mu, 1.0, 1, "gaussian"),))


def poisson_gaussian(
    noise_multiplier: jax.typing.ArrayLike,
    sampling_rate: jax.typing.ArrayLike,
    *,
    adjacency: Adjacency,
) -> PLD:
    """The privacy-loss distribution of the Gaussian mechanism on a Poisson sample.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      sampling_rate: the probability that an example takes part, f[*b], in [0, 1].
      adjacency: under ADD_REMOVE and ZERO_OUT an example is there or its contribution
        is zero; under REPLACE it is another one.

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range; adjacency is not an `Adjacency`.

    Privacy: every example takes part independently of all others, in each step anew,
    and contributes at most one clip norm. ADD_REMOVE and ZERO_OUT: N(0, σ²) against
    (1 − q) N(0, σ²) + q N(1, σ²), in both directions, the worse one reported. REPLACE:
    (1 − q) N(0, σ²) + q N(1, σ²) against (1 − q) N(0, σ²) + q N(−1, σ²), which
    dominates all other contributions in the unit ball (docs/accounting.md has the
    proof).

    Reference: Zhu, Dong and Wang (2022), Theorem 11, for ADD_REMOVE.

    Example:
      >>> from dpjax import Adjacency
      >>> step = poisson_gaussian(1.0, 0.01, adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{epsilon(compose(step, 1000), 1e-5):.3f}")
      1.828
    """
    validate.positive("noise_multiplier", noise_multiplier)
    validate.closed_unit("sampling_rate", sampling_rate)
    replace = validate.adjacency(adjacency) is Adjacency.REPLACE
    kind = "poisson_replace" if replace else "poisson"
    return PLD((Mechanism(noise_multiplier, sampling_rate, 1, kind),))


def subsampled_gdp(
    mu: jax.typing.ArrayLike, sampling_rate: jax.typing.ArrayLike
) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism on a batch of fixed size.

    Args:
      mu: the GDP parameter of the mechanism on its batch, f[*b], at least 0. Under
        REPLACE that is twice the clip norm over the noise standard deviation.
      sampling_rate: batch size over number of examples, f[*b], in [0, 1].

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: REPLACE adjacency; each batch is a uniformly random subset of fixed size,
    drawn without replacement and anew in each step.

    Reference: Bok, Su and Altschuler (2024), Proposition D.4: C_p(G_μ).

    Example:
      >>> print(f"{epsilon(compose(subsampled_gdp(0.5, 0.01), 1000), 1e-5):.3f}")
      0.719
    """
    validate.nonnegative("mu", mu, finite=False)
    validate.closed_unit("sampling_rate", sampling_rate)
    return PLD((Mechanism(mu, sampling_rate, 1, "fixed_size"),))


def compose(pld: PLD, count: jax.typing.ArrayLike) -> PLD:
    """The privacy-loss distribution of running all of it count times.

    Args:
      pld: what runs.
      count: how often, f[*b], a whole number, at least 0. It may be traced.

    Returns:
      A `PLD`. A traced count that is not whole counts as the next whole number, at
      which derivatives by it are taken; one that is negative or NaN makes ε infinite
      and δ one.

    Raises:
      ValueError: a static count is negative or not a whole number.

    Example:
      >>> print(f"{epsilon(compose(gaussian(1.0), 4), 1e-5):.4f}")
      9.9973
    """
    count = validate.whole_count("count", count)
    return PLD(
        tuple(
            dataclasses.replace(m, count=_multiply_counts(m.count, count))
            for m in pld.mechanisms
        )
    )


def _multiply_counts(
    one: jax.typing.ArrayLike, other: jax.typing.ArrayLike
) -> jax.typing.ArrayLike:
    """The product of two counts, rounded up where floats do not hold it."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if not any(isinstance(x, jax.Array) for x in (one, other)):
        return np.asarray(one, np.float64) * np.asarray(other, np.float64)
    # Not in integers of 32 bits, which could wrap to a smaller count.
    doubles = any(getattr(x, "dtype", None) == jnp.float64 for x in (one, other))
    dtype = jnp.float64 if doubles else jnp.float32
    product = jnp.asarray(one, dtype) * jnp.asarray(other, dtype)
    # Below 1 / eps all of it was exact. Above, three roundings lose half of eps each.
    epsilon = jnp.finfo(dtype).eps
    exact = product <= 1 / epsilon
    return product * jnp.where(exact, 1.0, 1 + 4 * epsilon).astype(dtype)


def convolve(a: PLD, b: PLD) -> PLD:
    """The privacy-loss distribution of running both.

    The second mechanism may depend on the output of the first, but both distributions
    must be fixed before: a choice between distributions by an output is not covered.

    Args:
      a: what runs, in any order.
      b: what else runs on the same data, under the same adjacency.

    Returns:
      A `PLD`.

    Raises:
      ValueError: one is stated for ADD_REMOVE or ZERO_OUT, the other for REPLACE.

    Example:
      >>> both = convolve(compose(subsampled_gdp(1.0, 0.1), 10), gaussian(0.5))
      >>> print(f"{epsilon(both, 1e-5):.3f}")
      3.505
    """
    kinds = {m.kind for m in a.mechanisms + b.mechanisms}
    if kinds & {"poisson", "truncated", "allocation"} and kinds & {
        "poisson_replace",
        "fixed_size",
        "truncated_replace",
        "allocation_replace",
    }:
        raise ValueError(
            "a and b must be stated for one adjacency; got mechanisms for ADD_REMOVE "
            f"and for REPLACE: {sorted(kinds)}."
        )
    return PLD(a.mechanisms + b.mechanisms)


def delta(pld: PLD, epsilon: jax.typing.ArrayLike) -> jax.Array:
    """An upper bound on the least δ at which all of it is (ε, δ)-DP.

    Args:
      pld: what runs.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded up, tight to about 1e-3 of itself down to 1e-30 where it is less
      than a tenth of steps times rate. A traced ε below 0, or a NaN, gives 1.

    Raises:
      ValueError: a static ε is negative.

    Privacy: discretisation, truncation, aliasing and rounding all err upwards.

    Example:
      >>> print(f"{delta(compose(gaussian(0.1), 100), 1.0):.4f}")
      0.1269
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    numbers, kinds = _parameters(pld)
    return composition.delta64(epsilon, *numbers, kinds=kinds)


def epsilon(pld: PLD, delta: jax.typing.ArrayLike) -> jax.Array:
    """An upper bound on the least ε >= 0 at which all of it is (ε, δ)-DP.

    Args:
      pld: what runs.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up, within 1e-3 of exact below about 40 for δ of 1e-15 and more,
      or 3e-3 where δ is more than a tenth of steps times rate. Down to 1e-100 it is
      finite and mostly as close, but up to a tenth off where a run seldom touches an
      example. For sampled steps with a noise multiplier below 0.03, ε may be several
      times too large; it is inf below 0.006 (at rate 1, below 0.03), because with so
      little noise the intervals of the discrete pair are too wide to integrate over. A
      traced δ at or below 0, or a NaN, gives inf.

    Raises:
      ValueError: a static δ is not strictly between 0 and 1.

    Privacy: discretisation, truncation, aliasing and rounding all err upwards.

    Example:
      >>> from dpjax import Adjacency
      >>> def of(noise_multiplier):
      ...     step = poisson_gaussian(
      ...         noise_multiplier, 0.01, adjacency=Adjacency.ADD_REMOVE)
      ...     return epsilon(compose(step, 1000), 1e-5)
      >>> print(f"{of(0.8):.3f} {jax.grad(of)(0.8):.2f}")
      3.141 -10.79
    """
    validate.open_unit("delta", delta)
    numbers, kinds = _parameters(pld)
    return composition.epsilon64(delta, *numbers, kinds=kinds)
