"""Equal movement: every surrogate takes the same stale rollout, and steps so far that the policy moves equally.

    python scripts/equal_movement.py runs/a runs/b --rollouts 12 24 --lags 0 1 2 4 8 --kl 0.001 0.004 \
        --surrogates NoClip NoClip::shuffled Clip 'PSPO(alpha=0.3)' GSPO:grpo my_losses.Mine --output moves.jsonl

Each run is made again from its config.yaml. At the checkpoint after N of its rollouts, the policy of ``lag`` rollouts
before draws a rollout of the prompts that the run draws next. Each surrogate trains the checkpoint's policy on it, with
the run's epochs and Adam's second moments but no momentum: this rollout alone moves the policy. The learning rate is
sought for which KL(checkpoint || trained), over the whole vocabulary at completions that the checkpoint's policy draws
for held-out prompts, mean over their tokens, is within 2% of the aim (``matched``). The file gets a line for each such
fork: how far reward and correct answers moved, sampled as in training with the same random numbers, on problems that
the run does not draw. What is in the file already is not done again.

SURROGATE:AGGREGATION overrides the run's aggregation. SURROGATE:AGGREGATION:shuffled is its control, with the
advantages of all completions shuffled: as much movement, and nothing learnt. ``kl_drawer`` is KL(drew || trained) on
the same tokens, of the policy that drew the rollout, and ``kl_drawer_before`` KL(drew || checkpoint): does a step lead
back to where the policy was?

With --lr surrogates step at these learning rates, too, however far that moves the policy; ``aim`` and ``matched`` are
null.
"""

import argparse
import math
import tempfile
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pspo.cli.files import append_jsonl, read_config, read_jsonl
from pspo.cli.python import config_from_python
from pspo.config import AlgorithmConfig, TrainConfig
from pspo.evaluate.evaluation import evaluate
from pspo.model.logprobs import head_logits, hidden_states
from pspo.rollout import Prompts, Rollout, prompt_order
from pspo.run.learner import Learner
from pspo.run.optimizers import make_optimizer
from pspo.run.prepare import prepare
from pspo.run.run import Run
from pspo.train import draw, score
from pspo.update import keep_logprobs, update
from pspo_lab.view_data import make_surrogate

TOLERANCE, TRIALS, HIGHEST = 0.02, 12, 1.0  # the last a learning rate


def replay(folder: Path, rollouts: int, keep: int) -> Iterator[tuple[int, Run, deque[dict[str, Tensor]]]]:
    """Make a run again; yields it after each of its rollouts, with the last ``keep`` policies, the newest last."""
    settings = read_config(folder / "config.yaml")
    with tempfile.TemporaryDirectory() as output:
        quiet = {"output_dir": output, "fork_from": None, "validate_every": 0, "test_limit": 0, "save_every": 0,
                 "record_tokens": 0, "quiet": True, "tracker": "none"}  # fmt: skip
        run = prepare(*config_from_python(**settings | {"run": settings["run"] | quiet}))
        with run.resources:
            run.start()
            policies = deque([deepcopy(run.learner.policy.state_dict())], keep)
            for done in range(1, rollouts + 1):
                experience = draw(run)
                if run.delay is not None:
                    experience = run.delay.push(experience)
                    while experience is None:
                        experience = run.delay.push(draw(run))
                with run.phase("train"):
                    steps = update(run.learner, experience.rollout, experience.advantages, run.config)
                run.conclude_rollout(experience, steps)
                policies.append(deepcopy(run.learner.policy.state_dict()))
                yield done, run, policies


def checkpoints(folder: Path, rollouts: list[int], lags: list[int]) -> Iterator[tuple[int, Run, deque[Any]]]:
    """What ``replay`` yields after these rollouts; of the policies those of the lags before, the others None."""
    needed = {done - lag for done in rollouts for lag in lags}
    for done, run, policies in replay(folder, max(rollouts), max(lags) + 1):
        for lag in range(len(policies)):
            if done - lag not in needed:  # of a large model there is no room for all
                policies[-1 - lag] = None
        if done in rollouts:
            yield done, run, policies


