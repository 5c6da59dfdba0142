"""Layer 1: no processes. Laws of lengths: pinned draws, and quantiles against densities integrated here."""

from __future__ import annotations

import numpy as np
import pytest

from odc.balance import LinearCost, MinibatchSampler, even_lengths, law_names, sample_lengths
from odc.balance.random_numbers import normal_quantiles, random_generator, uniform
from odc.balance.simulate.laws import LAWS, BoundedPareto, Lognormal, LognormalMixture

NAMES = law_names()
PINNED = {
    "longalign": [7497, 8905, 10153, 24667, 9385],
    "swesmith": [12192, 19233, 26967, 18496, 22092],
    "aime": [11085, 5724, 13878, 13038, 6187],
    "ultrachat": [476, 617, 1359, 1154, 670],
    "llava": [339, 389, 432, 730, 406],
    "sharegpt4o": [735, 1329, 873, 795, 828],
}
PINNED_EVEN = {
    "longalign": [7987, 9180, 10597, 45782, 16512],
    "swesmith": [14383, 20848, 29874, 42348, 59426],
    "aime": [4636, 13321, 7231, 14918, 11531],
    "ultrachat": [522, 1221, 818, 1644, 1747],
    "llava": [357, 399, 446, 509, 628],
    "sharegpt4o": [941, 817, 2211, 1038, 1369],
}
NUM_SAMPLES = 100_000
QUANTILES = np.array([0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999])


def density(law: object, s: np.ndarray) -> np.ndarray:
    """Not normalized to 1 over the whole line, but over what the law allows."""
    if isinstance(law, BoundedPareto):
        return normalized(s, s ** -(law.alpha + 1.0))
    assert isinstance(law, LognormalMixture)
    components = [
        normalized(s, np.exp(-((np.log(s) - part.mu) ** 2) / (2 * part.sigma**2)) / s)
        for part in (law.first, law.second)
    ]
    return law.weight * components[0] + (1 - law.weight) * components[1]


def normalized(s: np.ndarray, values: np.ndarray) -> np.ndarray:
    return values / integral(s, values)


def integral(s: np.ndarray, values: np.ndarray) -> float:
    return float((np.diff(s) * (values[1:] + values[:-1]) / 2).sum())


class Integrated:
    """A law's distribution function and mean, by the trapezoidal rule."""

    def __init__(self, name: str) -> None:
        law = LAWS[name]
        assert isinstance(law, BoundedPareto | LognormalMixture)
        self.low, self.high = law.low, law.high
        self.s = np.geomspace(law.low, law.high, 200_001)
        self.density = density(law, self.s)
        steps = np.diff(self.s) * (self.density[1:] + self.density[:-1]) / 2
        self.below = np.concatenate([[0.0], np.cumsum(steps)])
        assert self.below[-1] == pytest.approx(1.0, abs=1e-9)
        self.mean = integral(self.s, self.s * self.density)
        self.deviation = integral(self.s, (self.s - self.mean) ** 2 * self.density) ** 0.5

    def distance(self, lengths: np.ndarray) -> float:
        """The largest distance of the distribution functions (Kolmogorov and Smirnov)."""
        ordered = np.sort(lengths)
        # Lengths were rounded: all of one value lie between half a token below and half a token above it.
        values, counts = np.unique(ordered, return_counts=True)
        shares = np.cumsum(counts) / ordered.size
        expected = np.interp(values + 0.5, self.s, self.below)
        return float(np.abs(shares - expected).max())


@pytest.fixture(params=NAMES, name="law")
def integrated(request: pytest.FixtureRequest) -> tuple[str, Integrated]:
    return request.param, Integrated(request.param)


def test_names() -> None:
    assert NAMES == list(PINNED) == list(PINNED_EVEN) == list(LAWS)


@pytest.mark.parametrize("name", NAMES)
def test_draws_are_pinned(name: str) -> None:
    assert sample_lengths(name, 5, 0).tolist() == PINNED[name]
    assert even_lengths(name, 5).tolist() == PINNED_EVEN[name]


