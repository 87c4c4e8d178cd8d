"""Chance over seeds and problems: against scipy, resampling by brute force, and simulated studies."""

import numpy as np
import pytest
from scipy.stats import nct, t, ttest_1samp

from pspo_lab.power import Estimate, estimate

STUDIES = 2000


def simulate(rng, difference=0.0, *, seeds=5, problems=200, by_seed=0.06, by_problem=0.1):
    """(STUDIES, S, N) differences of two methods' right answers, whose chances vary by seed, by problem and by both."""
    hardness = rng.uniform(0.3, 0.7, (STUDIES, 1, problems))
    answers = []
    for shift in (0.0, difference):
        chance = hardness + shift + by_seed * rng.uniform(-1, 1, (STUDIES, seeds, 1))
        chance = chance + by_problem * rng.uniform(-1, 1, (STUDIES, 1, problems))
        answers.append(rng.random((STUDIES, seeds, problems)) < chance)
    return answers[1].astype(float) - answers[0]


@pytest.mark.parametrize(("seeds", "by_problem", "by_seed"), [(3, 0.1, 0.06), (5, 0.1, 0.06), (5, 0, 0)])
def test_an_a_a_is_starred_in_5_percent_of_studies(seeds, by_problem, by_seed):
    """One generator's 2,000 studies scatter by half a percent point; of seed 0, five seeds and all effects 6.7%."""
    starred = []
    for generator in range(3):
        rng = np.random.default_rng(generator)
        studies = estimate(simulate(rng, seeds=seeds, by_problem=by_problem, by_seed=by_seed))
        starred.append(studies.p() < 0.05)
        low, high = studies.interval()
        assert (((low > 0) | (high < 0)) == starred[-1]).all()
    assert np.mean(starred) == pytest.approx(0.05, abs=0.015)


def test_a_planted_difference_is_found_at_the_stated_power():
    """The difference that such studies say they would detect, planted into others."""
    rng = np.random.default_rng(0)
    studies = estimate(simulate(rng))
    truth = studies._replace(mean=0.0, seeds=studies.seeds.mean(), problems=studies.problems.mean())
    planted = estimate(simulate(rng, truth.detects()))
    assert (planted.p() < 0.05).mean() == pytest.approx(0.8, abs=0.05)


def test_of_numbers_without_problems_it_is_the_t_test_and_its_power():
    values = np.random.default_rng(0).normal(0.3, 1, 7)
    found = estimate(values[:, None])
    reference = ttest_1samp(values, 0)
    assert found.p() == pytest.approx(reference.pvalue)
    assert found.interval() == pytest.approx(tuple(reference.confidence_interval()))
    for n in (3, 7, 40):
        noncentrality = found.detects(n) / values.std(ddof=1) * n**0.5
        assert nct.sf(t.ppf(0.975, n - 1), n - 1, noncentrality) == pytest.approx(0.8, abs=1e-6)
    n = found.seeds_for(1.0)
    assert found.detects(n) <= 1.0 < found.detects(n - 1)
    assert estimate(np.zeros((4, 1))).p() == 1.0
    assert Estimate(0.0, seeds=0.02**2, problems=0.03**2, n_seeds=5, n_problems=100).seeds_for(0.05) is None