class Fork:
    """A checkpoint from which surrogates are stepped, and what their movement and improvement are measured on."""

    def __init__(self, run: Run, problems: int, held_out: int, seed: int) -> None:
        self.run, self.policy, self.seed = run, run.learner.policy, seed
        self.sampler = run.sampler
        self.weights = deepcopy(self.policy.state_dict())
        self.optimizer = deepcopy(run.learner.optimizer.state_dict())
        for state in self.optimizer["state"].values():
            state["exp_avg"].zero_()
        prompts = run.stream.prompts
        unused = list(islice(prompt_order(len(prompts), run.config.run.seed), len(prompts)))[-problems - held_out :]
        self.problems, held = prompts.take(unused[:problems]), prompts.take(unused[problems:])
        self.held = self.draw(held, 1)
        self.old = self.next_token_logprobs()
        self.before = self.evaluate()

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        torch.manual_seed(self.seed)
        return self.sampler.draw(prompts, group_size)

    @torch.no_grad()
    def next_token_logprobs(self) -> Tensor:
        """The policy's log-probs (N, V) in float64 of every token at the places of the held-out completions."""
        hidden = hidden_states(self.policy, *self.held.token_ids)[self.held.completion_mask]
        return head_logits(self.policy, hidden, self.run.config.rollout.temperature).double().log_softmax(dim=1)

    def evaluate(self) -> np.ndarray:
        """(2, problems): reward of a sampled completion of each problem, and whether it is correct."""
        completions = evaluate(self.sampler, self.problems, self.run.config.reward, seed=self.seed).completions
        return np.array([[record[name] for record in completions] for name in ("reward", "correct")], dtype=float)

    def stale(self, policy: dict[str, Tensor], indices: list[int], prompts: Prompts) -> tuple[Rollout, Tensor]:
        """A rollout of an earlier policy, with its log-probs of all rows, and advantages (B,)."""
        self.policy.load_state_dict(policy)
        self.drew = self.next_token_logprobs()
        experience = score(self.run, indices, self.draw(prompts, self.run.config.rollout.group_size))
        every_row = torch.ones_like(experience.advantages)
        return keep_logprobs(self.run.learner, experience.rollout, every_row, self.run.config), experience.advantages

    def step(self, config: TrainConfig, rollout: Rollout, advantages: Tensor) -> tuple[Tensor, list[dict[str, float]]]:
        """Train the checkpoint's policy on a rollout; returns its next_token_logprobs, and the steps' metrics."""
        self.policy.load_state_dict(self.weights)
        optimizer = make_optimizer(self.policy, config.optimizer)
        optimizer.load_state_dict(deepcopy(self.optimizer))
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr
        steps = update(Learner(self.policy, optimizer), rollout, advantages, config)
        return self.next_token_logprobs(), steps

    def move(self, config: TrainConfig, rollout: Rollout, advantages: Tensor, aim: float, lr: float) -> dict[str, Any]:
        """Seek the learning rate that moves the policy by ``aim``; what came of it."""
        low, high = 0.0, math.inf  # rates that moved it too little, too much
        for _ in range(TRIALS):
            new, steps = self.step(replace(config, optimizer=replace(config.optimizer, lr=lr)), rollout, advantages)
            kl = mean_kl(self.old, new)
            if abs(kl / aim - 1) <= TOLERANCE:
                break
            if lr >= HIGHEST and kl < aim:  # no token has weight: it cannot be moved
                break
            low, high = (max(low, lr), high) if kl < aim else (low, min(high, lr))
            lr *= min(max(math.sqrt(aim / max(kl, 1e-12)), 0.1), 10)  # KL is quadratic in the rate
            lr = min(lr, HIGHEST) if low < lr < high else math.sqrt(low * high)
        return self.measure(new, steps) | {"lr": lr, "matched": abs(kl / aim - 1) <= TOLERANCE}

    def measure(self, new: Tensor, steps: list[dict[str, float]]) -> dict[str, Any]:
        """How far the policy moved, and what it gained, from what ``step`` returned."""
        found = {"kl": mean_kl(self.old, new), "kl_drawer": mean_kl(self.drew, new),
                 "kl_drawer_before": mean_kl(self.drew, self.old)}  # fmt: skip
        reward, correct = self.evaluate() - self.before
        for name, change in (("reward", reward), ("correct", correct)):
            found |= {name: change.mean(), f"{name}_se": change.std() / math.sqrt(len(change))}
        return found | {name: steps[-1][name] for name in ("ess", "kl_old_new", "zero_weight_share", "grad_norm")}


