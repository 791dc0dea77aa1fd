import os
import pathlib
import time

import hypothesis
import jax
import jaxlib
import pytest

# Programs that run once are compiled with few of XLA's optimisations: two of them are
# flags (it takes an unknown one for fatal, so only where they are known), and JAX has a
# name for the others. What rests on how numbers are rounded is marked `rounding`, and
# CI runs that as the programs of users are compiled, too.
AS_USERS = os.environ.get("DPJAX_TESTS_COMPILER", "quick") == "users"
if not AS_USERS and jaxlib.__version__.startswith("0.10."):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")  # which is read when the first array is made
        + " --xla_cpu_use_fusion_emitters=false"
        + " --xla_cpu_parallel_codegen_split_count=1"
    )

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # enough for a mesh
jax.config.update("jax_disable_most_optimizations", not AS_USERS)

hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")

# Most of a run would go into compiling what an earlier one has compiled. So programs
# are kept for a month, the small ones too: in a folder that may be deleted at any time.
_MONTH = 30 * 24 * 3600
_CACHE = pathlib.Path(
    os.environ.setdefault(
        "DPJAX_TESTS_CACHE", str(pathlib.Path.home() / ".cache" / "dpjax-tests")
    ),
    jaxlib.__version__,
)
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the process that the others work for
        for entry in _CACHE.glob("*"):
            if time.time() - entry.stat().st_mtime > _MONTH:
                entry.unlink(missing_ok=True)


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
    """Each file starts without compiled programs in memory.

    Those of a file that is marked `optimized`, as its programs run for longer than they
    compile, are XLA's best.

    A process maps a program's code in about ten pieces, and Linux allows 65,530 of
    them: one that keeps the programs of all tests crashes on its way.
    """
    optimized = AS_USERS or request.node.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not optimized)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", not AS_USERS)


@pytest.fixture
def x64():
    """Accountants hand back float64, so that a test sees their full precision."""
    with jax.enable_x64(True):
        yield
