"""Define the methods that `erm.py` compares, with the benchmark's settings.

The methods are those of dpjax, diffprivlib and scikit-learn. A method takes a problem
with its δ, ε, a key, and the noise that an earlier call found, if any. A method returns
parameters and the noise.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _erm_problem import DELTA
from _published import output_perturbation_scale

import dpjax
from dpjax import Adjacency, solvers, statistics
from dpjax.accounting import calibrate, gdp, iteration, pld
from dpjax.solvers import choose_num_steps

BATCH, EPOCHS = 50, 3  # for noisy SGD and RRPSGD; the paper has batches of 50
STEPS_PER_EPOCH, NSGD_EPOCHS, DECAY = 50, 10, 0.9
SCALE_SHARE = 0.1  # the share of μ² for the units of features
PLAN_STEPS = 60
NOISE = {}  # the noise of RRPSGD, by number of examples and ε


def output_perturbation(problem, epsilon, key, known=None):
    """Run gradient descent for the theorems' number of steps, then add noise."""
    return _perturb_output(problem, epsilon, key, None).params, known


def published_output_perturbation(problem, epsilon, key, known=None):
    """Run output perturbation with the noise of the paper.

    The solver gets the ε at which dpjax needs that much noise.
    """
    if known is None:
        result = _perturb_output(problem, epsilon, key, None)
        scale = output_perturbation_scale(
            epsilon,
            DELTA,
            num_steps=result.num_steps,
            num_examples=problem.n,
            step_size=problem.step_size,
            **problem.setting,
        )
        spent = gdp.epsilon(result.sensitivity / scale, DELTA)
        known = float(spent), result.num_steps
    return _perturb_output(problem, known[0], key, known[1]).params, known


def _perturb_output(problem, epsilon, key, num_steps):
    return solvers.output_perturbation(
        problem.loss,
        problem.start,
        problem.data,
        epsilon=epsilon,
        delta=problem.delta,
        key=key,
        num_steps=num_steps,
        radius=problem.data_set.radius,
        step_size=problem.step_size,
        **problem.setting,
    )


def objective_perturbation(problem, epsilon, key, known=None):
    """Minimise the perturbed objective.

    The regularisation λ is μ, or follows the solver's rule where μ = 0.
    """
    result = solvers.objective_perturbation(
        problem.loss,
        problem.start,
        problem.data,
        epsilon=epsilon,
        delta=problem.delta,
        adjacency=Adjacency.REPLACE,
        regularization=problem.mu or None,
        key=key,
    )
    return result.params, known


def scale(problem, epsilon, key):
    """Estimate the root mean squares of features, for a share of μ².

    A mean square below a threshold is replaced by the threshold. The threshold is about
    the largest of d mean squares that consist of noise alone. Returns the scales, a
    bound on the norm of the scaled features, and the μ spent.
    """
    spent = SCALE_SHARE**0.5 * float(gdp.mu(epsilon, problem.delta))
    noise = 2**0.5 / spent  # under REPLACE a variance with a center has μ = √2 / z
    squares = statistics.variance(
        problem.data[0],
        clip_norm=1.0,
        noise_multiplier=noise,
        center=np.zeros(problem.d),
        adjacency=Adjacency.REPLACE,
        key=key,
    )
    least = noise / problem.n * (2 * np.log(problem.d)) ** 0.5
    scales = np.sqrt(np.maximum(np.asarray(squares.value), least))
    squares = np.maximum(np.asarray(squares.value), 0)
    bound = float(np.sqrt(np.sum(squares / scales**2)))
    return scales, bound, spent


def scaled_objective_perturbation(problem, epsilon, key, known=None):
    """Minimise the perturbed objective of features in the units of `scale`."""
    key, scale_key = jax.random.split(key)
    scales, bound, spent = scale(problem, epsilon, scale_key)
    # Features are in units of the bound, so that all releases share one program.
    scales = scales * bound
    result = solvers.objective_perturbation(
        problem.loss,
        problem.start,
        (problem.data[0] / scales.astype(np.float32), problem.data[1]),
        epsilon=epsilon,
        delta=problem.delta,
        adjacency=Adjacency.REPLACE,
        prior_mu=spent,
        key=key,
    )
    return np.asarray(result.params, np.float64) / scales, known


@functools.cache
def _whitened_run(num_examples, epsilon, delta):
    """Compile a run on full batches, with gradients clipped to norm 1."""
    left = (1 - SCALE_SHARE) ** 0.5 * float(gdp.mu(epsilon, delta))
    plan = dpjax.plan(
        num_examples=num_examples,
        batch_size=num_examples,
        num_steps=PLAN_STEPS,
        noise_multiplier=2 * PLAN_STEPS**0.5 / left,  # REPLACE: μ = 2 √T / z
        delta=delta,
        clip_norm=1.0,
        sampling="fixed",
        adjacency=Adjacency.REPLACE,
    )
    gradient = plan.value_and_grad(_logistic)

    @jax.jit
    def run(key, rate, params, examples):
        rates = optax.linear_schedule(rate, 0.0, PLAN_STEPS)
        optimizer = plan.optimizer(optax.sgd(rates), key=key)
        # A full batch is equal in all steps.
        batch = plan.load(examples, 0, key)

        def step(carry, _):
            params, state = carry
            _, grads = gradient(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        first = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, first, length=PLAN_STEPS)
        return params

    return run


