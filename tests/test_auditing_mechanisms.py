"""Every mechanism is attacked: no audit exceeds the reported μ, most come close to it.

False alarms: a bound here exceeds what is reported with probability 1e-4 at most; keys
are fixed. Mechanisms with one defect each are detected.
"""

import importlib
import pathlib

import jax
import pytest
from conformance import TRANSFORMATIONS

from dpjax import auditing

MU, CONFIDENCE = 1.5, 0.9999
NUM = {"num_in": 4000, "num_out": 12_000}


@pytest.fixture(scope="module")
def audits():
    """The benchmark's module `_audits`; the benchmarks are not a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(pathlib.Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("_audits")


MECHANISMS = [
    "add_gaussian_noise",
    "add_discrete_gaussian_noise",
    "noisy_mean",
    "dp_sgd",
    "dp_sgd, momentum",
    "dp_adam",
    "dp_adamw",
    "dp_nsgd",
    "dp_nsgd, correlated",
    "tree_momentum",
    "tree_momentum, regenerated",
    "correlated_noise, geometric",
    "correlated_noise, geometric regenerated",
    "correlated_noise, rational",
    "correlated_noise, banded",
    "correlated_noise, scaled",
    "correlated_noise, tree",
    "correlated_noise, tree regenerated",
]


def test_every_transformation_is_audited(audits):
    assert list(audits.MECHANISMS) == MECHANISMS
    names = {name.split(",")[0] for name in MECHANISMS}
    assert names == {name.split(",")[0] for name in TRANSFORMATIONS}


@pytest.fixture
def white_box_scores(name, audits):
    mechanism = audits.MECHANISMS[name]
    return audits.white_box(mechanism, MU, **NUM, key=jax.random.key(1))


@pytest.mark.diagonal
@pytest.mark.parametrize("name", MECHANISMS)
def test_audited_mu_is_close_to_and_at_most_reported_mu(white_box_scores, name, audits):
    mechanism, scores = audits.MECHANISMS[name], white_box_scores
    if mechanism.white is None:  # no linear map makes its noise white
        result = auditing.mu_lower(*scores, confidence=CONFIDENCE)
        assert 0.5 * MU < result <= MU
    else:
        result = auditing.gaussian_mu_lower(*scores, confidence=CONFIDENCE)
        assert 0.9 * MU < result <= MU
        ratio = audits.epsilon(result, 1e-5) / audits.epsilon(MU, 1e-5)
        assert 0.9 < ratio <= 1


TWINS = [
    "noise halved",
    "clipping skipped, a gradient of three clip norms",
    "the sum of 8 noised as if it were their mean",
    "one key for two leaves",
    "one key for two nodes of a level",
    "noise repeated after a resume",
]


@pytest.fixture
def broken_and_intact_scores(name, audits):
    twin, at = audits.TWINS[name], {"num": 128, "key": jax.random.key(2)}
    broken = audits.of_twin(twin, 1.0, **at)
    return broken, twin.patch and audits.of_twin(twin, 1.0, broken=False, **at)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", TWINS)
def test_audit_detects_broken_mechanism(broken_and_intact_scores, name, audits):
    """With 128 canaries at 99 % confidence; the intact mechanism passes."""
    assert list(audits.TWINS) == TWINS
    broken, whole = broken_and_intact_scores
    assert auditing.gaussian_mu_lower(*broken, confidence=0.99) > 1.0
    assert bool(whole) == bool(audits.TWINS[name].patch)
    if whole:
        assert auditing.gaussian_mu_lower(*whole, confidence=CONFIDENCE) <= 1.0


@pytest.mark.matrix
def test_grey_box_check_detects_broken_mechanisms(audits):
    for name in audits.CHECKED:
        report, calls = audits.checked(name)
        assert report.passed == (name == "as it should be"), (name, report)
        assert calls < 1000
