"""prime-rl and SkyRL, on no package index: stand-ins of their published contracts, with our losses behind them."""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from batches import SURROGATES, loss_and_gradient, random_batch
from torch import Tensor

from pspo.losses import DRO, P3O, PSPO, UserCodeError
from pspo_bridge import BUILT_IN, make_surrogate, token_losses


@dataclass
class LossInputs:  # of prime-rl, each (T,)
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    ref_logprobs: Tensor | None = None
    loss_weights: Tensor | None = None


def install(monkeypatch, path: str, **contents) -> None:
    """Put a module and the packages around it into sys.modules."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
    vars(sys.modules[path]).update(contents)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_prime_rl_sums_our_loss_over_sequences(surrogate, monkeypatch):
    install(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)
    from pspo_bridge.prime_rl import loss

    logprobs, old, advantages, mask = random_batch([12, 1, 7, 9])
    losses, gradient = loss_and_gradient(surrogate, logprobs, old, advantages, mask)
    theirs = logprobs.clone().requires_grad_()
    total = 0.0
    for row in range(4):
        inputs = LossInputs(theirs[row], old[row], advantages[row].expand(12), mask[row])
        outputs = loss(inputs, type(surrogate).__name__, **vars(surrogate))
        outputs.loss.backward()
        total += outputs.loss.item()
    assert total == pytest.approx(losses.sum().item(), rel=1e-12)
    torch.testing.assert_close(theirs.grad, gradient, rtol=1e-12, atol=1e-14)

    halved = loss(replace(inputs, loss_weights=torch.full((12,), 0.5)), surrogate)
    assert halved.loss.item() == pytest.approx(outputs.loss.item() / 2)
    assert outputs.metrics.keys() == {"surrogate/ratio", "surrogate/slope", "surrogate/zero_weight_share"}
    assert loss(replace(inputs, advantages=torch.zeros(12)), "Clip").metrics == {}


@pytest.fixture
def skyrl(monkeypatch):
    """SkyRL's functions: losses are summed, advantages come divided, corrections change loss and mask."""
    registry = {}

    def register_once(name, function):
        if name in registry:
            raise ValueError(f"policy loss '{name}' already registered")
        registry[name] = function

    def correct(losses, old, rollout, mask, config):
        if rollout is None:
            return losses, mask, {}
        return losses * (old - rollout).exp().clamp(max=config.cap), mask, {"tis": 1.0}

    policies = SimpleNamespace(register=register_once, unregister=registry.__delitem__, list_available=registry.copy)
    utils = "skyrl.backends.skyrl_train.utils"
    install(monkeypatch, f"{utils}.off_policy_correction_utils", apply_off_policy_correction=correct)
    contents = {"PolicyLossRegistry": policies, "reduce_loss": lambda loss, mask: (loss * mask).sum()}
    install(monkeypatch, f"{utils}.ppo_utils", **contents)
    monkeypatch.delitem(sys.modules, "pspo_bridge.skyrl", raising=False)
    import pspo_bridge.skyrl

    return SimpleNamespace(registry=registry, register=pspo_bridge.skyrl.register)


@pytest.mark.parametrize("surrogate", [each for each in SURROGATES if not isinstance(each, DRO)], ids=repr)
def test_skyrl_sums_our_loss_of_divided_advantages(skyrl, surrogate):
    assert skyrl.registry.keys() == {f"pspo.{name}" for name in BUILT_IN} - {"pspo.DRO"}
    skyrl.register(surrogate)
    loss = skyrl.registry[f"pspo.{type(surrogate).__name__}"]
    logprobs, old, advantages, mask = random_batch([12, 1, 7, 9])
    tokens = int(mask.sum())
    losses, gradient = loss_and_gradient(surrogate, logprobs, old, advantages, mask)
    expected = losses.sum() / tokens
    theirs = logprobs.clone().requires_grad_()
    config = SimpleNamespace(off_policy_correction=SimpleNamespace(cap=2.0))
    total, metrics = loss(theirs, old, advantages / tokens, config, mask.long())
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(theirs.grad, gradient / tokens, rtol=1e-12, atol=1e-14)
    assert metrics["surrogate/ratio"] == pytest.approx((logprobs - old).exp()[mask].mean().item())

    corrected, metrics = loss(logprobs, old, advantages / tokens, config, mask.long(), old - 0.5)
    assert corrected.item() == pytest.approx(expected.item() * 0.5 * torch.e**0.5 * 2, rel=1e-6)
    assert metrics["tis"] == 1.0

    skyrl.register(surrogate, anchor="rollout")  # as for its fully async trainer
    loss = skyrl.registry[f"pspo.{type(surrogate).__name__}"]
    anchored, metrics = loss(logprobs, torch.full_like(old, torch.nan), advantages / tokens, config, mask.long(), old)
    assert anchored.item() == pytest.approx(expected.item(), rel=1e-12)
    assert "tis" not in metrics
    with pytest.raises(ValueError, match="needs the engine's log-probs"):
        loss(logprobs, old, advantages, config, mask.long())


@pytest.mark.parametrize("surrogate", [P3O(kl_coef=0.1), DRO()], ids=repr)
def test_skyrl_refuses_a_loss_that_advantages_do_not_scale(skyrl, surrogate):
    with pytest.raises(ValueError, match="kl_coef or tau must be 0"):
        skyrl.register(surrogate)