def _logistic(w, examples):
    x, y = examples
    return jnp.mean(jax.nn.softplus(-y * (x @ w)))


def whitened_plan(problem, epsilon, key, known=None):
    """Train on full batches of features whose private second moments are about 1.

    All hyperparameters follow rules in n, d, ε and the released moments. The rules were
    set on Bank, and on Wine and Bike with labels divided into two classes.
    """
    key, scale_key = jax.random.split(key)
    n, d, mu = problem.n, problem.d, float(gdp.mu(epsilon, problem.delta))
    noise = 2**0.5 / (SCALE_SHARE**0.5 * mu)
    moments = statistics.covariance(
        problem.data[0],
        clip_norm=1.0,
        noise_multiplier=noise,
        center=np.zeros(d),
        adjacency=Adjacency.REPLACE,
        key=scale_key,
    )
    values, vectors = np.linalg.eigh(np.asarray(moments.value, np.float64))
    values = np.maximum(values, 0)
    # The eigenvalues of the matrix's noise are at most about 1.4 times `least`.
    least = noise / n * d**0.5
    whiten = (vectors / np.sqrt(values + least)) @ vectors.T
    squares = np.sum(values / (values + least))  # the mean square of a row's norm
    left = (1 - SCALE_SHARE) ** 0.5 * mu
    # With less noise, the larger clip norm c clips fewer gradients. At c = 1 only the
    # gradients of long rows are clipped.
    c = min(1.0, 0.5 * (n * left / squares / 150) ** (1 / 3))
    clip_norm = c * squares**0.5
    # The rate is the smaller of two rates. At the first rate, noise alone moves a score
    # by 2 standard deviations of logits. The second rate is four times the inverse of
    # the largest curvature.
    rate = 2 * 3**0.5 * left * n / (2 * clip_norm * PLAN_STEPS * squares**0.5)
    rate = min(rate, 16.0)
    # Features are in units of the clip norm, so that all releases share one program.
    x = (problem.x @ (whiten / clip_norm)).astype(np.float32)
    run = _whitened_run(n, epsilon, problem.delta)
    params = run(key, rate * clip_norm**2, problem.start, (x, problem.data[1]))
    return whiten @ np.asarray(params, np.float64) / clip_norm, known


def noisy_gd(problem, epsilon, key, known=None):
    """Run as many steps of noisy gradient descent as output perturbation takes."""
    steps = choose_num_steps(
        epsilon,
        DELTA,
        radius=problem.data_set.radius,
        dimension=problem.d,
        num_examples=problem.n,
        step_size=problem.step_size,
        **problem.setting,
    )
    target = {"noise_multiplier": known} if known else _target(epsilon)
    result = solvers.noisy_gd(
        problem.loss,
        problem.start,
        problem.data,
        num_steps=steps,
        key=key,
        step_size=problem.step_size,
        **target,
        **problem.setting,
    )
    return result.params, float(result.noise_multiplier)


def noisy_sgd(problem, epsilon, key, known=None):
    """Run private SGD on random batches, accounted for by its last iterate."""
    steps = EPOCHS * problem.n // BATCH
    setting = {**problem.setting, "step_size": _rate(problem, steps)}
    known = known or _noise_of_sgd(problem.n, steps, epsilon, setting)
    result = solvers.noisy_sgd(
        problem.loss,
        problem.start,
        problem.data,
        num_steps=steps,
        batch_size=BATCH,
        key=key,
        noise_multiplier=known,
        **setting,
    )
    return result.params, known


def _noise_of_sgd(n, steps, epsilon, setting):
    """Return a noise multiplier that the last iterate's bound allows.

    The noise multiplier is within about 1 % of the least. The search starts from the
    noise multiplier of composition, and takes three steps along the slope of log ε. The
    solver's own calibration closes the remaining gap, in four times the time.
    """

    def composed(noise):
        step = pld.subsampled_gdp(2 / noise, BATCH / n)
        return pld.epsilon(pld.compose(step, steps), DELTA)

    noise = best = float(calibrate.solve(composed, epsilon)) * (1 + 1e-6)
    for _ in range(3):
        spent = float(
            iteration.noisy_sgd_epsilon(
                noise,
                DELTA,
                num_steps=steps,
                batch_size=BATCH,
                num_examples=n,
                **setting,
            )
        )
        if spent <= epsilon:
            best = min(best, noise)
        if 0.99 * epsilon < spent <= epsilon:
            break
        noise *= (max(spent, 1e-3 * epsilon) / epsilon) ** 0.7 * (1 + 1e-3)
    return best


