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
from dpjax import Adjacency
from dpjax.accounting import gdp, pld, tree

HERE = pathlib.Path(__file__).parent
BLUE, RED, GREY = "#00796b", "#d84315", "#90a4ae"
STYLE = {
    "figure.figsize": (8, 3.4),
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.titlesize": 10.5,
    "font.size": 10,
}


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


def adjacency(left, right):
    """How far one example moves a clipped sum, and what that does to ε."""
    clip = dpjax.clip_and_sum(1.0)
    others = jnp.array([[0.8, 0.3], [0.2, -0.5], [1.5, 0.9]])
    own, other = jnp.array([[-1.5, 1.0]]), jnp.array([[1.4, 0.4]])

    def total(rows):
        return np.asarray(clip.update(rows, clip.init(None))[0])

    without = total(jnp.concatenate([others, 0 * own]))
    ends = [total(jnp.concatenate([others, x])) for x in (own, other)]
    left.add_patch(plt.Circle(without, 1.0, color=GREY, alpha=0.25))
    arrow(left, without, ends[0], BLUE, "ZERO_OUT: at most C")
    arrow(left, ends[0], ends[1], RED, "REPLACE: at most 2C")
    left.plot(*without, "ko", ms=5)
    left.annotate("sum of the others", without, (-32, -14), textcoords="offset points")
    left.set(aspect="equal", xlim=(0.4, 3.3), ylim=(-0.9, 2.0), xticks=[], yticks=[])
    left.set_title("One example in a clipped sum, C = 1")
    left.legend(loc="upper left", fontsize=8)
    left.spines[:].set_visible(False)

    noise = jnp.geomspace(0.8, 6.0, 40)
    for relation, color in ((Adjacency.ADD_REMOVE, BLUE), (Adjacency.REPLACE, RED)):

        def epsilon(sigma, relation=relation):
            step = pld.poisson_gaussian(sigma, 0.01, adjacency=relation)
            return pld.epsilon(pld.compose(step, 1_000), 1e-5)

        right.loglog(noise, jax.vmap(epsilon)(noise), color=color, label=relation.name)
    right.set(xlabel="noise multiplier", ylabel="ε at δ = 1e-5")
    plain(right.xaxis, (1, 2, 3, 6))
    plain(right.yaxis, (0.2, 0.5, 1, 2, 4))
    right.set_title("1,000 steps on Poisson samples, q = 0.01")
    right.legend()


def clipping(left, right):
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
    left.add_patch(plt.Circle((0, 0), 0.5, color=GREY, alpha=0.3))
    for g, h in list(zip(np.asarray(grads), clipped, strict=True))[:25]:
        left.plot(*zip(h, g, strict=True), color=RED, lw=0.8, alpha=0.7)
        arrow(left, (0, 0), h, BLUE, lw=1.0)
    left.plot([], [], color=RED, label="what clipping takes away")
    left.plot([], [], color=BLUE, label="what it keeps")
    left.set(aspect="equal", title="Gradients of 25 examples, C = 0.5")
    left.legend(loc="lower right", fontsize=8)

    bins = np.linspace(0, 2.5, 50)
    right.hist(per_example.norm, bins, color=RED, alpha=0.7, label="before")
    right.hist(np.linalg.norm(clipped, axis=1), bins, color=BLUE, alpha=0.8)
    right.plot([], [], color=BLUE, lw=6, label="after")
    right.axvline(0.5, color="black", lw=1, ls=":")
    right.set(xlabel="L2 norm of a gradient", ylabel="examples")
    right.set_title("Norms of 400 examples")
    right.legend()


