import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # enough for a mesh


@pytest.fixture
def x64():
    """Accountants hand back float64, so that a test sees their full precision."""
    with jax.enable_x64(True):
        yield
