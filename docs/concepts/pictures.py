"""Draw the pictures of these pages, from the library's own functions.

python docs/concepts/pictures.py, which needs the extra `plot`.
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np

import dpjax
from dpjax import Adjacency, plot
from dpjax.accounting import gdp, pld, tree

HERE = pathlib.Path(__file__).parent
BLUE, RED, GREY = "#0072b2", "#b34700", "#6e6e6e"
DASHED = (0, (6, 2))  # red lines, so that no picture needs its colours


def arrow(ax, start, end, color, label=None, **kwargs):
    """An arrow from one point to another, with a line in the legend."""
    line = {"arrowstyle": "-|>", "color": color, "lw": 1.8, **kwargs}
    ax.annotate("", end, start, arrowprops=line)
    if label:
        ax.plot([], [], color=color, label=label, ls=kwargs.get("ls", "-"))


def plain(axis, ticks):
    """Ticks of a logarithmic axis, in plain numbers."""
    axis.set_ticks(ticks, [f"{x:g}" for x in ticks])
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def adjacency(top, bottom):
    """How far one example moves a clipped sum, and what that does to ε."""
    clip = dpjax.clip_and_sum(1.0)
    others = jnp.array([[0.8, 0.3], [0.2, -0.5], [1.5, 0.9]])
    own, other = jnp.array([[-1.5, 1.0]]), jnp.array([[1.4, 0.4]])

    def total(rows):
        return np.asarray(clip.update(rows, clip.init(None))[0])

    without = total(jnp.concatenate([others, 0 * own]))
    ends = [total(jnp.concatenate([others, x])) for x in (own, other)]
    top.add_patch(plt.Circle(without, 1.0, color=GREY, alpha=0.25))
    arrow(top, without, ends[0], BLUE, "ZERO_OUT: at most C")
    arrow(top, ends[0], ends[1], RED, "REPLACE: at most 2C")
    top.plot(*without, "ko", ms=5)
    top.annotate("sum of the others", without, (-32, -14), textcoords="offset points")
    top.set(aspect="equal", xlim=(0.4, 3.3), ylim=(-0.9, 2.0), xticks=[], yticks=[])
    top.set_title("One example in a clipped sum, C = 1")
    top.legend(loc="upper left", fontsize=10)
    top.spines[:].set_visible(False)

    noise = jnp.geomspace(0.8, 6.0, 40)
    lines = (Adjacency.ADD_REMOVE, BLUE, "-"), (Adjacency.REPLACE, RED, DASHED)
    for relation, color, stroke in lines:

        def epsilon(sigma, relation=relation):
            step = pld.poisson_gaussian(sigma, 0.01, adjacency=relation)
            return pld.epsilon(pld.compose(step, 1_000), 1e-5)

        values = jax.vmap(epsilon)(noise)
        bottom.loglog(noise, values, color=color, ls=stroke, label=relation.name)
    bottom.set(xlabel="noise multiplier", ylabel="ε at δ = 1e-5")
    plain(bottom.xaxis, (1, 2, 3, 6))
    plain(bottom.yaxis, (0.2, 0.5, 1, 2, 4))
    bottom.set_title("1,000 steps on Poisson samples, q = 0.01")
    bottom.legend()


def clipping(top, bottom):
    """Gradients before and after clipping, and the norms of many."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2)) * rng.gamma(2.0, 0.6, size=(400, 1))
    y = (x[:, 0] + 0.3 * rng.normal(size=400) > 0).astype(np.float32)

    def loss(w, example):
        features, label = example
        return jnp.logaddexp(0.0, features @ w) - label * (features @ w)

    w = jnp.array([0.5, -0.5])
    grads = jax.vmap(jax.grad(loss), (None, 0))(w, (x, y))
    _, per_example = dpjax.clipped_grad(loss, 0.5)(w, (x, y))
    clip = dpjax.clip_and_sum(0.5)
    one = jax.vmap(lambda g: clip.update(g[None], clip.init(None))[0])
    clipped = np.asarray(one(grads))
    top.add_patch(plt.Circle((0, 0), 0.5, color=GREY, alpha=0.3))
    for g, h in list(zip(np.asarray(grads), clipped, strict=True))[:25]:
        top.plot(*zip(h, g, strict=True), color=RED, ls=DASHED, lw=0.8)
        arrow(top, (0, 0), h, BLUE, lw=1.0)
    top.plot([], [], color=RED, ls=DASHED, label="what clipping takes away")
    top.plot([], [], color=BLUE, ls="-", label="what it keeps")
    top.set(aspect="equal", title="Gradients of 25 examples, C = 0.5")
    top.legend(loc="upper left", fontsize=10)

    bins = np.linspace(0, 2.5, 50)
    bottom.hist(per_example.norm, bins, color=RED, alpha=0.7, label="before")
    bottom.hist(np.linalg.norm(clipped, axis=1), bins, color=BLUE, alpha=0.8)
    bottom.plot([], [], color=BLUE, lw=6, label="after")
    bottom.axvline(0.5, color="black", lw=1, ls=":")
    bottom.set(xlabel="L2 norm of a gradient", ylabel="examples")
    bottom.set_title("Norms of 400 examples")
    bottom.legend()


