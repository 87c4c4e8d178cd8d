"""--optimizer.name through the trainer, and bfloat16 weights: rounding right on average, the same on every rank."""

from dataclasses import replace

import pytest
import torch

from pspo.config import OptimizerConfig
from pspo.update.optimizers import check_optimizer, make_optimizer, round_stochastically


@pytest.mark.parametrize("name", ["adamw", "sgd", "adamw8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_leaves_norms_and_biases_alone(tiny_model, name, dtype):
    """Against torch's own AdamW with two groups, or its SGD with L2; the learning rate changes on the way."""
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    config = OptimizerConfig(name=name, lr=1e-2, options={"weight_decay": 0.1})
    policy, peer, plain = (tiny_model(dtype=dtype) for _ in range(3))
    optimizer, without = make_optimizer(policy, config), make_optimizer(plain, replace(config, options={}))
    groups = [[p for p in peer.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    decayed = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
    reference = torch.optim.SGD(decayed, lr=1e-2) if name == "sgd" else torch.optim.AdamW(decayed, lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        for parameters in zip(*(model.parameters() for model in (policy, peer, plain)), strict=True):
            gradient = torch.randn(parameters[0].shape, generator=generator).to(dtype)
            for parameter in parameters:
                parameter.grad = gradient.to(parameter.grad_dtype, copy=True)
        for each in (optimizer, reference, without):
            for group in each.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            each.step()
    moved = 0.0
    trios = zip(policy.named_parameters(), peer.parameters(), plain.parameters(), strict=True)
    for (label, ours), theirs, undecayed in trios:
        if dtype == torch.float32 and name != "adamw8bit":
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        if ours.dim() == 1:
            assert torch.equal(ours, undecayed), label
        else:
            moved = max(moved, float((ours - undecayed).detach().abs().max()))
    assert moved > 1e-3


def test_options_are_those_of_the_optimizers_class(tiny_model):
    config = OptimizerConfig(name="sgd", lr=0.1, options={"momentum": 0.9, "dampening": 0.1})
    assert make_optimizer(tiny_model(), config).param_groups[0]["momentum"] == 0.9
    with pytest.raises(ValueError, match=r"--optimizer\.options .*beta1"):
        check_optimizer(replace(config, options={"beta1": 0.9}))
    with pytest.raises(ValueError, match=r"--optimizer\.options .*foreach. cannot be"):
        check_optimizer(OptimizerConfig(lr=0.1, options={"foreach": True}))
    with pytest.raises(ValueError, match=r"--optimizer\.lr must be set"):
        make_optimizer(tiny_model(), OptimizerConfig())
    with pytest.raises(ValueError, match=r"--optimizer\.options .*multiple values .*'lr'"):
        check_optimizer(replace(config, options={"lr": 0.2}))


def test_rounding_is_right_on_average_and_to_a_neighbour():
    values = torch.tensor([1.0, 1 + 2**-10, -3.14159, 1e-30, 0.0, 255.7])
    generator = torch.Generator().manual_seed(0)
    rounded = torch.stack([round_stochastically(values, generator) for _ in range(20_000)])
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded[0, [0, 4]].float(), values[[0, 4]])  # bfloat16 numbers stay
    spacing = 2.0 ** (values.abs().log2().floor() - 7)  # of bfloat16 there
    assert ((rounded.double() - values).abs() <= spacing).all()
    error = (rounded.double().mean(dim=0) - values.double()).abs()
    assert (error <= 4 * spacing.double() / (2 * 20_000**0.5)).all()  # four standard errors of a coin's mean


def test_bfloat16_weights_behind_a_float32_one_move_on_average():
    """Some architectures keep a few weights in float32. 100 steps of 1e-3 each: right is 0.9, to the nearest 1.0.

    Gradients add up over 300 microbatches; in bfloat16, where 256 + 1 is 256, the sum would stay there.
    """
    policy = torch.nn.ParameterList([torch.ones(3), torch.ones(20_000, dtype=torch.bfloat16)])
    optimizer = make_optimizer(policy, OptimizerConfig(name="sgd", lr=1e-3 / 300))
    for _ in range(100):
        optimizer.zero_grad()
        for _ in range(300):
            sum(weight.sum() for weight in policy).backward()
        optimizer.step()
    for weight in policy:
        assert weight.float().mean().item() == pytest.approx(0.9, abs=1e-3)
