"""Nucleus replay: the kept sets against a slow loop, log-probs and gradients against sums over those sets."""

import copy
import dataclasses
import math

import pytest
import reference
import torch
from naive import TEMPERATURE, make_config, run, weights

import pspo.model.logprobs
from pspo.config import ModelConfig
from pspo.losses import GSPO, NoClip
from pspo.model import load_tokenizer, token_logprobs
from pspo.rollout import Sampling, generate
from pspo.update import Learner, drawn_logprobs, update

TOP_P = 0.8
PROMPTS = [[7, 8, 9, 10], [11, 12], [13, 14, 15]]
STOPS = (5, 30, 41, 50)


@pytest.fixture(scope="module")
def policy(tiny_model):
    model = tiny_model(dtype=torch.float64, num_hidden_layers=1, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.2)  # far from uniform
    return model


def sample(policy, **options):
    settings = {"temperature": TEMPERATURE, "top_p": TOP_P, "max_completion_tokens": 8, "logprobs": True} | options
    torch.manual_seed(1)
    sampling = Sampling(stop_ids=STOPS, pad_id=0, nucleus=True, **settings)
    return generate(policy, load_tokenizer(ModelConfig()), PROMPTS, sampling, group_size=4)


@pytest.fixture(scope="module")
def rollout(policy):
    return sample(policy)


def full_logprobs(model, rollout, i):
    """log pi of every token of the vocabulary at row i's completion positions, (t, V)."""
    return reference.vocabulary_logprobs(model, rollout.token_ids, i, TEMPERATURE)


def kept_sets(rollout, i):
    """Row i's sets, one a token."""
    length = int(rollout.completion_mask[i].sum())
    assert int(rollout.nucleus.counts[i, length:].sum()) == 0
    parts = rollout.nucleus.ids[i].split(rollout.nucleus.counts[i].tolist())
    return [set(part.tolist()) for part in parts[:length]]


@pytest.mark.parametrize("options", [{"max_rows": 4}, {"top_p": 0.95}, {"top_k": 3}], ids=str)
def test_kept_sets_are_the_nuclei_that_tokens_were_drawn_from(policy, options):
    rollout = sample(policy, **options)
    cut = {"top_p": TOP_P} | {name: options[name] for name in ("top_p", "top_k") if name in options}
    sizes = []
    for i in range(len(rollout)):
        completion = rollout.completion_ids[i].tolist()
        for t, (kept, full) in enumerate(zip(kept_sets(rollout, i), full_logprobs(policy, rollout, i), strict=True)):
            probs = full.exp().tolist()
            exact = reference.nucleus(full, **cut)
            assert kept == set(exact.nonzero().squeeze(1).tolist())
            assert completion[t] in kept
            mass = math.fsum(probs[token] for token in kept)
            own = math.log(probs[completion[t]] / mass)
            assert rollout.sampler_logprobs[i, t].item() == pytest.approx(own, abs=1e-5)
            sizes.append(len(kept))
    assert min(sizes) < max(sizes) < 64


def renormalised(policy, rollout, i):
    """log pi of row i's tokens over their kept sets, and these sets' entropies, (2, T), by sums; 0 where masked."""
    full, completion = full_logprobs(policy, rollout, i), rollout.completion_ids[i]
    values = torch.zeros(2, len(completion), dtype=full.dtype)
    for t, (row, kept) in enumerate(zip(full, kept_sets(rollout, i), strict=True)):
        log_p = row - row[sorted(kept)].logsumexp(0)
        values[0, t] = log_p[completion[t]]
        values[1, t] = -(log_p.exp() * log_p)[sorted(kept)].sum()
    return values


@pytest.mark.parametrize("chunk_tokens", [100, 5])
def test_log_probs_entropies_and_gradients_are_sums_over_the_kept_sets(policy, rollout, monkeypatch, chunk_tokens):
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", 1)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", chunk_tokens)
    nucleus = rollout.nucleus.select(slice(None), rollout.completion_mask)
    actual = torch.stack(token_logprobs(policy, *rollout.token_ids, TEMPERATURE, nucleus, with_entropies=True))
    expected = torch.stack([renormalised(policy, rollout, i) for i in range(len(rollout))], dim=1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = list(policy.parameters())
    gradients, exact = (torch.autograd.grad((values * weights).sum(), parameters) for values in (actual, expected))
    for gradient, other in zip(gradients, exact, strict=True):  # the models' norms compute in float32
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())


def replay(surrogate, **algorithm):
    algorithm = {"nucleus": "replay", "epochs": 2} | algorithm
    return make_config(surrogate, **algorithm, optimizer={"max_grad_norm": 0.0})


def steps(policy, rollout, config):
    """Weights after the steps of plain SGD, and metrics."""
    advantages = torch.randn(len(rollout), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return run(policy, rollout, advantages, config, sgd=0.01)


@pytest.mark.parametrize("surrogate", [NoClip(), GSPO(0.1, 0.1)], ids=repr)
def test_updates_are_on_policy_at_first_and_not_those_that_ignore_the_nucleus(policy, rollout, surrogate):
    whole, metrics = steps(policy, rollout, replay(surrogate, correction="sequence_mask"))
    move = (whole - weights(policy)).abs().max().item()
    bare = dataclasses.replace(rollout, nucleus=None)
    ignoring, _ = steps(policy, bare, replay(surrogate, nucleus="ignore"))
    assert (whole - ignoring).abs().max() > 0.05 * move
    assert metrics[0]["ratio_min"] == metrics[0]["ratio_max"] == 1.0
    assert metrics[1]["ratio_max"] > 1.001
    assert metrics[0]["sampler_ratio_max"] == pytest.approx(1, abs=1e-4)  # the sampler's are renormalised, too
    assert metrics[0]["corrected_share"] == 0
    for drawn, nucleus in ((bare, "replay"), (rollout, "ignore")):
        with pytest.raises(ValueError, match=r"--algorithm\.nucleus replay needs nuclei, ignore none"):
            steps(policy, drawn, replay(surrogate, nucleus=nucleus))


def test_log_probs_that_are_kept_before_the_steps_are_renormalised_too(policy, rollout):
    """The old ones, of the policy that drew the rollout, are the sampler's; so are the reference's."""
    config = replay(NoClip(), epochs=1, minibatches=3, beta=0.1)
    learner = Learner(copy.deepcopy(policy), torch.optim.SGD(policy.parameters(), lr=0.0), reference=policy)
    kept = drawn_logprobs(learner, rollout, torch.ones(len(rollout)), policy, config)
    torch.testing.assert_close(kept.float(), rollout.sampler_logprobs, rtol=0, atol=1e-5)
    for metrics in update(learner, rollout, torch.ones(len(rollout)), config):
        assert metrics["ratio_min"] == pytest.approx(1) == metrics["ratio_max"]
        assert metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
