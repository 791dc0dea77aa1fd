"""Two and four processes train like one: equal noise, each example read once."""

import importlib.metadata
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

WORKER = pathlib.Path(__file__).with_name("several_processes.py")


def train_in_processes(count: int, folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """The results of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    kept = pathlib.Path(
        os.environ["DPJAX_TESTS_CACHE"], importlib.metadata.version("jaxlib")
    )
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(kept),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), address, str(count), str(i), str(folder)],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    return [dict(np.load(folder / f"{count}-{i}.npz")) for i in range(count)]


@pytest.mark.slow
def test_several_processes_train_like_one(tmp_path):
    (one,) = train_in_processes(1, tmp_path)
    read = {name for name in one if name.endswith("read")}
    assert len(read) == 2
    for count in (2, 4):
        several = train_in_processes(count, tmp_path)
        for each in several:
            for name in one.keys() - read:
                np.testing.assert_array_equal(each[name], one[name], err_msg=name)
        for name in read:
            found = np.concatenate([each[name] for each in several])
            np.testing.assert_array_equal(np.sort(found), np.sort(one[name]))