@pytest.mark.parametrize(
    ("surrogate", "arguments", "message"),
    [
        ("PSP0", {}, "there is no surrogate 'PSP0'.*: name one of Clip, NoClip|.*PSPO"),
        ("pspo", {}, "there is no surrogate 'pspo'.*: name PSPO, or the import path"),
        ({"name": "PSPO"}, {}, "'name': 'PSPO'.*write {'class_path': 'PSPO', 'init_args'"),
        ("no_such_module.Loss", {}, "there is no surrogate 'no_such_module.Loss'.*No module named"),
        ("PSPO", {"epsilon": 0.1}, r"PSPO\(alpha: float = 0.1\).*unexpected keyword argument 'epsilon'"),
        (PSPO(0.3), {"alpha": 0.2}, "has its arguments already: leave alpha out"),
        (torch.nn.MSELoss(), {}, "must be an instance of a subclass of pspo.losses.Surrogate"),
        (type("Stateful", (PSPO,), {"state_dict": dict})(), {}, "keeps a state"),
    ],
)
def test_wrong_names_and_arguments_are_refused_in_one_line(surrogate, arguments, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_surrogate(surrogate, **arguments)
    assert "\n" not in str(refusal.value)


def test_names_and_import_paths():
    for name in ("PSPO", "pspo.PSPO", "pspo.losses.PSPO", "pspo.losses.surrogates.PSPO"):
        assert make_surrogate(name, alpha=0.3) == PSPO(0.3)
    assert make_surrogate({"class_path": "PSPO", "init_args": {"alpha": 0.3}}) == PSPO(0.3)
    assert make_surrogate("test_contracts.Annealed", alpha=0.3) == Annealed(0.3)  # a user's own
    assert [type(make_surrogate(name)) for name in BUILT_IN] == [type(surrogate) for surrogate in SURROGATES]


class Annealed(PSPO):
    def __call__(self, logprobs, old_logprobs, advantages, mask, step=0):
        return super().__call__(logprobs, old_logprobs, advantages, mask) / (1 + step)


def test_a_loss_that_asks_for_the_step_is_refused_where_nobody_tells_it():
    values = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2), torch.ones(1, 1), torch.ones(1, 2)
    with pytest.raises(ValueError, match="asks for the optimizer step"):
        token_losses(Annealed(), *values)
    assert token_losses(Annealed(), *values, step=1)[0].tolist() == [[-0.5, -0.5]]
    with torch.no_grad(), pytest.raises(UserCodeError, match="Annealed returned a loss without gradient"):
        token_losses(Annealed(), *values, step=1)


def guide_lines(trainer):
    page = (Path(__file__).parents[2] / "docs/guide/bridge.md").read_text(encoding="utf-8")
    (lines,) = re.findall(rf"```py\n(from {trainer}.*?)```", page, re.DOTALL)
    return lines


@pytest.mark.parametrize("name", ["Clip", "PSPO"])
def test_the_guides_lines_for_slime(monkeypatch, name):
    """slime calls `compute_policy_loss` of its module once, with the tokens of all completions in a row."""
    module = ModuleType("loss")
    install(monkeypatch, "slime.backends.megatron_utils", loss=module)
    exec(guide_lines("slime").replace('"PSPO"', repr(name)), names := {})
    names["use_pspo"](None)
    logprobs, old, advantages, mask = random_batch([12, 1, 7, 9])
    kl = (old - logprobs)[mask].requires_grad_()
    losses, clipped = module.compute_policy_loss(kl, advantages.expand(4, 12)[mask], 0.2, 0.28, eps_clip_c=None)
    expected, gradient = loss_and_gradient(make_surrogate(name), logprobs, old, advantages, mask)
    torch.testing.assert_close(losses, expected[mask], rtol=1e-12, atol=1e-14)
    assert clipped.shape == losses.shape
    losses.sum().backward()
    torch.testing.assert_close(-kl.grad, gradient[mask], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_the_guides_lines_for_nemo_rl(monkeypatch, surrogate):
    """NeMo-RL calls its loss by these four names; its batches have one column more than log-probs."""

    class ClippedPGLossFn:
        def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
            assert data.keys() >= {"prev_logprobs", "advantages", "token_mask", "sample_mask"}
            return torch.tensor(torch.nan), {"loss": torch.nan, "approx_entropy": 1.0}

    module = SimpleNamespace(ClippedPGLossFn=ClippedPGLossFn)
    install(monkeypatch, "nemo_rl.algorithms", grpo=module)
    exec(guide_lines("nemo_rl").replace('"PSPO"', "surrogate"), {"surrogate": surrogate})
    logprobs, old, advantages, mask = random_batch([12, 1, 7, 9])
    column = torch.zeros(4, 1)
    data = {
        "prev_logprobs": torch.cat([column, old], dim=1),
        "advantages": torch.cat([column, advantages.expand(4, 12)], dim=1),
        "token_mask": torch.cat([column, mask], dim=1),
        "sample_mask": torch.tensor([1, 1, 0, 1]),
    }
    tokens = torch.tensor(40)
    loss_of = module.ClippedPGLossFn()
    loss, metrics = loss_of(next_token_logprobs=logprobs, data=data, global_valid_seqs=None, global_valid_toks=tokens)
    rows = [0, 1, 3]
    expected = surrogate(logprobs[rows], old[rows], advantages[rows], mask[rows]).sum() / 40
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics == {"loss": loss.item(), "approx_entropy": 1.0}
