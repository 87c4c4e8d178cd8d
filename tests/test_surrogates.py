"""The surrogates against scalar oracles, their limits and identities, and the contract that every one keeps."""

import dataclasses
import math

import numpy as np
import pytest
import reference
import torch
from batches import loss_and_gradient, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import pspo_bridge
from pspo import losses as L

DETERMINISTIC = settings(max_examples=80, deadline=None, derandomize=True, database=None)
GARBAGE = [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e4, 0.0]


@dataclasses.dataclass(frozen=True)
class SquaredRatio(L.Surrogate):
    """A user's surrogate: -A r + strength (r - 1)^2."""

    strength: float = 0.5

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        ratio = L.log_ratio(logprobs, old_logprobs, mask).exp()
        return torch.where(mask, -ratio * advantages + self.strength * (ratio - 1) ** 2, 0.0)


BUILT_IN = [getattr(L, name) for name in pspo_bridge.BUILT_IN]
EVERY = [
    *(cls() for cls in BUILT_IN), L.Clip(0.0), L.Clip(0.1, epsilon_high=0.3), L.Clip(0.2, delta=1.5), L.PSPO(0.0),
    L.PSPO(1.0), L.P3O(tau=2.0, kl_coef=0.5), L.TOPR(a_pos=0.2, b_pos=3.0, a_neg=2.0, b_neg=2.0), L.TOPR(level="token"),
    L.CISPO(0.5, 0.5), L.GSPO(0.2, 0.3), L.DPPO("kl", 0.05), L.DRO(1.0, "token"), L.CEGPPO(0.1, 0.3, 0.0, 2.0),
    L.ASPO(0.1, 0.3, 1.0), SquaredRatio(),
]  # fmt: skip
every_surrogate = pytest.mark.parametrize("surrogate", EVERY, ids=repr)


def hostile_batch(seed, dtype=torch.float64, token_advantages=None):
    """Ratios near and far, zeros, equal pairs, holes in the mask, fully masked rows, garbage under the mask."""
    rng = np.random.default_rng(seed)
    shape = rows, length = rng.integers(1, 6), rng.integers(1, 8)
    old = -rng.gamma(1.0, 2.0, shape)
    log_r = rng.choice([0.0, 0.1, 0.5, 3.0], shape) * rng.standard_normal(shape)
    far = rng.random(shape) < 0.1
    log_r[far] = rng.choice([-1e4, -30.0, -19.0, 19.0, 30.0, 1e4], far.sum())
    if token_advantages is None:
        token_advantages = bool(rng.integers(2))
    advantages = rng.standard_normal((rows, length if token_advantages else 1))
    advantages[rng.random(advantages.shape) < 0.2] = 0.0
    mask = np.arange(length) < rng.integers(0, length + 1, (rows, 1))
    if rng.integers(2):
        mask &= rng.random(shape) < 0.8
    logprobs = old + log_r
    for array in (logprobs, old, advantages)[: 2 + token_advantages]:
        array[~mask] = rng.choice(GARBAGE, (~mask).sum())
    return (*(torch.tensor(array, dtype=dtype) for array in (logprobs, old, advantages)), torch.tensor(mask))


def smooth_batch(seed=0, spread=0.8):
    return random_batch((5, 5, 5, 5), seed, spread)


# ---------------------------------------------------------------- against the oracles

unit = st.floats(0.0, 1.0)
positive = st.floats(0.1, 10.0)
epsilon = st.floats(0.01, 2.0)  # none of 0, where r = 1 would sit on a kink
no_bound = st.just(math.inf)
bounds = st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)).map(sorted)
level = st.sampled_from(["sequence", "token"])

SURROGATES = {
    "Clip": st.builds(L.Clip, epsilon | no_bound, st.none() | epsilon, st.none() | st.floats(1.01, 5.0)),
    "NoClip": st.just(L.NoClip()),
    "PSPO": st.builds(L.PSPO, unit),
    "P3O": st.builds(L.P3O, positive, st.just(0.0) | st.floats(0.0, 2.0)),
    "SAPO": st.builds(L.SAPO, positive, positive),
    "TOPR": st.builds(lambda positive, negative, level: L.TOPR(*positive, *negative, level), bounds, bounds, level),
    "REINFORCE": st.just(L.REINFORCE()),
    "CISPO": st.builds(L.CISPO, st.none() | unit, st.floats(0.0, 9.0)),
    "GSPO": st.builds(L.GSPO, st.floats(1e-4, 1.0), st.floats(1e-4, 1.0) | no_bound),
    "GMPO": st.builds(L.GMPO, epsilon | no_bound),
    "VESPO": st.sampled_from([L.VESPO(), L.VESPO(4, 0, 4, 0)]) | st.builds(L.VESPO, *[st.floats(0.0, 4.0)] * 4),
    "DPPO": st.builds(L.DPPO, st.sampled_from(["tv", "kl"]), unit | no_bound),
    "SPO": st.builds(L.SPO, epsilon | no_bound),
    "DRO": st.builds(L.DRO, st.floats(0.0, 2.0), level),
    "CEGPPO": st.builds(L.CEGPPO, epsilon, st.none() | epsilon, st.floats(0.0, 2.0), st.floats(0.0, 2.0)),
    "ASPO": st.builds(L.ASPO, epsilon | no_bound, st.none() | epsilon, st.floats(1.0, 5.0) | no_bound),
}


