"""Compare dpjax's answers with the test cases of jax_privacy's auditing.

    python benchmarks/audit_cases.py FILE  # its tests/auditing_test.py

The script counts jax_privacy's cases by running the loader of the test file. dpjax
answers the cases that ask for a property of an attack's scores, with the same numbers.
Each row shows the number of cases in a group of jax_privacy's tests, the question, and
the number of equal answers.
"""

import importlib.util
import pathlib
import sys
import unittest
from collections import Counter

import numpy as np
import scipy.stats
from _results import OURS, Table, parser, print_tables, write

from dpjax import auditing
from dpjax._core.float64 import scope
from dpjax.accounting import gdp
from dpjax.auditing import _scores

RATIOS = (0.5, 1.0, 1.5)


def normal(mean, count):
    """Return `count` quantiles of N(mean, 1)."""
    return scipy.stats.norm.ppf((np.arange(count) + 0.5) / count) + mean


def counted(file):
    """Return each jax_privacy test's number of cases, by name without parameters."""
    spec = importlib.util.spec_from_file_location("auditing_test", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    of_class = module.CanaryScoreAuditorTest
    # A parametrised test has many cases, whose names are the test's name followed by a
    # number or by the case's name.
    source = file.read_text(encoding="utf-8")
    names = [
        line.split("(")[0][6:] for line in source.splitlines() if "def test_" in line
    ]
    result = Counter()
    for name in unittest.TestLoader().getTestCaseNames(of_class):
        fits = [base for base in names if name == base or name.startswith(base)]
        result[max(fits, key=len)] += 1
    return result, module


def clopper_pearson():
    """Compare upper confidence bounds on a rate, for several numbers of successes."""
    import jax_privacy.auditing as peer

    for n in (10, 100, 1000):
        for part in (0.3, 0.4, 0.5, 0.8, 0.9):
            for error in (0.1, 0.03, 0.01):
                theirs = peer._clopper_pearson_upper(part * n, n, error)
                with scope():
                    ours = _scores.upper_bound(part * n, n, error)
                yield np.isclose(float(ours), theirs, rtol=1e-6)


def at_a_threshold():
    """Compare ε at a threshold that is fixed in advance."""
    for n in (100, 1000):
        for ratio in RATIOS:
            for t in (0.0, 0.5, 1.0):
                inside, outside = normal(1, n), normal(0, int(n * ratio))
                hits, alarms = np.sum(inside >= t), np.sum(outside >= t)
                b = scipy.stats.beta.ppf(0.05, hits, n - hits + 1)
                a = scipy.stats.beta.isf(0.05, alarms + 1, len(outside) - alarms)
                result = auditing.epsilon_at(
                    inside, outside, 0.0, threshold=t - 1e-6, confidence=0.9
                )
                # dpjax also bounds ε by the other error rate, and takes the larger of
                # both bounds.
                other = np.log(max((1 - a) / (1 - b), 1.0))
                expected = max(np.log(max(b / a, 1.0)), other)
                yield np.isclose(float(result), expected, rtol=1e-5, atol=1e-6)


def all_thresholds(size, mus):
    """Check ε at δ = 0.1 from scores of a Gaussian mechanism.

    ε must be at most the true ε, and at least the true ε minus 20 %.
    """
    for mu in mus:
        for ratio in RATIOS:
            result = auditing.epsilon_lower(
                normal(mu, size), normal(0, int(size * ratio)), 0.1, confidence=0.8
            )
            truth = float(gdp.epsilon(mu, 0.1))
            yield truth * 0.8 - 1e-3 <= float(result) <= truth


def of_gaussians():
    """Check ε of a mechanism that is known to be Gaussian."""
    rng = np.random.default_rng(0)
    for mu in (0.1, 0.3, 1.0, 3.0):
        for ratio in RATIOS:
            scores = rng.normal(mu, 1, 500_000), rng.normal(0, 1, int(5e5 * ratio))
            result = auditing.gaussian_mu_lower(*scores, confidence=0.9)
            epsilon, truth = (float(gdp.epsilon(x, 0.05)) for x in (result, mu))
            yield np.isclose(epsilon, truth, rtol=0.05, atol=1e-3)


def rates():
    """Check true-positive rates of a best and of a random attack."""
    for ratio in RATIOS:
        n = int(30 * ratio)
        for _ in range(2):
            best = auditing.true_positive_rate(np.ones(30), np.zeros(n), 0.3)
            yield float(best) == 1.0
    rng = np.random.default_rng(0)
    for ratio in RATIOS:
        scores = rng.uniform(size=100_000), rng.uniform(size=int(1e5 * ratio))
        result = auditing.true_positive_rate(*scores, 4 / 9)
        yield np.isclose(float(result), 4 / 9, rtol=0.05)


def areas():
    """Check areas under the ROC curve of a best, a random and a circular attack."""
    rng = np.random.default_rng(0)
    for ratio in RATIOS:
        yield float(auditing.auroc(np.ones(30), np.zeros(int(30 * ratio)))) == 1.0
    for n in (10_000, 100_000):
        for ratio in RATIOS:
            scores = rng.uniform(size=n), rng.uniform(size=int(n * ratio))
            yield np.isclose(float(auditing.auroc(*scores)), 0.5, rtol=0.05)
    for ratio in RATIOS:  # the ROC curve is a quarter of a circle
        arc = np.sqrt(1 - np.linspace(0, 1, 10_000) ** 2)
        result = auditing.auroc(arc, np.linspace(0, 1, int(1e4 * ratio)))
        yield np.isclose(float(result), np.pi / 4, atol=5e-4)


def p_values(naive):
    """Check whether guesses refute ε.

    jax_privacy computes a probability p, and dpjax computes the ε at confidence 1 − p.
    dpjax accepts only confidences above a half, so cases with p of at least 0.49 are
    omitted. Cases with p of at most 1e-9 are omitted because 1 − p has too few digits.
    """
    for m in (10, 100, 1000):
        for r in (1, 10, 100):
            options = [
                (r - wrong, epsilon, delta)
                for wrong in (0, 1, 10, 100)
                for epsilon in (0.0, 0.5, 1.0)
                for delta in (0, 1e-6, 1e-3, 1e-1, 1)
                if wrong <= r <= m
            ]
            p = np.array([naive(m, r, *one) for one in options])
            known = [
                k for k, x in enumerate(p) if 1e-9 < x < 0.49 and options[k][2] < 1
            ]
            yield from [None] * (len(options) - len(known))
            if not known:
                continue
            v, epsilon, delta = np.array([options[k] for k in known]).T
            place = np.arange(m)
            included = (place >= m - r) & (place < m - r + v[:, None])
            low, high = (
                auditing.one_run_epsilon_lower(
                    np.broadcast_to(place * 1.0, included.shape),
                    included,
                    delta,
                    guess_in=r,
                    guess_out=0,
                    confidence=1 - p[known] * factor,
                )
                for factor in (0.99, 1.01)
            )
            yield from (np.asarray(low) <= epsilon + 1e-5) & (
                np.asarray(high) >= epsilon - 1e-5
            )


def one_run():
    """Compare bounds from one run.

    jax_privacy uses all thresholds, and its bounds are ε = 1.13, 2.31, 4.40 and so on.
    dpjax's bounds use a fixed number of guesses. The best of a few dpjax bounds, each
    with its share of the error probability, must be at least 0.9 times jax_privacy's
    bound.
    """
    known = {1: (1.13346, 2.164749), 2: (2.311945, 4.7218075), 4: (4.395568, 9.133752)}
    numbers = (20, 200, 1000, 4000)
    for shift, theirs in ((0, (0, 0)), *known.items()):
        scores = np.concatenate([normal(0, 10_000), normal(shift, 10_000)])
        included = np.arange(20_000) >= 10_000
        at = {"guess_out": 0, "confidence": 1 - 0.05 / len(numbers)}
        best, best_mu = (
            max(float(bound(guess_in=k)) for k in numbers)
            for bound in (
                lambda guess_in: auditing.one_run_epsilon_lower(
                    scores, included, 1e-6, guess_in=guess_in, **at
                ),
                lambda guess_in: auditing.one_run_mu_lower(
                    scores, included, guess_in=guess_in, **at
                ),
            )
        )
        in_epsilon = float(gdp.epsilon(best_mu, 1e-6)) if best_mu > 0 else 0.0
        yield best >= 0.9 * theirs[0]
        yield in_epsilon >= 0.9 * theirs[1]


# The row of jax_privacy's cases that ask other questions.
ELSE = "other questions"


def groups(naive):
    """Return the groups of jax_privacy's tests that are compared.

    Each group has its tests, the question, a function that yields whether dpjax's
    answers are equal (None where dpjax can give no answer), and the difference between
    both libraries.
    """
    return [
        (
            ("test_clopper_pearson_upper",),
            "an upper confidence bound on a rate (Clopper and Pearson)",
            clopper_pearson,
            "",
        ),
        (
            ("test_epsilon_clopper_pearson_explicit",),
            "ε at a given threshold",
            at_a_threshold,
            "dpjax uses the better of both error rates",
        ),
        (
            ("test_epsilon_clopper_pearson_tight",),
            "ε at all thresholds",
            lambda: all_thresholds(2_000_000, (0.3, 1.0, 1.5)),
            "dpjax has one method where jax_privacy has four, so that each case is "
            "computed once",
        ),
        (
            ("test_epsilon_clopper_pearson_tight_multi_split",),
            "ε at all thresholds, a twentieth of the scores",
            lambda: all_thresholds(100_000, (0.7, 1.0, 1.5)),
            "jax_privacy splits the scores, dpjax does not",
        ),
        (
            ("test_epsilon_from_gdp_tight",),
            "ε of a Gaussian mechanism",
            of_gaussians,
            "dpjax returns a bound, jax_privacy counts at one threshold",
        ),
        (
            (
                "test_tpr_at_given_fpr_best_case",
                "test_tpr_at_given_fpr_random",
            ),
            "the true-positive rate at a false-positive rate",
            rates,
            "",
        ),
        (
            (
                "test_attack_auroc_best_case",
                "test_attack_auroc_random",
                "test_attack_auroc_circular_roc",
            ),
            "the area below the curve",
            areas,
            "",
        ),
        (
            ("test_one_run_p_value",),
            "whether guesses in one run refute ε",
            lambda: p_values(naive),
            "cases with p of at most 1e-9 or at least 0.49, or with δ = 1, are omitted",
        ),
        (
            ("test_epsilon_one_run_close",),
            "ε and f-DP from one run",
            one_run,
            "dpjax uses four numbers of guesses that are fixed in advance, jax_privacy "
            "all thresholds",
        ),
    ]


def main():
    """Count and compare."""
    options = parser(__doc__)
    options.add_argument("file", type=pathlib.Path)
    arguments = options.parse_args()
    count, module = counted(arguments.file)
    rows, answered = [], set()
    for names, question, answers, difference in groups(module._one_run_p_value_naive):
        result = list(answers())
        theirs = sum(count[name] for name in names)
        answered.update(names)
        verdicts = [bool(x) for x in result if x is not None]
        rows.append([question, theirs, len(verdicts), sum(verdicts), difference])
        print(*rows[-1], flush=True)
    rest = sum(count[name] for name in count if name not in answered)
    rows.append(
        [
            ELSE,
            rest,
            0,
            0,
            "internal parts of jax_privacy (hulls, bootstrap settings, counts), area "
            "and rates of the convex hull (those of dpjax are of the scores), "
            "accuracy, refused arguments",
        ]
    )
    columns = {
        "question": "{}",
        "cases of jax_privacy": "{}",
        "cases for dpjax": "{}",
        "equal answers": "{}",
    }
    table = Table("cases", columns | {"difference": "{}"}, rows)
    print_tables(table, Table("all", {"cases": "{}"}, [[sum(count.values())]]))
    write("auditing.cases", arguments, [table], packages=(*OURS, "jax_privacy"))


if __name__ == "__main__":
    main()
