"""Plans whose noise, clip norm and batch size vary by step, or follow a quantile."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import Adjacency
from dpjax._plan.parameters import noise_of
from dpjax.accounting import pld, truncation

KEY = jax.random.wrap_key_data(np.array([0, 7], np.uint32))
N, B, T = 400, 50, 24
X = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)
W = np.linspace(-1, 1, 5, dtype=np.float32)
WIDE = 40_000


def make_fixed_plan(**changed):
    given = {
        "num_examples": N,
        "batch_size": B,
        "num_steps": T,
        "noise_multiplier": 1.6,
        "delta": 1e-5,
        "clip_norm": 0.7,
        "sampling": "fixed",
        "adjacency": Adjacency.ZERO_OUT,
    }
    return dpjax.plan(**{**given, **changed})


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2) * 30


def three_stage_schedule(first, second, third):
    """A schedule of three stages, eight steps each."""
    numbers = np.repeat([first, second, third], 8)
    return lambda step: numbers[step]


def released_means(run, sums):
    """The noisy means of each step, by an identity optimizer."""
    tx = run.optimizer(optax.identity(), key=KEY)
    state, out = jax.jit(tx.init)(sums), []
    update = jax.jit(tx.update)
    for _ in range(run.num_steps):
        mean, state = update(sums, state)
        out.append(np.asarray(mean, np.float64))
    return np.stack(out)


# --- privacy cost


def test_constant_schedule_leaves_epsilon_unchanged():
    plain, scheduled = (
        make_fixed_plan(),
        make_fixed_plan(noise_schedule=lambda step: 1.0),
    )
    assert scheduled.epsilon == pytest.approx(plain.epsilon, rel=1e-6)
    assert scheduled.epsilon >= plain.epsilon


@pytest.mark.diagonal
@pytest.mark.parametrize("order", ["fixed", "reshuffled"])
def test_mu_of_schedules_is_that_of_the_worst_position(order):
    # Eight steps per epoch: position j has the steps j, 8 + j, 16 + j.
    factors = np.where(np.arange(T) % 8 == 3, 1.0, 2.0)
    factors[3] = 4.0
    of_step = jax.jit(lambda t: jnp.asarray(factors)[t])
    run = make_fixed_plan(sampling=order, noise_schedule=of_step)
    costs = (factors**-2.0).reshape(3, 8)
    total = costs.sum(0).max() if order == "fixed" else costs.max(1).sum()
    mu = float(run.guarantee.profile.mu)
    assert mu == pytest.approx(math.sqrt(total) / 1.6, rel=1e-6)
    early = run.guarantee.at(5).profile.mu
    assert float(early) == pytest.approx(math.sqrt(costs[0, :5].max()) / 1.6, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
def test_epsilon_of_scheduled_poisson_plan_equals_composition(adjacency):
    run = dpjax.plan(
        num_examples=N,
        batch_size=20,
        num_steps=T,
        epsilon=2.0,
        delta=1e-5,
        clip_norm=0.7,
        adjacency=adjacency,
        noise_schedule=three_stage_schedule(1.0, 2.0, 1.0),
        batch_schedule=three_stage_schedule(1.0, 1.0, 2.0),
    )
    steps = [
        pld.compose(
            truncation.poisson_gaussian(
                run.noise_multiplier * noise,
                size / N,
                num_examples=N,
                max_batch_size=run.max_batch_size,
                adjacency=adjacency,
            ),
            8,
        )
        for noise, size in [(1.0, 20), (2.0, 20), (1.0, 40)]
    ]
    whole = pld.convolve(pld.convolve(steps[0], steps[1]), steps[2])
    assert run.epsilon == pytest.approx(float(pld.epsilon(whole, 1e-5)), rel=1e-4)
    assert 1.9 < run.epsilon <= 2.0
    assert run.max_batch_size >= 40
    half = run.guarantee.at(8).epsilon(1e-5)
    assert float(half) == pytest.approx(float(pld.epsilon(steps[0], 1e-5)), rel=1e-4)
    sizes = [int(run.batch(t, KEY).mask.sum()) for t in (0, 23)]
    jitted = jax.jit(run.batch)
    assert sizes == [int(jitted(t, KEY).mask.sum()) for t in (0, 23)]


@pytest.mark.slow
def test_batch_sizes_follow_the_schedule():
    run = dpjax.plan(
        num_examples=N,
        batch_size=20,
        num_steps=T,
        noise_multiplier=5.0,
        max_batch_size=120,
        delta=1e-5,
        clip_norm=0.7,
        batch_schedule=three_stage_schedule(1.0, 2.0, 3.0),
    )
    masks = jax.vmap(lambda t, k: run.batch(t, k).mask, (None, 0))
    for step, size in [(0, 20), (7, 20), (8, 40), (16, 60), (23, 60)]:
        counts = masks(step, jax.random.split(KEY, 200)).sum(1)
        # Of 200 draws; z = 5, false alarm below 1e-6 each.
        assert abs(np.mean(counts) - size) < 5 * math.sqrt(size / 200)
    means = released_means(run, np.full(4, 1e6, np.float32))
    np.testing.assert_allclose(means[[0, 8, 16], 0] * [20, 40, 60], 1e6, rtol=1e-4)


def test_smooth_noise_schedule_is_rounded_up_to_levels():
    run = make_fixed_plan(noise_schedule=jax.jit(optax.exponential_decay(2.0, T, 0.4)))
    requested = np.array([2.0 * 0.4 ** (t / T) for t in range(T)])
    starts = [p.start for p in run.schedule]
    held = np.searchsorted(starts, np.arange(T), side="right") - 1
    levels = np.array([p.noise for p in run.schedule])[held]
    assert len(set(levels)) <= 8
    assert np.all(levels >= requested * (1 - 1e-6))
    assert np.all(levels <= requested * 0.4 ** (-1 / 8) * 1.001)
    noise = released_means(run, np.zeros(WIDE, np.float32)) * B / (1.6 * 0.7)
    spread = np.std(noise, axis=1) / levels
    assert np.all(np.abs(spread - 1) < 5 / math.sqrt(2 * WIDE))
    correlations = np.corrcoef(noise)[np.triu_indices(T, 1)]
    assert np.all(np.abs(correlations) < 6 / math.sqrt(WIDE))


# --- clip norms


def test_clip_schedule_scales_clipping_and_noise():
    run = make_fixed_plan(clip_schedule=three_stage_schedule(1.0, 0.5, 0.1))
    assert run.epsilon == pytest.approx(make_fixed_plan().epsilon, rel=1e-6)
    fn = jax.jit(run.value_and_grad(loss))
    load = jax.jit(lambda step: run.load(X, step, KEY))
    by_row = jax.jit(jax.vmap(jax.grad(lambda w, x: loss(w, x[None])), (None, 0)))
    for step, clip in [(0, 0.7), (8, 0.35), (23, 0.07)]:
        examples = load(step)
        grads = np.asarray(fn(W, examples)[1])
        each = np.asarray(by_row(W, examples.data))
        norms = np.linalg.norm(each, axis=1, keepdims=True)
        expected = np.sum(each * np.minimum(1, clip / norms), axis=0)
        # Sums are in units of the plan's clip norm until noise is added.
        np.testing.assert_allclose(grads * clip / 0.7, expected, rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(grads) <= 0.7 * B
    noise = released_means(run, np.zeros(WIDE, np.float32)) * B / (1.6 * 0.7)
    for step, factor in [(0, 1.0), (8, 0.5), (23, 0.1)]:
        assert abs(np.std(noise[step]) / factor - 1) < 5 / math.sqrt(2 * WIDE)
    on_host = next(iter(run.batches(X, key=KEY, start=8)))
    np.testing.assert_allclose(fn(W, on_host)[1], fn(W, load(8))[1], rtol=1e-6)
    with pytest.raises(ValueError, match="step"):
        run.value_and_grad(loss)(W, on_host._replace(step=None))


def make_quantile_plan(**changed):
    clip = dpjax.QuantileClip(0.01, **{"quantile": 0.6, **changed})
    return make_fixed_plan(clip_norm=clip, num_steps=120)


def test_clip_norm_converges_to_the_quantile():
    run = make_quantile_plan(learning_rate=0.3)
    data = X * np.linspace(0.1, 3, N, dtype=np.float32)[:, None]
    fn = run.value_and_grad(lambda w, x: jnp.mean(x @ w))
    tx = run.optimizer(optax.sgd(0.0), key=KEY)

    @jax.jit
    def step(state, examples):
        _, grads = fn(W, examples, clip_norm=run.clip_norm_of(state))
        return tx.update(grads, state, W)[1], grads.total

    state = jax.jit(tx.init)(W)
    for examples in run.batches(data, key=KEY):
        state, total = step(state, examples)
        assert np.linalg.norm(total) <= B
    norms = np.linalg.norm(data, axis=1)
    share = np.mean(norms <= float(run.clip_norm_of(state)))
    # The learning rate is 0.3, the count has noise 6.4 in 50, and batches vary.
    assert abs(share - 0.6) < 0.15


@pytest.mark.diagonal
@pytest.mark.parametrize("of_count", [None, 1.0, 30.0])
def test_gradient_and_count_noise_compose_to_the_plan_noise(of_count):
    run = make_quantile_plan(noise_multiplier=of_count, learning_rate=0.5)
    result = run.guarantee.record()["clip_norm_follows"]
    sigma = result["noise_multiplier_of_gradients"]
    sigma_b = result["noise_multiplier_of_count"]
    assert sigma_b == (of_count or max(B / 20, 4 * 1.6))
    assert 1 / sigma**2 + 0.25 / sigma_b**2 == pytest.approx(1 / 1.6**2, rel=1e-12)
    assert run.epsilon == make_fixed_plan(num_steps=120).epsilon

    # The noise as executed: in the mean, in units of C / b, and in log C.
    tx = run.optimizer(optax.identity(), key=KEY)
    wide = np.zeros(WIDE, np.float32)
    within = np.float32(7)

    @jax.jit
    def first(total):
        return tx.update(dpjax.Bounded(total, within), tx.init(total))[0]

    mean = first(wide)
    spread = np.std(np.asarray(mean) * B / 0.01) / sigma
    assert abs(spread - 1) < 5 / math.sqrt(2 * WIDE)

    @jax.jit
    @jax.vmap
    def count(key):
        tx = run.optimizer(optax.identity(), key=key)
        sums = dpjax.Bounded(jnp.zeros(1), jnp.asarray(7.0))
        _, state = tx.update(sums, tx.init(jnp.zeros(1)))
        share = 0.6 - jnp.log(run.clip_norm_of(state) / 0.01) / 0.5
        return (share - 0.5) * B

    counts = np.asarray(count(jax.random.split(KEY, 4000)), np.float64)
    assert abs(np.std(counts) / sigma_b - 1) < 5 / math.sqrt(2 * 4000)
    assert abs(np.mean(counts) - 7) < 5 * sigma_b / math.sqrt(4000)


def test_example_changes_gradients_and_count_within_sensitivity():
    run = make_quantile_plan()
    fn = jax.jit(run.value_and_grad(lambda w, x: jnp.mean(x @ w)))
    examples = next(run.batches(X, key=KEY))
    mask = np.asarray(examples.mask).copy()
    mask[3] = False
    bound = np.float32(0.8)
    _, whole = jax.device_get(fn(W, examples, clip_norm=bound))
    _, less = jax.device_get(fn(W, examples._replace(mask=mask), clip_norm=bound))
    assert np.linalg.norm(whole.total - less.total) <= 1 + 1e-6
    assert abs(whole.within - less.within) == 0.5
    spoilt = np.where(np.arange(B)[:, None] == 3, np.nan, examples.data)
    broken = examples._replace(data=spoilt)
    _, other = jax.device_get(fn(W, broken, clip_norm=bound))
    np.testing.assert_allclose(other.total, less.total, rtol=1e-5)
    assert abs(other.within - less.within) == 0.5


# --- misuse


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"noise_schedule": 2.0}, "noise_schedule"),
        ({"noise_schedule": lambda t: 0.0 * t}, "noise_schedule"),
        ({"noise_schedule": lambda t: jnp.ones(2)}, "noise_schedule"),
        ({"clip_schedule": lambda t: float("nan")}, "clip_schedule"),
        ({"batch_schedule": lambda t: 1.0}, "batch_schedule"),
        (
            {"noise_schedule": lambda t: 1.0, "num_steps": None, "epsilon": 2.0},
            "num_steps",
        ),
        (
            {"clip_norm": dpjax.QuantileClip(1.0), "clip_schedule": lambda t: 1.0},
            "clip_schedule",
        ),
        ({"clip_norm": dpjax.QuantileClip(0.0)}, "initial"),
        ({"clip_norm": dpjax.QuantileClip(1.0, quantile=1.0)}, "quantile"),
        ({"clip_norm": dpjax.QuantileClip(1.0, learning_rate=-1.0)}, "learning_rate"),
        (
            {"clip_norm": dpjax.QuantileClip(1.0, noise_multiplier=0.8)},
            "noise_multiplier",
        ),
        (
            {
                "sampling": "poisson",
                "batch_schedule": lambda t: 20.0,
            },
            "batch_size",
        ),
    ],
)
def test_invalid_arguments_raise(changed, name):
    with pytest.raises(ValueError, match=name):
        make_fixed_plan(**changed)


def test_clip_norm_argument_is_required_only_for_quantile_clipping():
    run, plain = make_quantile_plan(), make_fixed_plan()
    with pytest.raises(ValueError, match="clip_norm"):
        run.value_and_grad(loss)(W, next(run.batches(X, key=KEY)))
    with pytest.raises(ValueError, match="clip_norm"):
        plain.value_and_grad(loss)(W, next(plain.batches(X, key=KEY)), clip_norm=9.0)
    state = jax.jit(plain.optimizer(optax.sgd(0.1), key=KEY).init)(W)
    with pytest.raises(ValueError, match="QuantileClip"):
        plain.clip_norm_of(state)
    with pytest.raises(ValueError, match="state"):
        run.clip_norm_of(state)


@pytest.mark.slow
def test_reports_state_the_schedules():
    text = str(
        make_fixed_plan(noise_schedule=three_stage_schedule(1.0, 2.0, 3.0)).guarantee
    )
    assert "noise 2" in text
    assert "from step 16" in text
    both = make_fixed_plan(
        clip_norm=dpjax.QuantileClip(0.5),
        noise_schedule=three_stage_schedule(1.0, 2.0, 3.0),
    )
    assert "noise 3," in str(both.guarantee)
    assert "noisy count" in str(both.guarantee)
    sizes = {"sampling": "poisson", "max_batch_size": 200, "noise_multiplier": 5.0}
    one = make_fixed_plan(batch_schedule=lambda step: 2.0, **sizes)
    assert "probability 100/400;" in str(one.guarantee)
    several = make_fixed_plan(
        batch_schedule=three_stage_schedule(1.0, 1.0, 2.0), **sizes
    )
    assert "probability b/400;" in str(several.guarantee)
    assert "b = 100 from step 16" in str(several.guarantee)
    follows = make_quantile_plan().guarantee
    assert "noisy count" in str(follows)
    assert follows.to_json()


# --- limits of floats


@pytest.mark.parametrize("initial", [1e38, 1e-39, float("inf"), float("nan")])
def test_clip_norms_outside_float_range_raise(initial):
    with pytest.raises(ValueError, match=r"clip_norm|initial"):
        make_fixed_plan(clip_norm=dpjax.QuantileClip(initial))
    with pytest.raises(ValueError, match="clip_norm"):
        make_fixed_plan(clip_norm=initial, clip_schedule=lambda t: 0.5)


@pytest.mark.diagonal
@pytest.mark.parametrize("number", [np.float16, np.float32, jnp.float32])
def test_low_precision_numbers_are_used_exactly(number):
    clip = dpjax.QuantileClip(0.5, quantile=number(0.5), noise_multiplier=number(30.1))
    run = make_fixed_plan(clip_norm=clip)
    result = run.guarantee.record()["clip_norm_follows"]
    whole = result["noise_multiplier_of_gradients"] ** -2
    whole += 0.25 * result["noise_multiplier_of_count"] ** -2
    assert whole <= 1.6**-2 * (1 + 1e-14)
    assert run.guarantee.to_json()
    assert hash(run) == hash(make_fixed_plan(clip_norm=clip))


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["x64", "strict"])
def test_quantile_plan_scans_under_x64_and_strict_promotion(name):
    scope = (
        jax.enable_x64(True) if name == "x64" else jax.numpy_dtype_promotion("strict")
    )
    with scope:
        run = make_quantile_plan()
        fn = run.value_and_grad(lambda w, x: jnp.mean(x @ w))
        tx = run.optimizer(optax.sgd(0.1), key=KEY)

        def step(carry, number):
            w, state = carry
            examples = run.load(X, number, KEY)
            _, grads = fn(w, examples, clip_norm=run.clip_norm_of(state))
            updates, state = tx.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), ()

        @jax.jit
        def train(w):
            numbers = jnp.arange(3, dtype=jnp.int32)
            return jax.lax.scan(step, (w, tx.init(w)), numbers)[0][0]

        w = train(W)
        assert np.isfinite(w).all()


def test_unbounded_sum_raises():
    tx = make_quantile_plan().optimizer(optax.sgd(0.1), key=KEY)
    with pytest.raises(ValueError, match="Bounded"):
        jax.eval_shape(lambda w: tx.update(w, tx.init(w)), W)


@pytest.mark.parametrize("over", [2.0**-49, 1e-12, 1e-6, 0.1, 10.0])
@pytest.mark.parametrize("z", [0.3, 1.6, 7.7])
def test_gradient_noise_suffices_for_any_count_noise(z, over):
    clip = dpjax.QuantileClip(1.0, noise_multiplier=z / 2 * (1 + over))
    try:
        sigma, sigma_b = (Fraction(x) for x in noise_of(clip, z, 100))
    except ValueError:
        assert over < 1e-14
        return
    assert 1 / sigma**2 + Fraction(1, 4) / sigma_b**2 <= 1 / Fraction(z) ** 2
