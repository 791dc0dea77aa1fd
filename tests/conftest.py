import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Accountants hand back float64, so that a test sees their full precision."""
    with jax.enable_x64(True):
        yield
