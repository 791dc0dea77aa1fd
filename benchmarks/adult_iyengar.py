"""Compare test accuracies of logistic regression and SVM on Adult, ε = 0.01 to 10.

    pip install -e '.[erm]'
    python benchmarks/adult_iyengar.py --data FOLDER [--seeds 3]

The setting is that of the code of Iyengar et al. (2019), "Towards Practical
Differentially Private Convex Optimization", github.com/sunblaze-ucb/dpml-benchmark:
seven values of ε, four fifths of the rows for training, δ = 1/n², and replacement of
one example. Iyengar et al. use the rows of adult.data and adult.test. This script uses
all rows of adult.data, with the features that `_erm_data.py` declares. The loss of the
SVM is the hinge loss, smoothed on |1 − y⟨w, x⟩| <= h, with h = 0.1.

The script searches no hyperparameters, whereas Iyengar et al. search a grid. The steps,
batches and learning rates below are equal for every ε. The methods objective
perturbation and whitened plan are those of `erm.py`. The rules of the whitened plan
were set for the logistic loss, so the table has no row of the whitened plan for the
SVM. The script takes two minutes on two cores.
"""

import dataclasses
import functools
import pathlib
import time
import types

import _erm_data
import _erm_methods
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _results import OURS, Table, parser, print_tables, write

import dpjax
from dpjax import Adjacency, solvers
from dpjax.solvers import losses

EPSILONS = [10 ** (half / 2) for half in range(-4, 3)]
# For output perturbation and noisy GD: the regularisation, and a guess of the
# minimiser's norm.
REGULARIZATION, RADIUS = 1e-3, 10.0
WIDTH = 0.1  # h


def smooth_hinge(score, label):
    """Return the hinge loss max(0, 1 − z), z = y⟨w, x⟩, smoothed on |1 − z| <= h."""
    below = 1 - label * score
    inside = (below + WIDTH) ** 2 / (4 * WIDTH)
    return jnp.where(jnp.abs(below) <= WIDTH, inside, jnp.maximum(below, 0.0))


LOGISTIC = losses.logistic(feature_norm=1.0)
SVM = dataclasses.replace(
    LOGISTIC, smoothness=1 / (2 * WIDTH), of_scores=smooth_hinge, logistic=False
)
LOSSES = {"logistic": LOGISTIC, "SVM": SVM}


def make_problem(loss, data):
    """Return the methods' inputs: training rows, a loss with its setting, and δ."""
    n, d = data[0].shape
    return types.SimpleNamespace(
        loss=loss,
        data=data,
        x=data[0].astype(np.float64),
        n=n,
        d=d,
        start=jnp.zeros(d),
        delta=n**-2,
        mu=0.0,  # the only regulariser is the one that privacy requires
        setting={  # for output perturbation and noisy GD
            **loss.setting,
            "regularization": REGULARIZATION,
            "diameter": float("inf"),
            "adjacency": Adjacency.REPLACE,
            "step_size": 1 / (loss.smoothness + 2 * REGULARIZATION),
        },
    )


def output_perturbation(problem, epsilon, keys):
    """Run gradient descent on the regularised loss, then add noise.

    Gradient descent takes at most 300 steps.
    """
    steps = solvers.choose_num_steps(
        epsilon,
        problem.delta,
        radius=RADIUS,
        dimension=problem.d,
        num_examples=problem.n,
        **problem.setting,
    )
    for key in keys:
        yield solvers.output_perturbation(
            problem.loss,
            problem.start,
            problem.data,
            epsilon=epsilon,
            delta=problem.delta,
            key=key,
            num_steps=min(steps, 300),
            noise="exact",
            **problem.setting,
        ).params


def noisy_gd(problem, epsilon, keys):
    """Take noisy steps on all of the data, and release only the last iterate."""
    target = {"epsilon": epsilon, "delta": problem.delta}
    for key in keys:
        result = solvers.noisy_gd(
            problem.loss,
            problem.start,
            problem.data,
            num_steps=50,
            key=key,
            **target,
            **problem.setting,
        )
        target = {"noise_multiplier": float(result.noise_multiplier)}
        yield result.params


