"""The bridge to verl: the loss of its workers, under its own configuration, is ours."""

from pathlib import Path

import pytest
import torch
from batches import SURROGATES, random_batch

from pspo.losses import P3O, PSPO, Counts, aggregate

verl = pytest.importorskip("verl", reason="needs verl 0.9.1 and what it imports: .ci/nightly installs them")

from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

AGGREGATIONS = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
LENGTHS = [12, 1, 7, 9, 3, 2, 11, 5]
LIMIT = 16


def actor_config(*overrides: str):
    """The actor's section of verl's configuration under these words of a command line."""
    section = "actor_rollout_ref.actor"
    words = [
        "actor_rollout_ref.model.external_lib=pspo_bridge.verl",
        f"{section}.ppo_micro_batch_size_per_gpu=4",
        f"{section}.loss_scale_factor={LIMIT}",
        f"{section}.policy_loss._target_=pspo_bridge.verl.PolicyLossConfig",
        *(f"{prefix}{section}.{word}" for prefix, word in (override.rpartition(" ")[::2] for override in overrides)),
    ]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=words)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def worker_loss(config, logprobs, old, advantages, mask, weights=None):
    """`ppo_loss` over two microbatches; the total, by log-probs whose row has one prompt token."""
    total = 0.0
    metrics = []
    for rows in (slice(0, 4), slice(4, 8)):
        rows_mask = mask[rows]
        values = [torch.cat([row[keep], torch.zeros(1)]) for row, keep in zip(logprobs[rows], rows_mask, strict=True)]
        fields = {
            "prompts": torch.ones(4, 1, dtype=torch.long),
            "responses": torch.ones(4, 12, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(4, 1), rows_mask], dim=1).long(),
            "response_mask": rows_mask.long(),
            "old_log_probs": old[rows],
            "advantages": advantages[rows].expand(4, 12).contiguous(),
        }
        if weights is not None:
            fields["rollout_is_weights"] = weights[rows]
        data = TensorDict(fields, batch_size=4)
        for name, value in {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": 8}.items():
            data.set_non_tensor(name, value)
        loss, values = ppo_loss(config, {"log_probs": torch.cat(values)}, data)
        loss.backward()
        total += loss.item()
        metrics.append(values)
    return total, metrics


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_loss_and_gradient_are_ours(surrogate, how):
    name = f"pspo.{type(surrogate).__name__}"
    arguments = [f"+ policy_loss.arguments.{name}={value}" for name, value in vars(surrogate).items() if value]
    config = actor_config(f"policy_loss.loss_mode={name}", f"loss_agg_mode={AGGREGATIONS[how]}", *arguments)
    logprobs, old, advantages, mask = random_batch(LENGTHS, dtype=torch.float32)
    weights = torch.rand(8, 12, generator=torch.Generator().manual_seed(1)) + 0.5
    ours = logprobs.clone().requires_grad_()
    losses = surrogate(ours, old, advantages, mask) * weights
    counts = Counts(int(mask.sum()), 8, LIMIT)
    expected = aggregate(losses, mask, how, counts)
    expected.backward()

    theirs = logprobs.clone().requires_grad_()
    total, metrics = worker_loss(config, theirs, old, advantages, mask, weights)
    assert abs(total - expected.item()) < 1e-7 * aggregate(losses.abs(), mask, how, counts).item()
    slope = metrics[0][f"actor/{name}/slope"].aggregate()
    assert not isinstance(surrogate, PSPO) or slope == pytest.approx(1 - surrogate.alpha, rel=1e-5)
    assert torch.equal(theirs.grad, ours.grad)


def test_a_surrogate_of_a_user_and_defaults_without_the_section():
    actor_config("policy_loss.loss_mode=pspo.losses.surrogates.P3O", "+ policy_loss.arguments.tau=2.0")
    get_policy_loss_fn("pspo.losses.surrogates.P3O")
    config = actor_config("policy_loss._target_=verl.workers.config.PolicyLossConfig", "policy_loss.loss_mode=pspo.P3O")
    logprobs, old, advantages, mask = random_batch(LENGTHS, dtype=torch.float32)
    total, _ = worker_loss(config, logprobs.requires_grad_(), old, advantages, mask)
    assert total == pytest.approx(P3O()(logprobs, old, advantages, mask).sum().item() / mask.sum().item(), rel=1e-6)


@pytest.mark.parametrize("word", ["clip_ratio=0.5", "clip_ratio_low=0.1", "clip_ratio_high=0.28", "clip_ratio_c=4.0"])
def test_bounds_of_verls_losses_are_refused(word):
    config = actor_config("policy_loss.loss_mode=pspo.Clip", word)
    logprobs, *others = random_batch(LENGTHS, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"actor.{word} has no effect with pspo.Clip: leave it out"):
        worker_loss(config, logprobs.requires_grad_(), *others)


def test_a_wrong_argument_is_refused_when_the_configuration_is_read():
    with pytest.raises(Exception, match=r"no effect with verl's loss_mode=vanilla.*leave alpha out"):
        actor_config("+ policy_loss.arguments.alpha=0.3")
    with pytest.raises(Exception, match=r"alpha must be in \[0, 1\], got 2"):  # hydra's, with ours
        actor_config("policy_loss.loss_mode=pspo.PSPO", "+ policy_loss.arguments.alpha=2")
