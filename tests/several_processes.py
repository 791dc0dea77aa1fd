"""One of several processes that train one model; `test_processes` starts them.

Eight devices of the CPU are divided among the processes, which come from a server that
has imported what is slow to import (see `killed_runs`). The last parameters and the
examples that each process read go to a folder.
"""

import multiprocessing
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import dpjax

SIZE, STEPS = 200, 6
SPECS = {
    "up": PartitionSpec(None, "model"),
    "down": PartitionSpec("model", None),
    "cut": PartitionSpec("data", None),  # fully sharded over all devices
    "bias": PartitionSpec(),
}


class RecordingDataset:
    """A data set that records which examples were read."""

    def __init__(self):
        x = np.random.default_rng(0).normal(size=(SIZE, 6)).astype(np.float32)
        self.x, self.read = x, []

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        self.read.append(i)
        return self.x[i], np.float32(self.x[i, 0] > 0)


def loss(params, examples):
    x, y = examples
    h = jnp.tanh(x @ (params["up"] + params["cut"].reshape(6, 16))) @ params["down"]
    return jnp.mean((h[..., 0] + params["bias"] - y) ** 2)


def _train_in_process(address, count, number, folder, cache):
    """Train with Adam and independent noise, and with tree noise; save both results."""
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_disable_most_optimizations", True)
    if count > 1:
        jax.distributed.initialize(address, count, number)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    over = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    rng = np.random.default_rng(1)
    start = {
        "up": rng.normal(size=(6, 16)).astype(np.float32),
        "down": rng.normal(size=(16, 1)).astype(np.float32),
        "cut": rng.normal(size=(12, 8)).astype(np.float32),
        "bias": np.zeros((), np.float32),
    }
    plan = dpjax.plan(
        num_examples=SIZE,
        batch_size=20,
        num_steps=STEPS,
        noise_multiplier=0.6,
        delta=1e-5,
        clip_norm=0.7,
        max_batch_size=48,
    )
    secret = jax.random.key_data(jax.random.key(5 + number))
    if count > 1:  # the first process makes the key, and sends it to the others
        secret = multihost_utils.broadcast_one_to_all(secret)
    key = jax.random.wrap_key_data(jnp.asarray(np.asarray(secret)))
    data = RecordingDataset()

    results = {}
    for name, tx in {
        "adam": plan.optimizer(optax.adam(0.1), key=key),
        "tree": dpjax.tree_momentum(0.9, 1.3, num_steps=STEPS, key=key),
    }.items():
        data.read.clear()
        params = {
            leaf: jax.make_array_from_callback(x.shape, over[leaf], x.__getitem__)
            for leaf, x in start.items()
        }
        state = jax.jit(tx.init)(params)
        gradient = jax.jit(plan.value_and_grad(loss))

        @jax.jit
        def apply_noisy_update(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            params = jax.tree.map(lambda p, u: p - 0.01 * u, params, updates)
            return jax.lax.with_sharding_constraint(params, over), state

        split = NamedSharding(mesh, PartitionSpec("data"))
        for examples in plan.batches(data, key=key, sharding=split, prefetch=2):
            _, grads = gradient(params, examples)
            params, state = apply_noisy_update(params, state, grads)
        whole = multihost_utils.process_allgather(params, tiled=True)
        results |= {f"{name} {leaf}": np.asarray(x) for leaf, x in whole.items()}
        results[f"{name} read"] = np.asarray(data.read)
    np.savez(folder / f"{count}-{number}.npz", **results)


def run_processes(count, folder):
    """The results of each process, by name."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["several_processes", "orbax.checkpoint"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    cache = jax.config.jax_compilation_cache_dir
    processes = [
        server.Process(
            target=_train_in_process, args=(address, count, number, folder, cache)
        )
        for number in range(count)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(240)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [dict(np.load(folder / f"{count}-{i}.npz")) for i in range(count)]
