"""A small private run in a process of its own, which is killed at a given time.

Processes are forked from a server that has imported the slow modules but not started
JAX, so that each of them starts quickly. See `test_checkpoint`.
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


def initial_run(plan, key):
    w = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    state = plan.optimizer(optax.adam(0.1), key=key).init(w)
    return checkpoint.Run(key, 0, w, state)


def make_step(plan):
    """One step of the run, compiled."""
    tx = plan.optimizer(optax.adam(0.1), key=jax.random.key(0))

    @jax.jit
    def step(data, number, key, w, state):
        _, grads = plan.value_and_grad(loss)(w, plan.load(data, number, key))
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    def advance(run, data=DATA):
        number = np.int32(run.step)
        w, state = step(data, number, run.key, run.params, run.opt_state)
        return run._replace(step=run.step + 1, params=w, opt_state=state)

    return advance


def train(folder, done):
    """Resume from the newest checkpoint in the folder and train to the end.

    Every second step is saved and released; `done` is called after each step.
    """
    folder = pathlib.Path(folder)
    plan = checkpoint.plan_of(folder / "run")
    run = checkpoint.resume(folder / "run", plan, initial_run(plan, jax.random.key(0)))
    step = make_step(plan)
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


def _train_and_die(folder, cache, steps, seconds):
    """`train`, and kill the process so many seconds after so many steps."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_disable_most_optimizations", True)
    count = itertools.count(1)
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)

    def schedule_kill():
        if next(count) == steps:
            end = threading.Timer(seconds, kill)
            end.daemon = True
            end.start()

    train(folder, schedule_kill)


def run_in_process(folder, steps=0, seconds=0.0):
    """Exit code of a process that is killed, or not (`steps` = 0)."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["dpjax", "orbax.checkpoint"])
    cache = jax.config.jax_compilation_cache_dir
    given = str(folder), cache, steps, seconds
    process = server.Process(target=_train_and_die, args=given)
    process.start()
    process.join()
    return process.exitcode
