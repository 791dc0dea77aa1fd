"""Logistic regression on Adult from ε = 0.01 to 10: test accuracies of the solvers.

    pip install -e '.[erm]'
    python benchmarks/adult_iyengar.py --data FOLDER [--seeds 3]

The setting is that of the code of Iyengar et al. (2019), "Towards Practical
Differentially Private Convex Optimization", github.com/sunblaze-ucb/dpml-benchmark:
its seven ε, four fifths of the rows for training, δ = 1/n², replacement of one example.
Their rows are those of adult.data and adult.test; here all are of adult.data, with the
features that `_erm_data.py` declares.

No setting was searched for, where Iyengar et al. search a grid: the steps, batches and
learning rates below are the same at every ε. Two minutes on two cores.
"""

import functools
import pathlib
import time

import _erm_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _results import OURS, Table, parser, print_tables, write

import dpjax
from dpjax import Adjacency, solvers

EPSILONS = [10 ** (half / 2) for half in range(-4, 3)]
# Of output perturbation and noisy GD; a guess of the length of the minimiser.
REGULARIZATION, RADIUS = 1e-3, 10.0
LOSS = solvers.losses.logistic(feature_norm=1.0)
SETTING = {
    **LOSS.setting,
    "regularization": REGULARIZATION,
    "diameter": float("inf"),
    "adjacency": Adjacency.REPLACE,
}
STEP_SIZE = 1 / (LOSS.smoothness + 2 * REGULARIZATION)


def output_perturbation(data, epsilon, delta, keys):
    """Gradient descent on the regularised loss for at most 300 steps, then noise."""
    n, dimension = data[0].shape
    steps = solvers.choose_num_steps(
        epsilon,
        delta,
        radius=RADIUS,
        dimension=dimension,
        num_examples=n,
        step_size=STEP_SIZE,
        **SETTING,
    )
    for key in keys:
        yield solvers.output_perturbation(
            LOSS,
            jnp.zeros(dimension),
            data,
            epsilon=epsilon,
            delta=delta,
            key=key,
            num_steps=min(steps, 300),
            noise="exact",
            step_size=STEP_SIZE,
            **SETTING,
        ).params


def noisy_gd(data, epsilon, delta, keys):
    """Noisy steps on all of the data, of which only the last iterate is released."""
    target = {"epsilon": epsilon, "delta": delta}
    for key in keys:
        result = solvers.noisy_gd(
            LOSS,
            jnp.zeros(data[0].shape[1]),
            data,
            num_steps=50,
            key=key,
            step_size=STEP_SIZE,
            **target,
            **SETTING,
        )
        target = {"noise_multiplier": float(result.noise_multiplier)}
        yield result.params


def planned(sampling, batch_size, num_steps, rate, data, epsilon, delta, keys):
    """DP-SGD with momentum 0.9, by a plan; all of the data where batch_size is None."""
    n, dimension = data[0].shape
    plan = dpjax.plan(
        num_examples=n,
        batch_size=batch_size or n,
        num_steps=num_steps,
        epsilon=epsilon,
        delta=delta,
        clip_norm=1.0,
        sampling=sampling,
        adjacency=Adjacency.REPLACE,
    )
    loss_and_grad = plan.value_and_grad(mean_loss)

    @jax.jit
    def train(key):
        optimizer = plan.optimizer(optax.sgd(rate, momentum=0.9), key=key)

        def step(carry, number):
            w, state = carry
            _, grads = loss_and_grad(w, plan.load(data, number, key))
            updates, state = optimizer.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), None

        w = jnp.zeros(dimension)
        carry = w, optimizer.init(w)
        return jax.lax.scan(step, carry, jnp.arange(num_steps))[0][0]

    return map(train, keys)


def mean_loss(w, batch):
    """The mean loss of a batch."""
    x, y = batch
    return jax.nn.softplus(-y * (x @ w)).mean()


METHODS = {
    "output perturbation": output_perturbation,
    "noisy GD": noisy_gd,
    "DP-SGD, full batch": functools.partial(planned, "fixed", None, 50, 1.0),
    "DP-SGD, Poisson": functools.partial(planned, "poisson", 1024, 250, 0.4),
}


def accuracy(w, data):
    """The share of rows, in percent, whose label the sign of the score is."""
    x, y = data
    return 100 * float(np.mean(np.sign(x @ np.asarray(w)) == y))


def references(data, held_out):
    """Test accuracy of the more frequent label, and of scikit-learn."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1.0, fit_intercept=False, max_iter=1000)
    more = 1.0 if np.mean(data[1]) > 0 else -1.0
    return [
        ["the more frequent label", 100 * float(np.mean(held_out[1] == more))],
        ["scikit-learn, not private", accuracy(model.fit(*data).coef_[0], held_out)],
    ]


def main():
    """Train, print, write."""
    options = parser(__doc__)
    options.add_argument("--data", type=pathlib.Path, required=True)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    x, y = _erm_data.load(_erm_data.ADULT, arguments.data)
    n = int(0.8 * len(x))
    data, held_out = (x[:n], y[:n]), (x[n:], y[n:])
    keys = list(jax.random.split(jax.random.key(2019), arguments.seeds))
    rows = []
    for epsilon in EPSILONS:
        row = [epsilon]
        for name, method in METHODS.items():
            start = time.perf_counter()
            found = [accuracy(w, held_out) for w in method(data, epsilon, n**-2, keys)]
            row.append([float(np.mean(found)), float(np.std(found, ddof=1))])
            print(f"{epsilon:.3g}, {name}: {row[-1]}", end=", ")
            print(f"{time.perf_counter() - start:.1f} s", flush=True)
        rows.append(row)
    columns = {"ε": "{:.3g}"} | dict.fromkeys(METHODS, "{:.1f} ± {:.1f}")
    tables = [
        Table("accuracy", columns, rows),
        Table(
            "references",
            {"without privacy": "{}", "accuracy, %": "{:.1f}"},
            references(data, held_out),
        ),
    ]
    print_tables(*tables)
    write("adult_iyengar", arguments, tables, packages=[*OURS, "scikit_learn"])


if __name__ == "__main__":
    main()