def noise(top, bottom):
    """The outcomes that an attacker tells apart, and noise that a tree correlates."""
    mu, z = 1.0, np.linspace(-3.5, 4.5, 400)
    densities = [np.exp(-((z - m) ** 2) / 2) / np.sqrt(2 * np.pi) for m in (0.0, mu)]
    top.plot(z, densities[0], color=BLUE, ls="-", label="without the example")
    top.plot(z, densities[1], color=RED, ls=DASHED, label="with it")
    caught = z > 1.645
    top.fill_between(z, densities[0], where=caught, color=BLUE, alpha=0.4)
    top.fill_between(z, densities[1], where=caught, color=RED, alpha=0.2)
    found = 1 - float(gdp.tradeoff(mu, 0.05))
    top.annotate(f"5% false alarms,\n{found:.0%} found", (2.2, 0.1), (2.6, 0.24))
    top.set(xlabel="noisy sum, in units of σC", yticks=[], ylim=(0, 0.52))
    top.set_title("Noise multiplier 1: μ = 1")
    top.legend(loc="upper left", fontsize=10)

    decay, steps = 0.99, np.arange(1, 257)
    sigma = tree.momentum_mu(
        1.0,
        num_steps=len(steps),
        decay=decay,
        steps_per_epoch=len(steps),
        order="fixed",
        adjacency=Adjacency.ZERO_OUT,
    )
    variance = jax.vmap(lambda t: dpjax.noise.tree.prefix_variance(t, decay))
    correlated = sigma * np.sqrt(variance(jnp.asarray(steps)))
    independent = np.sqrt((1 - decay ** (2 * steps)) / (1 - decay**2))
    bottom.plot(
        steps, (1 - decay) * independent, color=RED, ls=DASHED, label="independent"
    )
    bottom.plot(steps, (1 - decay) * correlated, color=BLUE, ls="-", lw=1, label="tree")
    bottom.set(xlabel="step of one epoch", ylabel="standard deviation", ylim=(0, None))
    bottom.set_title("Noise in momentum, decay 0.99, μ = 1")
    bottom.legend()


def composition(top, bottom):
    """Epsilon of many Gaussian steps, three ways, and the trade-off curve."""
    sigma, steps = 20.0, np.unique(np.geomspace(1, 2_000, 60).astype(int))
    exact = gdp.epsilon(np.sqrt(steps) / sigma, 1e-5)
    sums = steps * np.asarray(gdp.epsilon(1 / sigma, 1e-5 / steps))
    top.loglog(steps, sums, color=RED, ls=DASHED, label="adding up ε and δ")
    top.loglog(steps, exact, color=BLUE, ls="-", label="by μ, exact")
    top.set(xlabel="steps", ylabel="ε at δ = 1e-5")
    top.set_title("Full batches, noise multiplier 20")
    top.legend()

    rates = np.linspace(0, 1, 200)
    for count, color, stroke in (100, GREY, "-."), (400, BLUE, "-"), (1_600, RED, "--"):
        mu = float(gdp.compose(np.full(count, 1 / sigma)))
        curve = gdp.tradeoff(mu, rates)
        bottom.plot(rates, curve, color=color, ls=stroke, label=f"{count} steps")
    bottom.plot([0, 1], [1, 0], color="black", lw=0.8, ls=":", label="guessing")
    bottom.set(xlabel="false positive rate", ylabel="false negative rate")
    bottom.set(aspect="equal", title="What the best attack achieves")
    bottom.legend(fontsize=10)


def amplification(top, bottom):
    """Epsilon against the sampling rate, and the pair that a Poisson sample leaves."""
    rates = 1 / np.unique(np.geomspace(1, 1_000, 40).astype(int))
    sigma, epochs = 1.0, 10

    def sampled(rate):
        step = pld.poisson_gaussian(sigma, rate, adjacency=Adjacency.ADD_REMOVE)
        return pld.epsilon(pld.compose(step, jnp.round(epochs / rate)), 1e-5)

    passes = float(gdp.epsilon(gdp.compose(np.full(epochs, 1 / sigma)), 1e-5))
    top.loglog(rates, jax.vmap(sampled)(jnp.asarray(rates)), color=BLUE, ls="-")
    top.axhline(passes, color=RED, ls=DASHED)
    top.plot([], [], color=RED, ls=DASHED, label="fixed batches, ZERO_OUT")
    top.plot([], [], color=BLUE, ls="-", label="Poisson samples, ADD_REMOVE")
    top.set(xlabel="batch size over number of examples", ylabel="ε at δ = 1e-5")
    top.set_title("Ten epochs, noise multiplier 1")
    top.legend()

    z, rate = np.linspace(-3.5, 4.5, 400), 0.2
    normal = [np.exp(-((z - m) ** 2) / 2) / np.sqrt(2 * np.pi) for m in (0.0, 1.0)]
    bottom.plot(z, normal[0], color=BLUE, ls="-", label="without the example")
    mixture = (1 - rate) * normal[0] + rate * normal[1]
    bottom.plot(z, mixture, color=RED, ls=DASHED, label="with it, q = 0.2")
    bottom.plot(z, normal[1], color=GREY, ls=":", label="with it, q = 1")
    bottom.set(xlabel="noisy sum, in units of C", yticks=[], ylim=(0, 0.55))
    bottom.set_title("One step, noise multiplier 1")
    bottom.legend(loc="upper left", fontsize=10)


def main() -> None:
    """Draw all of them."""
    plt.style.use(plot.style)
    for draw in (adjacency, clipping, noise, composition, amplification):
        # One above the other: both are then readable on a telephone.
        figure, axes = plt.subplots(2, 1, figsize=(5.4, 7))
        draw(*axes)
        figure.savefig(HERE / f"{draw.__name__}.png")
        plt.close(figure)


if __name__ == "__main__":
    main()