@pytest.mark.parametrize("name", [cls.__name__ for cls in BUILT_IN])
def test_loss_and_gradient_equal_the_oracle(name):
    @DETERMINISTIC
    @given(surrogate=SURROGATES[name], seed=st.integers(0, 2**32 - 1))
    def check(surrogate, seed):
        batch = hostile_batch(seed)
        rows, parameters = (tensor.tolist() for tensor in batch), dataclasses.asdict(surrogate)
        pair = reference.surrogate(name, parameters, *rows)
        for actual, expected in zip(loss_and_gradient(surrogate, *batch), pair, strict=True):
            expected = torch.tensor(expected, dtype=torch.float64).reshape(actual.shape)
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)

    check()


@pytest.mark.parametrize(
    ("surrogate", "log_r", "advantage", "loss", "gradient"),
    [
        (L.PSPO(0.25), math.log(2), 2.0, -3.5, -3.0),
        (L.Clip(0.2), math.log(2), -1.0, 2.0, 2.0),
        (L.Clip(0.2), math.log(0.5), -1.0, 0.8, 0.0),
        (L.Clip(0.2, epsilon_high=0.5), math.log(2), 1.0, -1.5, 0.0),
        (L.Clip(0.2, delta=3.0), math.log(4), -1.0, 3.0, 0.0),
        (L.P3O(4.0), 0.0, 1.0, -0.5, -1.0),
        (L.P3O(4.0, kl_coef=2.0), math.log(2), 0.0, 2 * (1 - math.log(2)), 2.0),
        (L.SAPO(1.0, 3.0), 0.0, -1.0, 2 / 3, 1.0),
        (L.SPO(0.2), math.log(1.2), 2.0, -2.2, 0.0),
        (L.SPO(0.5), math.log(2), 1.0, -1.0, 2.0),
        (L.DRO(2.0), math.log(2), 3.0, 4.5 - 3 * math.log(2) + math.log(2) ** 2, -3 + 2 * math.log(2)),
        (L.CEGPPO(0.2, beta1=0.5), math.log(0.5), -1.0, 0.4, 0.4),
        (L.CEGPPO(0.2, beta2=0.5), math.log(2), 1.0, -0.6, -0.6),
        (L.ASPO(0.2), math.log(0.5), 1.0, -2 * (math.log(0.5) - 1.5), -2.0),
        (L.ASPO(0.2), math.log(0.25), 1.0, -3 * (math.log(0.25) - 1.5), -3.0),
    ],
    ids=repr,
)
def test_values_worked_by_hand(surrogate, log_r, advantage, loss, gradient):
    old = torch.tensor([[-1.5]], dtype=torch.float64)
    batch = (old + log_r, old, torch.tensor([[advantage]], dtype=torch.float64), torch.tensor([[True]]))
    actual_loss, actual_gradient = loss_and_gradient(surrogate, *batch)
    assert actual_loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert actual_gradient.item() == pytest.approx(gradient, rel=1e-12, abs=1e-15)


@every_surrogate
def test_gradients_are_differences_of_the_loss(surrogate):
    """Central differences; where a stop-gradient holds a weight w, the loss is -w A logprob, or -w A."""
    logprobs, *rest = smooth_batch()
    loss, gradient = loss_and_gradient(surrogate, logprobs, *rest)
    if isinstance(surrogate, L.CISPO | L.TOPR | L.VESPO | L.ASPO):
        torch.testing.assert_close(gradient * logprobs, loss, rtol=1e-12, atol=0)
    elif isinstance(surrogate, L.CEGPPO):
        torch.testing.assert_close(gradient, loss, rtol=1e-12, atol=0)
    else:
        steps = 1e-6 * torch.eye(logprobs.numel(), dtype=torch.float64).view(-1, *logprobs.shape)
        differences = [(surrogate(logprobs + h, *rest) - surrogate(logprobs - h, *rest)).sum() / 2e-6 for h in steps]
        torch.testing.assert_close(gradient.flatten(), torch.stack(differences), rtol=1e-7, atol=1e-8)


# ---------------------------------------------------------------- limits and identities

BATCHES = {
    "anywhere": hostile_batch,
    "not clamped": smooth_batch,
    "r = 1": lambda seed: (smooth_batch(seed)[1], *smooth_batch(seed)[1:]),
}


