"""A small private run in a process of its own, which is killed at some time.

Processes come from a server that has imported what is slow to import, and started
nothing of JAX, so that each of them is there in a moment. See `test_checkpoint`.
"""

import functools
import itertools
import multiprocessing
import os
import pathlib
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import Adjacency, checkpoint, ledger

N, STEPS = 40, 8
DATA = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
SETTING = {
    "num_examples": N,
    "batch_size": 8,
    "num_steps": STEPS,
    "noise_multiplier": 1.3,
    "delta": 1e-3,
    "clip_norm": 0.6,
    "sampling": "reshuffled",
    "adjacency": Adjacency.ZERO_OUT,
}


def loss(w, x):
    return jnp.mean((x @ w["w"] - 0.3 + w["b"]) ** 2)


def begin(plan, key):
    w = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    state = plan.optimizer(optax.adam(0.1), key=key).init(w)
    return checkpoint.Run(key, 0, w, state)


def step_of(plan):
    """One step of the run, compiled."""
    tx = plan.optimizer(optax.adam(0.1), key=jax.random.key(0))

    @jax.jit
    def step(data, number, key, w, state):
        _, grads = plan.value_and_grad(loss)(w, plan.load(data, number, key))
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    def fn(run, data=DATA):
        number = np.int32(run.step)
        w, state = step(data, number, run.key, run.params, run.opt_state)
        return run._replace(step=run.step + 1, params=w, opt_state=state)

    return fn


def train(folder, done):
    """To the end from whatever is in the folder, and released as it goes."""
    folder = pathlib.Path(folder)
    plan = checkpoint.plan_of(folder / "run")
    run = checkpoint.resume(folder / "run", plan, begin(plan, jax.random.key(0)))
    step = step_of(plan)
    if run.step:
        run = ledger.release(folder / "ledger", plan, run)
    while run.step < plan.num_steps:
        run = step(run)
        done()
        if run.step % 2 == 0:
            checkpoint.save(folder / "run", plan, run)
            run = ledger.release(folder / "ledger", plan, run)
            with open(folder / "published", "a") as file:
                file.write(f"{run.step} {checkpoint.digest(run.params)}\n")
    return run


def _process(folder, cache, steps, seconds):
    """`train`, until so many seconds after so many steps the process is killed."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_disable_most_optimizations", True)
    count = itertools.count(1)
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)

    def done():
        if next(count) == steps:
            end = threading.Timer(seconds, kill)
            end.daemon = True
            end.start()

    train(folder, done)


def start(folder, steps=0, seconds=0.0):
    """How a process ended that was to be killed, or not (0 steps)."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["dpjax", "orbax.checkpoint"])
    cache = jax.config.jax_compilation_cache_dir
    given = str(folder), cache, steps, seconds
    process = server.Process(target=_process, args=given)
    process.start()
    process.join()
    return process.exitcode
