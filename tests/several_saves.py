"""One of several processes that save one run; `test_several_saves` starts and kills it.

Four devices of the CPU are divided among the processes, which come from a server that
has imported what is slow to import (see `killed_runs`).
"""

import dataclasses
import multiprocessing
import os
import signal
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dpjax
from dpjax import checkpoint, ledger, strategies

N, STEPS = 40, 6
DATA = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)
SPECS = {
    "up": PartitionSpec(None, "model"),
    "cut": PartitionSpec(("data", "model")),  # in pieces on every device
    "bias": PartitionSpec(),
}
SETTING = {
    "num_examples": N,
    "batch_size": 8,
    "num_steps": STEPS,
    "noise_multiplier": 1.3,
    "delta": 1e-3,
    "clip_norm": 0.6,
    "sampling": "reshuffled",
    "adjacency": dpjax.Adjacency.ZERO_OUT,
    "noise": "correlated",
    "strategy": strategies.tree(0.8),
}


def loss(params, x):
    h = jnp.tanh(x @ (params["up"] + params["cut"].reshape(6, 4)))
    return jnp.mean((h.sum(-1) + params["bias"] - 1) ** 2)


def train(folder, key):
    """Resume from the folder, train to the end, save and release every second step."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    over = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    plan = dpjax.plan(**SETTING)
    tx = plan.optimizer(optax.adam(0.1), key=key)
    rng = np.random.default_rng(1)
    params = {
        name: jax.make_array_from_callback(shape, over[name], start.__getitem__)
        for name, shape in {"up": (6, 4), "cut": (8, 3), "bias": ()}.items()
        for start in [rng.normal(size=shape).astype(np.float32)]
    }

    @jax.jit
    def step(params, state, examples):
        _, grads = plan.value_and_grad(loss)(params, examples)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.lax.with_sharding_constraint(params, over), state

    run = checkpoint.Run(key, 0, params, jax.jit(tx.init)(params))
    run = checkpoint.resume(folder / "run", plan, run, keep=STEPS)
    if run.step:
        run = ledger.release(folder / "ledger", plan, run)
    split = NamedSharding(mesh, PartitionSpec("data"))
    for batch in plan.batches(DATA, key=key, start=run.step, sharding=split):
        params, state = step(run.params, run.opt_state, batch)
        run = run._replace(step=run.step + 1, params=params, opt_state=state)
        if run.step % 2 == 0:
            checkpoint.save(folder / "run", plan, run, keep=STEPS)
            run = ledger.release(folder / "ledger", plan, run)
    return plan, run


def assert_invalid_calls_raise(folder, plan, run, number):
    """Where the call of one process is invalid, all processes raise."""
    other = run._replace(key=jax.random.key(number))
    with pytest.raises(
        ValueError, match=r"identical in all 2 .* differ in key, arrays"
    ):
        checkpoint.save(folder / "other", plan, other)
    with pytest.raises(ValueError, match="differ in key"):
        ledger.release(folder / "other-ledger", plan, other)
    another = dataclasses.replace(plan, delta=1e-4)
    with pytest.raises(ValueError, match=r"the differences are plan\.delta"):
        checkpoint.save(folder / "run", another, run)
    with pytest.raises(OSError, match="No such file"):  # the first alone opens it
        ledger.release(folder / "nowhere" / "ledger", plan, run)
    with pytest.raises(ValueError, match="must contain a checkpoint"):
        checkpoint.restore(folder / "other", plan, run)
    with pytest.raises(ValueError, match=r"plan\.delta \(saved 0.001, given 0.0001\)"):
        # Invalid in the second process alone.
        checkpoint.restore(folder / "run", another if number else plan, run)


def _train_in_process(address, count, number, folder, cache, dies_at):
    """Train in one process; the last is killed as it starts to save step `dies_at`."""
    jax.config.update("jax_num_cpu_devices", 4 // count)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(address, count, number)

    def save_or_die(
        handler, folder, *args, save=ocp.StandardCheckpointHandler.save, **named
    ):
        if f"run/{dies_at}.unfinished/arrays" in str(folder) and number == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(handler, folder, *args, **named)

    ocp.StandardCheckpointHandler.save = save_or_die
    plan, run = train(folder, jax.random.key(5))
    result = checkpoint.digest(run.params)
    if count == 2:
        assert_invalid_calls_raise(folder, plan, run, number)
    (folder / f"{count}-{number}").write_text(result)


def run_processes(count, folder, dies_at=-1):
    """Run all processes to the end, or until the last is killed, then kill the rest."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["several_saves", "orbax.checkpoint"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    given = folder, jax.config.jax_compilation_cache_dir, dies_at
    processes = [
        server.Process(target=_train_in_process, args=(address, count, number, *given))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    try:
        if dies_at > 0:
            processes[-1].join(240)
            assert processes[-1].exitcode == -signal.SIGKILL
            return
        for process in processes:
            process.join(240)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