def noise(left, right):
    """The outcomes that an attacker tells apart, and noise that a tree correlates."""
    mu, z = 1.0, np.linspace(-3.5, 4.5, 400)
    densities = [np.exp(-((z - m) ** 2) / 2) / np.sqrt(2 * np.pi) for m in (0.0, mu)]
    for density, color, label in zip(
        densities, (BLUE, RED), ("without the example", "with it"), strict=True
    ):
        left.plot(z, density, color=color, label=label)
    caught = z > 1.645
    left.fill_between(z, densities[0], where=caught, color=BLUE, alpha=0.4)
    left.fill_between(z, densities[1], where=caught, color=RED, alpha=0.2)
    found = 1 - float(gdp.tradeoff(mu, 0.05))
    left.annotate(f"5% false alarms,\n{found:.0%} found", (2.2, 0.1), (2.6, 0.24))
    left.set(xlabel="noisy sum, in units of σC", yticks=[], ylim=(0, 0.52))
    left.set_title("Noise multiplier 1: μ = 1")
    left.legend(loc="upper left", fontsize=8)

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
    right.plot(steps, (1 - decay) * independent, color=RED, label="independent")
    right.plot(steps, (1 - decay) * correlated, color=BLUE, lw=1, label="tree")
    right.set(xlabel="step of one epoch", ylabel="standard deviation", ylim=(0, None))
    right.set_title("Noise in momentum, decay 0.99, μ = 1")
    right.legend()


def composition(left, right):
    """Epsilon of many Gaussian steps, three ways, and the trade-off curve."""
    sigma, steps = 20.0, np.unique(np.geomspace(1, 2_000, 60).astype(int))
    exact = gdp.epsilon(np.sqrt(steps) / sigma, 1e-5)
    sums = steps * np.asarray(gdp.epsilon(1 / sigma, 1e-5 / steps))
    left.loglog(steps, sums, color=RED, label="adding up ε and δ")
    left.loglog(steps, exact, color=BLUE, label="by μ, exact")
    left.set(xlabel="steps", ylabel="ε at δ = 1e-5")
    left.set_title("Full batches, noise multiplier 20")
    left.legend()

    rates = np.linspace(0, 1, 200)
    for count, color in ((100, GREY), (400, BLUE), (1_600, RED)):
        mu = float(gdp.compose(np.full(count, 1 / sigma)))
        right.plot(rates, gdp.tradeoff(mu, rates), color=color, label=f"{count} steps")
    right.plot([0, 1], [1, 0], color="black", lw=0.8, ls=":", label="guessing")
    right.set(xlabel="false positive rate", ylabel="false negative rate")
    right.set(aspect="equal", title="What the best attack achieves")
    right.legend(fontsize=8)


def amplification(left, right):
    """Epsilon against the sampling rate, and the pair that a Poisson sample leaves."""
    rates = 1 / np.unique(np.geomspace(1, 1_000, 40).astype(int))
    sigma, epochs = 1.0, 10

    def sampled(rate):
        step = pld.poisson_gaussian(sigma, rate, adjacency=Adjacency.ADD_REMOVE)
        return pld.epsilon(pld.compose(step, jnp.round(epochs / rate)), 1e-5)

    passes = float(gdp.epsilon(gdp.compose(np.full(epochs, 1 / sigma)), 1e-5))
    left.loglog(rates, jax.vmap(sampled)(jnp.asarray(rates)), color=BLUE)
    left.axhline(passes, color=RED)
    left.plot([], [], color=RED, label="fixed batches, ZERO_OUT")
    left.plot([], [], color=BLUE, label="Poisson samples, ADD_REMOVE")
    left.set(xlabel="batch size over number of examples", ylabel="ε at δ = 1e-5")
    left.set_title("Ten epochs, noise multiplier 1")
    left.legend()

    z, rate = np.linspace(-3.5, 4.5, 400), 0.2
    normal = [np.exp(-((z - m) ** 2) / 2) / np.sqrt(2 * np.pi) for m in (0.0, 1.0)]
    right.plot(z, normal[0], color=BLUE, label="without the example")
    mixture = (1 - rate) * normal[0] + rate * normal[1]
    right.plot(z, mixture, color=RED, label="with it, q = 0.2")
    right.plot(z, normal[1], color=GREY, ls=":", label="with it, q = 1")
    right.set(xlabel="noisy sum, in units of C", yticks=[], ylim=(0, 0.55))
    right.set_title("One step, noise multiplier 1")
    right.legend(loc="upper left", fontsize=8)


def main() -> None:
    """Draw all of them."""
    plt.rcParams.update(STYLE)
    for draw in (adjacency, clipping, noise, composition, amplification):
        figure, axes = plt.subplots(1, 2)
        draw(*axes)
        figure.savefig(HERE / f"{draw.__name__}.png")
        plt.close(figure)


if __name__ == "__main__":
    main()
