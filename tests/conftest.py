import contextlib
import gc
import importlib
import os
import pathlib
import time
import zlib

# The tests run on the CPU, also on a machine with a GPU: some tests need four devices,
# and two workers cannot both reserve most of the memory of one GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import jaxlib
import pytest

# Programs that run once are compiled with few of XLA's optimisations: two of these are
# XLA flags (set only where they are known, as unknown ones are fatal), and JAX has an
# option for the others. Tests that depend on how numbers are rounded are marked
# `rounding`; CI runs them with all optimisations, as users compile, too.
AS_USERS = os.environ.get("DPJAX_TESTS_COMPILER", "quick") == "users"
if not AS_USERS and jaxlib.__version__.startswith("0.10."):
    # XLA reads them when the first array is made, and they are part of the cache key.
    # So each is set once, though a worker of xdist inherits them.
    given = os.environ.get("XLA_FLAGS", "").split()
    ours = (
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys((*given, *ours)))

# The threads of a matrix product of NumPy wait for each other actively. If another
# worker has the core that a thread needs, a small product takes up to 40 times as long.
# So each worker of xdist, which inherits this variable, computes with one thread.
if not AS_USERS:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # enough for a mesh
jax.config.update("jax_disable_most_optimizations", not AS_USERS)

hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")

# Most of a run would recompile the programs of an earlier one. So compiled programs,
# small ones included, are cached for a month, in a folder that may be deleted any time.
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


# Programs of JAX are many small objects, few of them garbage: Python would traverse
# them all, again and again.
gc.set_threshold(100_000, 50, 100)


def pytest_collection_finish():
    gc.freeze()  # modules imported by now are never garbage


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the controlling process of xdist
        for entry in _CACHE.glob("*"):
            if time.time() - entry.stat().st_mtime > _MONTH:
                entry.unlink(missing_ok=True)


# A test spends its time in building programs, so one of the default suite may compile
# this many at most, the single operations that run outside of `jax.jit` included.
_MAX_PROGRAMS = 12
# Programs of earlier tests of the process are not compiled again: a test may pass after
# another one and fail alone. With this variable each test runs as if alone.
_ALONE = "DPJAX_TESTS_ALONE" in os.environ
_UNLIMITED = ("slow", "matrix", "whole")
_compiled: list[str] = []


def _record_compilation(event, _, **details):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(str(details.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_record_compilation)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if _ALONE:
        jax.clear_caches()
    _compiled.clear()
    result = yield
    limited = not any(item.get_closest_marker(name) for name in _UNLIMITED)
    if limited and len(_compiled) > _MAX_PROGRAMS:
        pytest.fail(
            f"This test compiled {len(_compiled)} programs, and a test of the default "
            f"suite may compile {_MAX_PROGRAMS}: {', '.join(_compiled)}",
            pytrace=False,
        )
    return result


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Keep one case of each test marked `diagonal`, or one per combination.

    A combination has one value of each argument that the mark names. All other cases
    are marked `matrix`. Cases with another mark that removes them from the default
    suite are ignored. Which case stays depends on the names of the test and of these
    values alone, and differs from value to value.
    """
    groups, numbers = {}, {}
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.whole)  # each function has tests of its own
            continue
        diagonal = item.get_closest_marker("diagonal")
        if diagonal is None or any(map(item.get_closest_marker, _UNLIMITED)):
            continue
        test = item.path, item.originalname
        values = []
        for name in diagonal.args:
            values_seen = numbers.setdefault((*test, name), {})
            values.append(
                values_seen.setdefault(
                    repr(item.callspec.params[name]), len(values_seen)
                )
            )
        groups.setdefault((*test, tuple(values)), []).append(item)
    for (_, name, values), cases in groups.items():
        chosen = zlib.crc32(f"{name}{values}".encode()) % len(cases)
        for case in cases[:chosen] + cases[chosen + 1 :]:
            case.add_marker(pytest.mark.matrix)


# A compiled program takes about ten memory mappings, and Linux allows a process 65,530
# of them: one that kept the programs of all tests would crash.
_MANY_PIECES = 20_000


def count_mapped_regions():
    """Number of memory mappings of this process, where the system reports it."""
    try:
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except FileNotFoundError:
        return _MANY_PIECES


@contextlib.contextmanager
def fully_optimized():
    """Compile with all of XLA's optimisations, and drop the programs afterwards."""
    if AS_USERS:
        yield
        return
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def programs(request):
    """Keep compiled programs from file to file, until there are too many.

    A file marked `optimized`, whose programs take longer to run than to compile, gets
    all of XLA's optimisations.
    """
    optimized = request.node.get_closest_marker("optimized") is not None
    with fully_optimized() if optimized else contextlib.nullcontext():
        yield
    if count_mapped_regions() >= _MANY_PIECES:
        jax.clear_caches()


@pytest.fixture(scope="module")
def import_benchmark():
    """Function that imports a module of the benchmarks, which are not a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(pathlib.Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module


@pytest.fixture
def optimized():
    """All of XLA's optimisations for one long test in a file of short ones."""
    with fully_optimized():
        yield


@pytest.fixture(scope="module")
def optimized_from_here():
    """All of XLA's optimisations for a test and for the later tests of its file."""
    with fully_optimized():
        yield


@pytest.fixture
def compiled(monkeypatch):
    """XLA evaluates accountants, for tests that need many values of one of them.

    Elsewhere NumPy evaluates single values, several times slower once XLA's program is
    compiled. `test_interpret` compares the two.
    """
    # Now every argument counts as traced.
    monkeypatch.setattr("dpjax._core.interpret.Tracer", object)


@pytest.fixture
def x64():
    """Enable x64, so that accountants return their results in full precision."""
    with jax.enable_x64(True):
        yield
