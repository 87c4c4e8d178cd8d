"""What an optimizer makes of PSPO's gradient, (1 - alpha) times NoClip's (Dwyer et al. 2026, section 2)."""

import pytest
import torch
from processes import TINY, one_layer
from safetensors.torch import load_file

from pspo.config import ModelConfig
from pspo.losses import PSPO, NoClip
from pspo.model import load_policy
from pspo.train import main


def train_logit_table(surrogate, eps):
    """A toy policy, one softmax row of logits per state; fixed draws of actions and advantages for every caller."""
    generator = torch.Generator().manual_seed(0)
    states, actions, rows = 6, 5, 64
    table = torch.zeros(states, actions, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([table], lr=0.05, weight_decay=0.0, eps=eps)
    mask = torch.ones(rows, 1, dtype=torch.bool)
    for _ in range(5):
        state = torch.randint(states, (rows,), generator=generator)
        action = torch.randint(actions, (rows,), generator=generator)
        advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
        old = table.log_softmax(1)[state, action, None].detach()
        for _ in range(4):
            logprobs = table.log_softmax(1)[state, action, None]
            optimizer.zero_grad()
            surrogate(logprobs, old, advantages, mask).mean().backward()
            optimizer.step()
    return table.detach()


@pytest.mark.parametrize(("alpha", "eps"), [(0.1, 1e-30), (0.9, 1e-30), (0.9, 1e-2)])
def test_adamw_moves_pspo_and_noclip_alike_but_for_a_large_eps(alpha, eps):
    noclip, pspo = (train_logit_table(surrogate, eps) for surrogate in (NoClip(), PSPO(alpha)))
    assert noclip.abs().max() > 0.3  # they did move, far from where they started
    apart = (pspo - noclip).abs().max()
    assert apart > 0.05 if eps == 1e-2 else apart < 1e-9


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_pspo_is_noclip_bit_for_bit_where_the_factor_is_a_half(tmp_path, beta):
    """With AdamW's epsilon and the KL penalty halved too, and no norm clipped; by the command."""
    for method, factor in ((["NoClip"], 1.0), (["PSPO", "--algorithm.surrogate.alpha", "0.5"], 0.5)):
        output = tmp_path / method[0]
        main([
            *TINY, "--algorithm.surrogate", *method, f"--algorithm.beta={beta * factor}", "--algorithm.minibatches=2",
            f"--optimizer.options={{eps: {1e-4 * factor}}}", "--optimizer.max_grad_norm=0", "--run.max_steps=4",
            "--reward.functions=[{class_path: SoftOverlong, init_args: {buffer: 8}}]", f"--run.output_dir={output}",
        ])  # fmt: skip
    pspo, noclip = (load_file(tmp_path / name / "final/model.safetensors") for name in ("PSPO", "NoClip"))
    untrained = load_policy(ModelConfig(one_layer())).state_dict()
    assert all(torch.equal(pspo[name], noclip[name]) for name in noclip)
    assert max((noclip[name] - untrained[name]).abs().max() for name in noclip) > 1e-3