@pytest.mark.parametrize(
    ("name", "published"),  # mean, median, P95, P99, largest, and the CV of section 3.1
    [
        ("ultrachat", (1196, 1104, 2239, 3065, 4471, 0.48)),
        ("llava", (508, 463, 814, 914, 1260, 0.29)),
        ("sharegpt4o", (1511, 977, 4584, 8937, 12110, 1.00)),
    ],
)
def test_laws_have_the_figures_of_their_data_sets(name: str, published: tuple[float, ...]) -> None:
    """Table 10 of the paper on Online Dynamic Batching."""
    lengths = even_lengths(name, NUM_SAMPLES)
    found = [lengths.mean(), *np.quantile(lengths, [0.5, 0.95, 0.99]), lengths.max(), lengths.std() / lengths.mean()]
    assert found == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("batch_size", "padding"), [(8, 0.325), (4, 0.242)])
def test_batches_of_llava_are_padded_as_published(batch_size: int, padding: float) -> None:
    """Its Standard rows of Tables 13 and 14."""
    batches = sample_lengths("llava", NUM_SAMPLES)[: NUM_SAMPLES // 8 * 8].reshape(-1, batch_size)
    found = 1 - batches.sum() / (batches.max(axis=1).sum() * batch_size)
    assert found == pytest.approx(padding, abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_draws_depend_on_the_arguments_only(name: str) -> None:
    lengths = sample_lengths(name, 500, 3)
    assert (lengths.dtype, lengths.shape) == (np.int64, (500,))
    np.random.seed(0)
    np.testing.assert_array_equal(sample_lengths(name, 500, seed=3), lengths)
    np.testing.assert_array_equal(sample_lengths(LAWS[name], 500, 3), lengths)
    np.testing.assert_array_equal(sample_lengths(name, 500), sample_lengths(name, 500, 0))
    assert (sample_lengths(name, 500, 4) != lengths).mean() > 0.9


def test_bounds_are_kept(law: tuple[str, Integrated]) -> None:
    name, exact = law
    for lengths in (sample_lengths(name, NUM_SAMPLES), even_lengths(name, NUM_SAMPLES)):
        assert round(exact.low) <= lengths.min() < 1.03 * exact.low
        assert 0.97 * exact.high < lengths.max() <= round(exact.high)


def test_quantiles_are_those_of_the_density(law: tuple[str, Integrated]) -> None:
    name, exact = law
    for seed in (0, 1):
        lengths = sample_lengths(name, NUM_SAMPLES, seed)
        # Of NUM_SAMPLES draws, the share below a true quantile is off by this standard deviation.
        deviations = np.sqrt(QUANTILES * (1 - QUANTILES) / NUM_SAMPLES)
        at = np.floor(np.interp(QUANTILES, exact.below, exact.s))
        expected = np.interp(at + 0.5, exact.s, exact.below)  # lengths are rounded
        shares = np.array([(lengths <= value).mean() for value in at])
        assert (np.abs(shares - expected) < 4 * deviations + 1e-4).all()
        assert exact.distance(lengths) < 2.0 / NUM_SAMPLES**0.5
        assert abs(lengths.mean() - exact.mean) < 4 * exact.deviation / NUM_SAMPLES**0.5


@pytest.mark.parametrize("num_samples", [1000, 20_000])
def test_even_lengths_have_no_noise(law: tuple[str, Integrated], num_samples: int) -> None:
    """A draw's distance from the law is about 0.9 / sqrt(n), and 0.3 or more in 19 of 20."""
    name, exact = law
    lengths = even_lengths(name, num_samples)
    assert exact.distance(lengths) < 0.1 / num_samples**0.5
    assert lengths.mean() == pytest.approx(exact.mean, rel=3e-3)
    assert exact.distance(sample_lengths(name, num_samples)) > 0.3 / num_samples**0.5


def test_even_lengths_agree_with_draws(law: tuple[str, Integrated]) -> None:
    name, exact = law
    drawn, even = sample_lengths(name, NUM_SAMPLES), even_lengths(name, 20_000)
    assert abs(drawn.mean() - even.mean()) < 4 * exact.deviation / NUM_SAMPLES**0.5 + 2e-4 * exact.mean
    at = np.quantile(even, QUANTILES)
    shares, expected = (np.array([(lengths <= value).mean() for value in at]) for lengths in (drawn, even))
    assert (np.abs(shares - expected) < 4 * np.sqrt(QUANTILES * (1 - QUANTILES) / NUM_SAMPLES) + 1e-3).all()


def ranks(values: np.ndarray) -> np.ndarray:
    positions = np.empty(values.size)
    positions[np.argsort(values, kind="stable")] = np.arange(values.size)
    return positions


def rank_correlation(values: np.ndarray) -> float:
    """Spearman's, of the values with their positions."""
    return float(np.corrcoef(ranks(values), np.arange(values.size))[0, 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_shuffle_does_not_sort_the_lengths(name: str, seed: int) -> None:
    """Draws and shuffle with the same seed: from one stream, the lengths would come out sorted."""
    num_samples = 4096
    lengths = sample_lengths(name, num_samples, seed)
    limit = 4.5 / num_samples**0.5
    for epoch in (0, 1):
        sampler = MinibatchSampler(
            lengths, minibatch_size=256, world_size=1, policy="none", cost=LinearCost(), seed=seed
        )
        sampler.set_epoch(epoch)
        order = np.concatenate([minibatch.samples for minibatch in sampler])
        assert sorted(order) == list(range(num_samples))
        assert abs(rank_correlation(lengths[order])) < limit
    assert abs(rank_correlation(lengths)) < limit  # nor are they drawn in order
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < limit


def test_streams_of_different_names_or_keys_have_nothing_in_common() -> None:
    def numbers(*key: object) -> np.ndarray:
        return uniform(random_generator(*key), 4096)  # type: ignore[arg-type]

    first = numbers("lengths", 0)
    np.testing.assert_array_equal(first, numbers("lengths", 0))
    for other in (numbers("noise", 0), numbers("lengths", 1), numbers("lengths", 0, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.07
    shuffle = np.random.PCG64([0, 0]).random_raw(4096).astype(float)  # of the sampler
    assert abs(np.corrcoef(first, shuffle)[0, 1]) < 0.07
    assert first.min() > 0
    assert first.max() < 1
    assert abs(first.mean() - 0.5) < 0.02


def test_normal_quantiles_by_table() -> None:
    np.testing.assert_allclose(
        normal_quantiles(np.array([0.5, 0.975, 0.025, 0.8413447460685429])),
        [0.0, 1.959963984540054, -1.959963984540054, 1.0],
        atol=1e-12,
    )


def test_medians_by_hand() -> None:
    # The share below s is (1 - 100 / s) / (1 - 100 / 400), which is a half at 160.
    assert even_lengths(BoundedPareto(1.0, 100.0, 400.0), 1).tolist() == [160]
    # The density s ** -(alpha + 1) is even between the bounds where alpha is -1.
    assert even_lengths(BoundedPareto(-1.0, 100.0, 400.0), 3).tolist() == [150, 250, 350]
    # Bounds at the same factor from the median leave it where it is.
    center = Lognormal(float(np.log(1000.0)), 0.5)
    far = Lognormal(float(np.log(64000.0)), 0.5)
    assert even_lengths(LognormalMixture(1.0, center, far, 500.0, 2000.0), 1).tolist() == [1000]
    assert even_lengths(LognormalMixture(0.0, far, center, 500.0, 2000.0), 1).tolist() == [1000]


def test_the_weight_is_that_of_the_first_law() -> None:
    low, high = Lognormal(float(np.log(100.0)), 0.01), Lognormal(float(np.log(10000.0)), 0.01)
    law = LognormalMixture(0.3, low, high, 10.0, 100000.0)
    assert (sample_lengths(law, 20_000) < 1000).mean() == pytest.approx(0.3, abs=0.015)
    assert (even_lengths(law, 20_000) < 1000).mean() == pytest.approx(0.3, abs=0.001)


@pytest.mark.parametrize(("given", "hint"), [("longaling", "longalign"), ("swe-smith", "swesmith"), ("web", None)])
def test_an_unknown_law(given: str, hint: str | None) -> None:
    message = (
        f"length law '{given}' is not known: expected one of longalign, swesmith, aime, ultrachat, llava, sharegpt4o"
    )
    message += f"; did you mean {hint}[?]$" if hint else "$"
    for lengths in (sample_lengths, even_lengths):
        with pytest.raises(ValueError, match=message):
            lengths(given, 4)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "3"])
def test_bad_numbers_of_samples(bad: int) -> None:
    for lengths in (sample_lengths, even_lengths):
        with pytest.raises(ValueError, match=f"num_samples={bad!r}: expected an integer of at least 1"):
            lengths("aime", bad)


@pytest.mark.parametrize("bad", [-1, 0.5, True])
def test_bad_seeds(bad: int) -> None:
    with pytest.raises(ValueError, match=f"seed={bad!r}: expected an integer of at least 0"):
        sample_lengths("aime", 4, bad)