def planned(sampling, batch_size, num_steps, rate, problem, epsilon, keys):
    """Run DP-SGD with momentum 0.9, by a plan.

    If batch_size is None, each step takes all of the data.
    """
    plan = dpjax.plan(
        num_examples=problem.n,
        batch_size=batch_size or problem.n,
        num_steps=num_steps,
        epsilon=epsilon,
        delta=problem.delta,
        clip_norm=1.0,
        sampling=sampling,
        adjacency=Adjacency.REPLACE,
    )
    loss_and_grad = plan.value_and_grad(problem.loss, batched=False)

    @jax.jit
    def train(key):
        optimizer = plan.optimizer(optax.sgd(rate, momentum=0.9), key=key)

        def step(carry, number):
            w, state = carry
            _, grads = loss_and_grad(w, plan.load(problem.data, number, key))
            updates, state = optimizer.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), None

        carry = problem.start, optimizer.init(problem.start)
        return jax.lax.scan(step, carry, jnp.arange(num_steps))[0][0]

    return map(train, keys)


def in_turn(method, problem, epsilon, keys):
    """Return the parameters that a method of `erm.py` returns for each key."""
    return (method(problem, epsilon, key)[0] for key in keys)


METHODS = {
    "output perturbation": output_perturbation,
    "noisy GD": noisy_gd,
    "objective perturbation": functools.partial(
        in_turn, _erm_methods.objective_perturbation
    ),
    "objective perturbation, scaled": functools.partial(
        in_turn, _erm_methods.scaled_objective_perturbation
    ),
    "DP-SGD, full batch": functools.partial(planned, "fixed", None, 50, 1.0),
    "DP-SGD, Poisson": functools.partial(planned, "poisson", 1024, 250, 0.4),
    "plan, whitened": functools.partial(in_turn, _erm_methods.whitened_plan),
}


def accuracy(w, data):
    """Return the percentage of rows whose label is the sign of the score."""
    x, y = data
    return 100 * float(np.mean(np.sign(x @ np.asarray(w)) == y))


def references(data, held_out):
    """Return test accuracies of the more frequent label and of scikit-learn."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    models = {
        "logistic": LogisticRegression(C=1.0, fit_intercept=False, max_iter=1000),
        "SVM": LinearSVC(loss="hinge", C=1.0, fit_intercept=False, max_iter=20_000),
    }
    more = 1.0 if np.mean(data[1]) > 0 else -1.0
    return [
        ["the more frequent label", 100 * float(np.mean(held_out[1] == more))],
        *(
            [f"scikit-learn, {name}", accuracy(model.fit(*data).coef_[0], held_out)]
            for name, model in models.items()
        ),
    ]


def main():
    """Train, print the accuracies and write the results."""
    options = parser(__doc__)
    options.add_argument("--data", type=pathlib.Path, required=True)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    x, y = _erm_data.load(_erm_data.ADULT, arguments.data)
    n = int(0.8 * len(x))
    data, held_out = (x[:n], y[:n]), (x[n:], y[n:])
    keys = list(jax.random.split(jax.random.key(2019), arguments.seeds))
    tables = []
    for model, loss in LOSSES.items():
        problem = make_problem(loss, data)
        methods = dict(METHODS)
        if model == "SVM":
            del methods["plan, whitened"]
        rows = []
        for epsilon in EPSILONS:
            row = [epsilon]
            for name, method in methods.items():
                start = time.perf_counter()
                result = [accuracy(w, held_out) for w in method(problem, epsilon, keys)]
                row.append([float(np.mean(result)), float(np.std(result, ddof=1))])
                print(f"{model}, {epsilon:.3g}, {name}: {row[-1]}", end=", ")
                print(f"{time.perf_counter() - start:.1f} s", flush=True)
            rows.append(row)
        columns = {"ε": "{:.3g}"} | dict.fromkeys(methods, "{:.1f} ± {:.1f}")
        tables.append(
            Table("accuracy" if model == "logistic" else "svm", columns, rows)
        )
    columns = {"without privacy": "{}", "accuracy, %": "{:.1f}"}
    tables.append(Table("references", columns, references(data, held_out)))
    print_tables(*tables)
    write("adult_iyengar", arguments, tables, packages=[*OURS, "scikit_learn"])


if __name__ == "__main__":
    main()