def mean_kl(p: Tensor, q: Tensor) -> float:
    """KL(p || q) of log-probs (N, V), mean over the N places."""
    return float((p.exp() * (p - q)).sum(dim=1).mean())


def treatment(name: str, algorithm: AlgorithmConfig) -> tuple[AlgorithmConfig, bool]:
    """The algorithm's settings by SURROGATE:AGGREGATION:shuffled, of which the last two may lack; is it a control?"""
    surrogate, aggregation, control = (name + "::").split(":")[:3]
    changed = {"surrogate": make_surrogate(surrogate), "aggregation": aggregation or algorithm.aggregation}
    return replace(algorithm, **changed), {"": False, "shuffled": True}[control]


def forks(
    run: Run,
    policies: deque[dict[str, Tensor]],
    args: argparse.Namespace,
    cell: dict[str, Any],
    done: list[dict[str, Any]],
    rates: dict[tuple[str, float], float],
) -> Iterator[dict[str, Any]]:
    """The lines of one checkpoint but for those done; the run goes on afterwards as if nothing had happened.

    ``rates``: the learning rates found last, by surrogate and aim, where the next search begins.
    """
    position, generators = run.stream.position, run.generators.state_dict()
    seed = run.config.run.seed * 1000 + cell["rollouts"]
    fork, prompts = Fork(run, args.problems, args.held_out, seed), run.stream.next(run.config.rollout.prompts)
    for lag in args.lags:
        rollout, advantages = fork.stale(policies[-1 - lag], *prompts)
        shuffled = advantages[torch.randperm(len(advantages), generator=torch.Generator().manual_seed(seed))]
        for name in args.surrogates:
            algorithm, control = treatment(name, run.config.algorithm)
            all_steps = replace(run.config.run, max_steps=algorithm.epochs * algorithm.minibatches)
            config = replace(run.config, algorithm=algorithm, run=all_steps)
            signal = shuffled if control else advantages
            for target in [*({"aim": aim} for aim in args.kl), *({"aim": None, "lr": lr} for lr in args.lr)]:
                line = cell | {"lag": lag, "surrogate": name} | target
                if any(line.items() <= other.items() for other in done):
                    continue
                if (aim := line["aim"]) is None:
                    at_rate = replace(config, optimizer=replace(config.optimizer, lr=line["lr"]))
                    line |= fork.measure(*fork.step(at_rate, rollout, signal)) | {"matched": None}
                else:
                    line |= fork.move(config, rollout, signal, aim, rates.get((name, aim), config.optimizer.lr))
                    if line["matched"]:
                        rates[name, aim] = line["lr"]
                yield line | {"reward_before": fork.before[0].mean(), "correct_before": fork.before[1].mean()}
    run.learner.policy.load_state_dict(fork.weights)
    run.generators.load_state_dict(generators)
    run.stream.seek(position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--rollouts", nargs="+", type=int, required=True, help="checkpoints: after so many rollouts")
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--kl", nargs="+", type=float, default=[], help="aims, in nats per token")
    parser.add_argument("--lr", nargs="+", type=float, default=[], help="learning rates, whatever the movement")
    parser.add_argument("--surrogates", nargs="+", required=True, metavar="SURROGATE")
    parser.add_argument("--problems", type=int, default=2000, help="that improvement is measured on")
    parser.add_argument("--held-out", type=int, default=256, help="prompts that movement is measured on")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    done, rates = read_jsonl(args.output), {}
    for folder in args.runs:
        for rollouts, run, policies in checkpoints(folder, args.rollouts, args.lags):
            for line in forks(run, policies, args, {"run": folder.name, "rollouts": rollouts}, done, rates):
                append_jsonl(args.output, line)


if __name__ == "__main__":
    main()
