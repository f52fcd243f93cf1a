"""The model of the objective against another Gaussian process, and on functions whose values are known."""

import math

import numpy as np
import pytest

from longrope2.search.surrogate import MOST, Surrogate


def sample(count, seed=0, dims=5):
    rng = np.random.default_rng(seed)
    features = rng.uniform(-1, 1, (count, dims))
    return features, np.sin(2 * features[:, 0]) + features[:, 1] ** 2


def test_it_is_the_gaussian_process_of_scikit_learn_at_the_scale_it_chose():
    process = pytest.importorskip("sklearn.gaussian_process")
    features, values = sample(40)
    documents = np.random.default_rng(1).integers(1, 11, 40)
    surrogate = Surrogate(features, values, documents)
    capped = np.minimum(values, np.median(values))
    mean, spread = capped.mean(), capped.std()
    noise = np.diag(surrogate._factor @ surrogate._factor.T) - 1
    # Fewer documents, more noise, in proportion.
    order = np.argsort(values, kind="stable")
    assert noise * documents[order] == pytest.approx(np.full(40, (noise * documents[order])[0]))
    other = process.GaussianProcessRegressor(
        process.kernels.RBF(surrogate._length, length_scale_bounds="fixed"), alpha=noise, optimizer=None
    ).fit(features[order], (capped[order] - mean) / spread)
    asked = sample(15, seed=2)[0]
    expected, deviation = other.predict(asked, return_std=True)
    found, doubt = surrogate.predict(asked)
    assert found == pytest.approx(mean + spread * expected, abs=1e-8)
    assert doubt == pytest.approx(spread * surrogate._scale * deviation, abs=1e-6)


def test_it_takes_the_likeliest_scale_and_noise():
    """By the likelihood of numpy's multivariate normal, with the best variance, over the whole grid."""
    stats = pytest.importorskip("scipy.stats")
    features, values = sample(30, seed=3)
    surrogate = Surrogate(features, values, [1] * 30)
    capped = np.minimum(values, np.median(values))
    known = ((capped - capped.mean()) / capped.std())[np.argsort(values, kind="stable")]
    features = features[np.argsort(values, kind="stable")]
    distances = np.linalg.norm(features[:, None] - features[None], axis=-1)
    unit = np.median(distances[distances > 0])
    likelihoods = {}
    for length in (0.25, 0.5, 1, 2, 4, 8, 16):
        for noise in (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 0.3):
            covariance = np.exp(-0.5 * (distances / (length * unit)) ** 2) + noise * np.eye(30)
            covariance *= known @ np.linalg.solve(covariance, known) / 30
            likelihoods[length * unit] = max(
                stats.multivariate_normal(cov=covariance, allow_singular=True).logpdf(known),
                likelihoods.get(length * unit, -math.inf),
            )
    assert surrogate._length == pytest.approx(max(likelihoods, key=likelihoods.__getitem__))


def test_it_predicts_what_it_has_not_seen():
    features, values = sample(80)
    asked, expected = sample(40, seed=9)
    found, doubt = Surrogate(features, values, [1] * 80).predict(asked)
    good = expected < np.median(values)  # above the median it does not even try
    assert np.corrcoef(found[good], expected[good])[0, 1] > 0.9
    assert np.mean(np.abs(found[good] - expected[good]) < 3 * doubt[good] + 0.02) > 0.9


def test_doubt_grows_with_the_distance_from_what_is_known():
    features, values = sample(50)
    surrogate = Surrogate(features, values, [1] * 50)
    doubt = [surrogate.predict([features[0] + step])[1][0] for step in (0.0, 0.5, 5.0)]
    assert doubt == sorted(doubt)
    assert doubt[0] < 0.3 * doubt[-1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_values_are_enough_to_begin_with(count):
    features, values = sample(count)
    found, doubt = Surrogate(features, values, [1] * count).predict(features)
    assert np.isfinite(found).all()
    assert np.isfinite(doubt).all()


@pytest.mark.parametrize(
    "values",
    [[3.0] * 6, [math.inf] * 6, [math.inf] * 5 + [1.0], [math.inf] * 4 + [2.0, 1.0], [1.0, 2.0, 3.0] + [math.inf] * 3],
)
def test_equal_and_infinite_values_do_no_harm(values):
    features, _ = sample(6)
    found, doubt = Surrogate(features, values, [1] * 6).predict(features)
    assert np.isfinite(found).all()
    assert np.isfinite(doubt).all()
    if math.isfinite(values[0]) != math.isfinite(values[-1]):
        best = int(np.argmin(values))
        assert found[best] == pytest.approx(min(found), abs=1e-3)
        assert max(found) > found[best] + 0.05


def test_the_same_place_twice_is_no_harm():
    features = np.zeros((4, 3))
    found, _ = Surrogate(features, [1.0, 1.1, 1.2, 1.3], [1] * 4).predict(features)
    assert np.ptp(found) < 1e-6


def test_only_the_best_ones_count_when_there_are_many():
    features, values = sample(MOST + 50)
    surrogate = Surrogate(features, values, [1] * len(values))
    assert len(surrogate._features) == MOST
    kept = {tuple(row) for row in surrogate._features}
    assert kept == {tuple(features[i]) for i in np.argsort(values)[:MOST]}
