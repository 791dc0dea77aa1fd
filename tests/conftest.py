import os
import tempfile

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # enough for a mesh

# What one process of a run has compiled the others need not. The first makes the folder
# and removes it in the end.
_CACHE = "DPJAX_TESTS_CACHE"
if _CACHE not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="dpjax-tests-")
    os.environ[_CACHE] = _folder.name
jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture
def x64():
    """Accountants hand back float64, so that a test sees their full precision."""
    with jax.enable_x64(True):
        yield
