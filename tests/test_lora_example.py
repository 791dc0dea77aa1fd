"""The private language model trains alike on one device and on a mesh of eight."""

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import dpjax
from dpjax._core import interpret
from dpjax._plan.guarantee import RunGuarantee

PATH = pathlib.Path(__file__).parents[1] / "examples" / "lora_transformer.py"
SIZES = {
    "width": 16,
    "layers": 2,
    "length": 16,
    "rank": 2,
    "limit": 20_000,
    "public_steps": 5,
    "num_steps": 3,
    "batch_size": 32,
    "microbatch_size": 16,
}


def load_example():
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_runs(folder):
    """Run the example on one and on eight devices with one key, and save the results.

    A process of its own calls this function, because the tests have four devices.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    interpret.Tracer = object  # XLA evaluates accountants, as with `compiled`
    example = load_example()
    dpjax.random_key = lambda: jax.random.key(3)
    dpjax.plan = functools.cache(dpjax.plan)  # both runs have the same plan
    RunGuarantee.__str__ = functools.cache(RunGuarantee.__str__)
    for devices in (1, 8):
        leaves = jax.tree.leaves(example.main(devices, (8.0,), **SIZES)[8.0])
        for leaf in leaves:  # sharded, and not replicated
            assert len({shard.device for shard in leaf.addressable_shards}) == devices
            assert leaf.addressable_shards[0].data.size == leaf.size // devices
        np.savez(pathlib.Path(folder, f"{devices}.npz"), *leaves)


@pytest.mark.slow
@pytest.mark.whole
def test_sharded_run_gives_parameters_of_unsharded_run(tmp_path):
    program = "import sys, test_lora_example as t; t.save_runs(sys.argv[1])"
    cache = pathlib.Path(
        os.environ["DPJAX_TESTS_CACHE"], importlib.metadata.version("jaxlib")
    )
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=PATH.parents[1] / "tests",
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | settings,
        capture_output=True,
        encoding="utf-8",
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    one, eight = (np.load(tmp_path / f"{devices}.npz") for devices in (1, 8))
    assert len(one.files) == 12  # two for each of six weights
    for name in one.files:
        # B begins at zero, and A at normal numbers of a variance of 1/16 and less.
        assert np.abs(one[name]).max() > 1e-2
        # Sums of another order differ by some 1e-6 of the noise, and Adam by as much of
        # its step of 1e-2; other noise would differ by a whole step.
        np.testing.assert_allclose(eight[name], one[name], rtol=1e-4, atol=1e-5)
    result = re.findall(r"^held-out perplexity +(\d+\.\d+)", done.stdout, re.MULTILINE)
    perplexities = np.array(result, float).reshape(2, 3)
    assert (perplexities > 1).all()
    assert (perplexities < 1000).all()
    np.testing.assert_allclose(*perplexities, rtol=1e-3)
    assert done.stdout.count("(8.000, 1e-06)-differential privacy") == 2
    assert done.stdout.count("each example is one unit of privacy") == 2


def test_texts_do_not_share_lines():
    """No line of 40 characters is in two of the public, private and held-out texts."""
    example = load_example()
    texts = example.load_texts(60_000)
    lines = [example.lines_of(role) for role in texts]
    assert all(len(role) > 20 for role in lines)
    public, private, held_out = lines
    assert public.isdisjoint(private | held_out)
    assert private.isdisjoint(held_out)
    sequences = example.cut(["ab" * 5, "c" * 4], 4)
    np.testing.assert_array_equal(sequences, list(map(list, (b"ababa", b"babab"))))
