"""Measure the noise and the time of tree-aggregated momentum.

    python benchmarks/momentum.py [--size 10000000]

The script compares the noise that exact accounting needs with the published constant,
times the accountant, compares the time of a step with the time of a step with
independent noise, and compares the measured variance of the noise with its formula. The
stored buffer has ⌊log₂ T⌋ + 1 times the memory of the parameters.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from _published import dp_nsgd_noise_multiplier
from _results import Table, parser, print_tables, write
from _timing import compiled, said, steps_in_turn, take_turns

from dpjax import Adjacency, add_gaussian_noise, tree_momentum
from dpjax.accounting.tree import momentum_mu
from dpjax.noise import tree

KEY = jax.random.key(0)
FIRST_STEP = 2730  # in binary 101010101010
ROUNDS = 21


def noise_at_equal_privacy():
    """Compare the noise of a node over the clip norm, at μ = 1 under REPLACE."""
    rows = []
    for n_b, epochs, decay in [(100, 10, 0.99), (32, 32, 0.99), (1000, 8, 0.999)]:
        fixed, reshuffled = (
            float(
                momentum_mu(
                    1.0,
                    num_steps=n_b * epochs,
                    decay=decay,
                    steps_per_epoch=n_b,
                    order=order,
                    adjacency=Adjacency.REPLACE,
                )
            )
            for order in ("fixed", "reshuffled")
        )
        printed = dp_nsgd_noise_multiplier(
            1.0, num_steps=n_b * epochs, steps_per_epoch=n_b
        )
        rows.append([n_b, epochs, decay, fixed, reshuffled, printed, printed / fixed])
    columns = {"steps per epoch": "{}", "epochs": "{}", "decay": "{}"}
    columns |= {"exact, fixed order": "{:.2f}", "bound, reshuffled": "{:.2f}"}
    columns |= {"published constant": "{:.2f}", "published / exact": "{:.2f}"}
    return Table("noise", columns, rows)


def accountant_time():
    """Time momentum_mu for 100,000 steps, 1,000 steps per epoch."""
    functions, build = {}, {}
    for order in ("fixed", "reshuffled"):
        program, build[order] = compiled(
            lambda sigma, decay, order=order: momentum_mu(
                sigma,
                num_steps=100_000,
                decay=decay,
                steps_per_epoch=1000,
                order=order,
                adjacency=Adjacency.ZERO_OUT,
            ),
            *(arguments := (jnp.asarray(1.7), jnp.asarray(0.99))),
        )
        functions[order] = lambda program=program: program(*arguments)
    columns = {
        "order": "{}",
        "ms": "{:.2g}",
        "maximum, ms": "{:.2g}",
        "compile, s": "{:.1f}",
    }
    rows = [
        [order, 1e3 * times.median, 1e3 * times.most, build[order]]
        for order, times in take_turns(functions, rounds=ROUNDS).items()
    ]
    return Table("accountant", columns, rows)


def step_time(size):
    """Time a step of tree momentum and of independent noise; the state is donated."""
    gradient = jnp.ones(size)
    candidates = {
        "add_gaussian_noise": add_gaussian_noise(1.3, key=KEY),
        "tree_momentum stored": tree_momentum(0.99, 1.3, num_steps=4096, key=KEY),
        "tree_momentum regenerate": tree_momentum(
            0.99, 1.3, num_steps=4096, key=KEY, buffer="regenerate"
        ),
    }
    states = {name: tx.init(gradient) for name, tx in candidates.items()}
    for name in list(states)[1:]:  # steps with typical numbers of binary ones
        states[name] = states[name]._replace(step=jnp.asarray(FIRST_STEP))
    return steps_in_turn(candidates, states, size, ROUNDS)


def measured_variance():
    """Compare the sample variance of the momentum's noise with the formula."""
    size, num_steps, decay, stddev = 20_000, 1025, 0.97, 2.5
    tx = tree_momentum(decay, stddev, num_steps=num_steps, key=KEY)

    def step(state, _):
        out, state = tx.update(jnp.zeros(size), state)
        return state, jnp.var(out)

    _, measured = jax.jit(
        lambda: jax.lax.scan(step, tx.init(jnp.zeros(size)), length=num_steps)
    )()
    steps = np.arange(1, num_steps + 1)
    formula = (stddev * (1 - decay)) ** 2 * tree.prefix_variance(steps, decay)
    z = np.asarray((measured / formula - 1) / math.sqrt(2 / size))
    rows = [
        [t, measured[t - 1], formula[t - 1], z[t - 1]]
        for k in (3, 6, 8, 10)
        for t in (2**k - 1, 2**k, 2**k + 1)
    ]
    # By chance, the largest of the 1025 values of |z| is above 5 once in 1,700 runs.
    rows.append(["largest of all, absolute", None, None, np.max(np.abs(z))])
    columns = {"t": "{}", "measured": "{:.6f}", "formula": "{:.6f}", "z": "{:+.2f}"}
    return Table("variance", columns, rows)


def main():
    """Run the four measurements."""
    options = parser(__doc__)
    options.add_argument("--size", type=int, default=10_000_000)
    arguments = options.parse_args()
    tables = [
        noise_at_equal_privacy(),
        accountant_time(),
        step_time(arguments.size),
        measured_variance(),
    ]
    print_tables(*tables)
    write("momentum", arguments, tables, times=said(ROUNDS))


if __name__ == "__main__":
    main()