@pytest.mark.parametrize(
    ("surrogate", "where", "factor"),
    [
        *((L.PSPO(alpha), "anywhere", 1 - alpha) for alpha in (0.0, 0.1, 0.25, 0.4, 0.9, 1.0)),
        (L.CISPO(None, math.inf), "not clamped", 1.0),
        (L.SPO(math.inf), "anywhere", 1.0),
        (L.CEGPPO(math.inf), "anywhere", 1.0),
        *((cls(), "r = 1", 1.0) for cls in BUILT_IN if cls is not L.PSPO),
        *((L.P3O(tau, kl_coef=3.0), "r = 1", 1.0) for tau in (0.1, 1.0, 4.0, 50.0)),
        (L.SAPO(0.1, 50.0), "r = 1", 1.0),
        (L.TOPR(level="token"), "r = 1", 1.0),
        (L.TOPR(a_pos=2, b_pos=3, a_neg=2, b_neg=2), "r = 1", 2.0),
        (L.VESPO(0.5, 0.1, 4.0, 0.0), "r = 1", 1.0),
        (L.DPPO("kl", 0.0), "r = 1", 1.0),
    ],
    ids=str,
)
def test_gradient_is_noclips_up_to_the_known_factor(surrogate, where, factor):
    for seed in range(10):
        batch = BATCHES[where](seed)
        gradient, noclips = (loss_and_gradient(each, *batch)[1] for each in (surrogate, L.NoClip()))
        torch.testing.assert_close(gradient, factor * noclips, rtol=1e-14, atol=0)


# ---------------------------------------------------------------- the contract, for every built-in and a user's own


@every_surrogate
@pytest.mark.parametrize(("seed", "token_advantages"), [(0, False), (1, True), (2, False), (3, True)])
def test_contract(surrogate, token_advantages, seed):
    *_, advantages, mask = batch = hostile_batch(seed, torch.float32, token_advantages)
    before = [tensor.clone() for tensor in batch]
    rng_before, parameters_before = torch.get_rng_state(), dataclasses.asdict(surrogate)

    loss, gradient = loss_and_gradient(surrogate, *batch)
    assert loss.shape == gradient.shape == mask.shape
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert (loss[~mask] == 0).all()
    assert (gradient[~mask] == 0).all()

    # A pure function: nothing written to, nothing remembered, nothing drawn; what stands under the mask is not seen,
    # and an advantage per row is one for each of its tokens.
    clean = (*(tensor.expand_as(mask).where(mask, 0.0) for tensor in batch[:3]), mask)
    for again in (batch, clean):
        for first, second in zip((loss, gradient), loss_and_gradient(surrogate, *again), strict=True):
            assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), rng_before)
    assert dataclasses.asdict(surrogate) == parameters_before
    for tensor, copy in zip(batch, before, strict=True):
        assert torch.equal(tensor.nan_to_num(nan=123.0), copy.nan_to_num(nan=123.0))

    # Rows know nothing of each other, nor of padding to their right.
    wide = [torch.nn.functional.pad(tensor, (0, 3)) for tensor in clean]
    padded = surrogate(*wide)
    torch.testing.assert_close(padded[:, :-3], loss, rtol=1e-6, atol=0)
    assert (padded[:, -3:] == 0).all()
    for row in range(mask.shape[0]):
        alone = surrogate(*(tensor[row : row + 1] for tensor in batch))
        torch.testing.assert_close(alone, loss[row : row + 1], rtol=1e-6, atol=0)

    # Hints are true: a row that is silent at A = 0 can be left out.
    if surrogate.silent_at_zero_advantage:
        silent = mask & (advantages == 0)
        assert (loss[silent] == 0).all()
        assert (gradient[silent] == 0).all()
        kept = (clean[2] != 0).any(dim=1)
        assert torch.equal(surrogate(*(tensor[kept] for tensor in clean)), loss[kept])


@every_surrogate
@pytest.mark.parametrize("distance", [-1e4, 1e30])
def test_finite_at_extreme_log_ratios(surrogate, distance):
    far, near = torch.full((3, 2000), distance), torch.full((3, 2000), -0.5)
    mixed = far.clone()
    mixed[:, :1000] = torch.tensor([-25.0, 0.0]).repeat(500)
    advantages = torch.tensor([[1.0], [-1.0], [0.0]])
    for logprobs, old in ((far, near), (near, far), (mixed, near)):  # a product of 2,000 ratios must not overflow
        loss, gradient = loss_and_gradient(surrogate, logprobs, old, advantages, far != 0)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


@every_surrogate
def test_bfloat16_is_computed_in_float32(surrogate):
    logprobs, old, advantages, mask = smooth_batch()
    low = [tensor.bfloat16() for tensor in (logprobs, old, advantages)]
    loss, gradient = loss_and_gradient(surrogate, *low, mask)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    exact = surrogate(*(tensor.double() for tensor in low), mask)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
