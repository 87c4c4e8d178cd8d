"""bfloat16 weights: rounding that is right on average, and the same on every rank."""

import pytest
import torch
from processes import one_layer, ranks

import pspo.train
import pspo.update
from pspo.run.optimizers import StochasticRounding, float32_copies, round_stochastically

SMALL = (
    f"--model.name_or_path={one_layer()}", "--model.dtype=bfloat16", "--distributed.strategy=ddp",
    "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--rollout.temperature=1", "--run.max_steps=4",
    "--run.validate_every=0", "--run.test_limit=0", "--run.save_every=0", "--data.limit=9", "--optimizer.lr=1e-3",
)  # fmt: skip


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


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_small_steps_add_up_in_bfloat16(name):
    """1,000 steps against the same in float64, which each alone would be lost: a spacing is 400 steps."""
    lr, steps = 1e-5, 1000
    start = torch.full((2000,), 1.0)
    weight = torch.nn.Parameter(start.bfloat16())

    def make(parameters):
        return torch.optim.AdamW(parameters, lr, weight_decay=0) if name == "adamw" else torch.optim.SGD(parameters, lr)

    copies = float32_copies([weight])
    optimizer = StochasticRounding([weight], copies, make(copies))
    exact = torch.nn.Parameter(start.double())
    expected = make([exact])
    for _ in range(steps):
        for parameter, one in ((weight, optimizer), (exact, expected)):
            parameter.grad = torch.ones_like(parameter)
            one.step()
    moved, wanted = (weight.double() - 1).mean().item(), (exact - 1).mean().item()
    assert moved == pytest.approx(wanted, rel=0.05)
    nearest = torch.ones(()).bfloat16()
    assert (nearest - lr) == nearest


def test_replicas_of_bfloat16_weights_stay_the_same(tmp_path):
    def work() -> None:
        original = pspo.update.take_step

        def step(learner, *rest):
            metrics = original(learner, *rest)
            weights = torch.cat([p.detach().float().flatten() for p in learner.policy.parameters()])
            others = pspo.distributed.concat_over_ranks(weights[None])
            assert torch.equal(others[0], others[1])
            return metrics

        pspo.update.take_step = step
        pspo.train.main([*SMALL, f"--run.output_dir={tmp_path / 'run'}"])

    assert ranks(work) == [0, 0]
