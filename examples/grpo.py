"""GRPO in one file: everything of the algorithm stands here, top to bottom. ``python examples/grpo.py``, a minute.

Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", 2402.03300): draw a group of completions for each
prompt, score them, call a completion good if it is better than its group's mean, and move the policy towards the good
ones by PPO's clipped loss. No value model, and here no KL term. The library does the boring parts: it loads the model
and the problems, decodes, and computes log-probs without holding all logits.

    python -m pspo.train --algorithm.surrogate Clip --algorithm.advantages group --algorithm.aggregation grpo \
        --rollout.prompts 16 --run.validate_every 0

ends with the same weights, bit for bit on one thread of a CPU (tests/test_library.py).
"""

from itertools import islice

import torch

from pspo.config import DataConfig, ModelConfig, RolloutConfig
from pspo.model import head_logprobs, hidden_states, load_policy, load_tokenizer, unflatten
from pspo.rollout import generate, load_prompts, make_sampling, prompt_order
from pspo.tasks.rewards import math_reward

STEPS, EPOCHS = 100, 2  # optimizer steps; passes over each rollout
PROMPTS, GROUP = 16, 4  # a rollout: prompts, and completions of each
LR, CLIP, TEMPERATURE = 3e-5, 0.2, 0.6


def train(steps: int = STEPS, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    tokenizer, policy = load_tokenizer(ModelConfig("tiny-base")), load_policy(ModelConfig("tiny-base"))
    prompts = load_prompts(DataConfig("arithmetic"), tokenizer, "train")
    sampling = make_sampling(policy, tokenizer, RolloutConfig(temperature=TEMPERATURE, top_p=0.85))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0, fused=True)
    order = prompt_order(len(prompts), seed)  # endless passes over the prompts, each in a new random order

    for step in range(0, steps, EPOCHS):
        # 1. Rollout: GROUP completions of each prompt, drawn by the policy as it is now. B = PROMPTS x GROUP rows.
        batch = prompts.take(list(islice(order, PROMPTS)))
        rollout = generate(policy, tokenizer, batch.ids, sampling, GROUP)

        # 2. Rewards: 1 for the right number, 0.05 for a wrong one in the right format.
        golds = [problem.answer for problem in batch.problems for _ in range(GROUP)]
        rewards = torch.tensor([math_reward(text, gold) for text, gold in zip(rollout.texts, golds, strict=True)])

        # 3. Advantages: how much better than the group's mean, in standard deviations of the group.
        groups = rewards.view(PROMPTS, GROUP)
        better = groups - groups.mean(dim=1, keepdim=True)
        deviation = (better.square().sum(dim=1, keepdim=True) / (GROUP - 1)).sqrt()
        all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)  # such a group teaches nothing: exactly 0
        advantages = torch.where(all_equal, 0.0, better / (deviation + 1e-4)).flatten()  # (B,)

        # 4. The rows that have a gradient, (b, t); rows without a gradient need no forward pass. b <= B, t <= T.
        rows = rows_to_train(rollout, advantages)
        trained = rollout.rows(rows)  # on the CPU, like all rollouts
        mask = trained.completion_mask.to(policy.device)

        # 5. Two epochs over the same rollout. In the first the policy has not moved since it drew: the ratio is 1.
        old_logprobs = None
        for _ in range(EPOCHS):
            hidden = hidden_states(policy, trained.token_ids, shared=True)  # (N, H), of the N tokens drawn: one pass
            leaf = hidden.detach().requires_grad_()  # loss.backward() stops here
            drawn, _ = head_logprobs(policy, leaf, trained.targets(slice(None)), TEMPERATURE)  # (N,), and entropies
            logprobs = unflatten(drawn, mask)  # (b, t), 0 after a completion's end
            if old_logprobs is None:
                old_logprobs = logprobs.detach()
            ratio = (logprobs - old_logprobs).exp()  # new / old probability of each token
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            A = advantages[rows][:, None].to(policy.device)  # (b, 1), the same for all tokens of a completion
            losses = -torch.minimum(ratio * A, clipped * A)  # the worse of the two: no reward for moving further
            lengths = mask.sum(dim=1, keepdim=True).float()
            loss = (losses.where(mask, 0.0) / (lengths * PROMPTS * GROUP)).sum()  # mean over tokens, then completions
            loss.backward()
            hidden.backward(leaf.grad)  # then one pass back through the model's body
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step + EPOCHS:3}  reward {rewards.mean():.2f}  loss {loss:+.4f}", flush=True)
    return policy


def rows_to_train(rollout, advantages: torch.Tensor) -> torch.Tensor:
    """Indices (b,) of rows whose advantage is not 0, groups with long completions first; one row if there are none."""
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    groups = torch.arange(len(rollout)).view(-1, GROUP).tolist()
    groups = [[row for row in group if advantages[row] != 0] for group in groups]
    groups = sorted(filter(None, groups), key=lambda group: -max(lengths[row] for row in group))
    return torch.tensor([row for group in groups or [[0]] for row in group])


@torch.no_grad()
def accuracy(policy: torch.nn.Module, n: int = 200) -> float:
    """Share of held-out problems whose greedy completion ends in the right number."""
    tokenizer = load_tokenizer(ModelConfig("tiny-base"))
    prompts = load_prompts(DataConfig("arithmetic"), tokenizer, "test", limit=n)
    greedy = make_sampling(policy, tokenizer, RolloutConfig()).greedy()
    texts = generate(policy, tokenizer, prompts.ids, greedy).texts
    print(f"{prompts.problems[0].prompt}\n{texts[0]}\n")
    return sum(math_reward(text, p.answer) == 1 for text, p in zip(texts, prompts.problems, strict=True)) / n


if __name__ == "__main__":
    before = accuracy(load_policy(ModelConfig("tiny-base")))
    after = accuracy(train())
    print(f"greedy accuracy on 200 held-out problems: {before:.1%} before, {after:.1%} after")