def random_round_sgd(problem, epsilon, key, known=None):
    """Run RRPSGD on batches of 50, for at most as many steps as noisy SGD."""
    steps = EPOCHS * problem.n // BATCH
    known = known or NOISE.get((problem.n, epsilon))
    target = {"noise_multiplier": known} if known else _target(epsilon)
    result = solvers.random_round_sgd(
        problem.whole_loss,
        problem.start,
        problem.data,
        adjacency=Adjacency.REPLACE,
        max_rounds=steps,
        batch_size=BATCH,
        step_size=_rate(problem, steps),
        smoothness=problem.loss.smoothness + problem.mu,
        clip_norm=2.0 if problem.mu else 1.0,
        key=key,
        **target,
    )
    # With one step size the number of rounds is uniform, so the noise is equal for
    # every μ.
    NOISE[problem.n, epsilon] = known = float(result.noise_multiplier)
    return result.params, known


def dp_nsgd(problem, epsilon, key, known=None):
    """Take normalised steps along a tree-aggregated momentum."""
    result = solvers.dp_nsgd(
        problem.whole_loss,
        problem.start,
        problem.data,
        epsilon=epsilon,
        delta=DELTA,
        adjacency=Adjacency.REPLACE,
        order="fixed",
        num_epochs=NSGD_EPOCHS,
        batch_size=-(-problem.n // STEPS_PER_EPOCH),
        learning_rate=_lengths(_distance(problem)),
        decay=DECAY,
        clip_norm=2.0 if problem.mu else 1.0,
        key=key,
    )
    return result.params, known


def sensitivity_reduced_nsgd(problem, epsilon, key, known=None):
    """Take normalised steps along the momentum of reduced sensitivity."""
    clip_norm = 2.0 if problem.mu else 1.0
    result = solvers.sensitivity_reduced_nsgd(
        problem.whole_loss,
        problem.start,
        problem.data,
        epsilon=epsilon,
        delta=DELTA,
        adjacency=Adjacency.REPLACE,
        num_epochs=NSGD_EPOCHS,
        batch_size=-(-problem.n // STEPS_PER_EPOCH),
        learning_rate=_lengths(_distance(problem)),
        decay=DECAY,
        refresh=0.3,
        clip_norm=clip_norm,
        change_clip_norm=0.3 * clip_norm,
        drift_clip_norm=0.3 * clip_norm,
        key=key,
    )
    return result.params, known


def diffprivlib(problem, epsilon, key, known=None):
    """Run diffprivlib's objective perturbation: pure ε, logistic regression only."""
    from diffprivlib.models import LogisticRegression

    # Without a regulariser diffprivlib has no guarantee. Its default is C = 1.
    C = 1 / (problem.n * problem.mu) if problem.mu else 1.0
    model = LogisticRegression(
        epsilon=epsilon,
        data_norm=1.0,
        C=C,
        fit_intercept=False,
        max_iter=1000,
        random_state=int(jax.random.randint(key, (), 0, 2**31 - 1)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(problem.x * (1 - 1e-6), problem.y)
    return model.coef_[0] * model.classes_[1], known


def scikit_learn(problem, epsilon, key, known=None):
    """Fit scikit-learn's model, without privacy."""
    from sklearn.linear_model import LogisticRegression, SGDRegressor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if problem.linear:
            model = SGDRegressor(
                loss="huber",
                epsilon=1.0,
                alpha=problem.mu,
                penalty="l2" if problem.mu else None,
                fit_intercept=False,
                average=True,
                max_iter=200,
                random_state=0,
            )
            return model.fit(problem.x, problem.y).coef_, known
        C = 1 / (problem.n * problem.mu) if problem.mu else np.inf
        model = LogisticRegression(C=C, fit_intercept=False, max_iter=1000)
        return model.fit(problem.x, problem.y).coef_[0], known


METHODS = {
    "output perturbation": output_perturbation,
    "output perturbation, published constants": published_output_perturbation,
    "objective perturbation": objective_perturbation,
    "objective perturbation, scaled": scaled_objective_perturbation,
    "plan, whitened": whitened_plan,
    "noisy GD": noisy_gd,
    "noisy SGD": noisy_sgd,
    "RRPSGD": random_round_sgd,
    "dp_nsgd": dp_nsgd,
    "reduced NSGD": sensitivity_reduced_nsgd,
    "diffprivlib": diffprivlib,
    "scikit-learn": scikit_learn,
}


def _target(epsilon):
    return {"epsilon": epsilon, "delta": DELTA}


def _rate(problem, steps):
    """Return a step size, at most 1/(β + 2μ), that covers a few times the radius."""
    return min(problem.step_size, 4 * problem.data_set.radius / steps**0.5)


def _distance(problem):
    """Return the distance to cover: the radius, or L/μ if regularised and smaller."""
    far = problem.data_set.radius
    return min(far, problem.loss.gradient_norm / problem.mu) if problem.mu else far


@functools.cache
def _lengths(distance):
    """Return step lengths that fall to zero and add up to twice the distance."""
    steps = NSGD_EPOCHS * STEPS_PER_EPOCH
    return optax.linear_schedule(4 * distance / steps, 0.0, steps)
