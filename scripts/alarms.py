"""Which alarm says that a run on stale rollouts will collapse, and is acting on it better than acting at another time?

    python scripts/alarms.py watch runs/a runs/b --output watch.jsonl
    python scripts/alarms.py fork runs/a runs/b --watch watch.jsonl --output forks.jsonl

``watch`` makes each run again from its config.yaml. After each of its updates (all steps on one rollout) it writes the
policy's ``reward`` on problems that the run does not draw, sampled as in training, always with the same random numbers;
and the alarms, which are known before the next update. On the stale rollout that is next: the effective sample sizes
(sum w)^2 / (n sum w^2) of whole completions' ratios to the policy that drew them (``ess_sequence``) and of tokens'
(``ess_token``); ``kl`` in nats per token and ``entropy`` of the policy at its tokens; ``cosine`` of its gradient and of
that of FRESH on-policy rollouts of its prompts. scripts/alarm_tables.py judges them.

``fork`` makes each run again and treats it at its alarm: the first update from FROM on at which its ess_sequence is in
the lowest quarter of the method's runs at that update. For comparison it treats it at the alarm of the next run of the
method that has one (``exchanged``: the same times, told by another run), and at a random update. From there on rollouts
are on time, or the learning rate is a third, or Adam's moments are new. A line has the final reward. What is in the
files already is not done again.
"""

import argparse
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from equal_movement import Fork, replay
from gradient_bias import gradient
from torch import Tensor

from pspo.model import token_logprobs
from pspo.cli.files import append_jsonl, read_config, read_jsonl
from pspo.run.run import Run

AHEAD, FRESH, FROM = 5, 4, 3
TREATMENTS = ["on time", "lr / 3", "new moments"]


def effective_sample_size(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2), of weights (n,)."""
    weights = (log_weights.double() - log_weights.max()).exp()
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def alarms(fork: Fork, drew: dict[str, Tensor]) -> dict[str, float]:
    """The alarms at the rollout that is trained on next, which the policy ``drew`` has drawn."""
    run, logprobs = fork.run, []
    experience = run.delay.waiting[0]
    rollout, mask = experience.rollout, experience.rollout.loss_mask  # (B, T)
    for policy in (drew, fork.weights):
        fork.policy.load_state_dict(policy)
        with torch.no_grad():
            how = (run.config.rollout.temperature, None, True)
            of_policy, entropies = token_logprobs(fork.policy, *rollout.token_ids, *how)
        logprobs.append(of_policy.where(mask, 0.0))
    log_r = logprobs[1] - logprobs[0]
    stale = gradient(fork, replace(rollout, behaviour_logprobs=logprobs[0]), experience.advantages, run.config)
    prompts, fresh = run.stream.prompts.take(experience.prompts), np.zeros_like(stale)
    for _ in range(FRESH):
        fork.seed += 1_000_000
        fresh += gradient(fork, *fork.stale(fork.weights, experience.prompts, prompts), run.config)
    return {
        "ess_sequence": effective_sample_size(log_r.sum(dim=1)),
        "ess_token": effective_sample_size(log_r[mask]),
        "kl": float((torch.expm1(log_r) - log_r)[mask].mean()),
        "entropy": float(entropies[mask].mean()),
        "cosine": float(stale @ fresh / max(np.linalg.norm(stale) * np.linalg.norm(fresh), 1e-30)),
    }


def watch(run: Run, policies: deque[dict[str, Tensor]], problems: int, last: bool) -> dict[str, float]:
    """Reward of a run's policy, and unless it is the last the alarms; the run goes on as if nothing had happened."""
    generators, fork = run.generators.state_dict(), Fork(run, problems, 1, run.config.run.seed)
    found = {"reward": float(fork.before[0].mean())} | ({} if last else alarms(fork, policies[0]))
    run.learner.policy.load_state_dict(fork.weights)
    run.generators.load_state_dict(generators)
    return found


def treat(run: Run, treatment: str) -> None:
    """Change how a run goes on."""
    learner = run.learner
    if treatment == "on time":
        run.config = run.delay.config = replace(run.config, rollout=replace(run.config.rollout, lag=0))
        run.delay.load_state_dict(run.delay.state_dict())  # drops the rollouts that wait
    elif treatment == "lr / 3":
        learner.scheduler.base_lrs = [lr / 3 for lr in learner.scheduler.base_lrs]
        for group in learner.optimizer.param_groups:
            group["lr"] /= 3
    else:
        learner.optimizer.state.clear()


def describe(folder: Path) -> tuple[dict[str, str], int, int]:
    """A run's name and method, its updates and its lag."""
    config = read_config(folder / "config.yaml")
    algorithm, rollout = config["algorithm"], config["rollout"]
    surrogate, model = algorithm["surrogate"]["class_path"].rpartition(".")[2], Path(config["model"]["name_or_path"])
    updates = config["run"]["max_steps"] // (algorithm["epochs"] * algorithm["minibatches"])
    name = f"{model.name} {surrogate}"
    return {"run": f"{name} {config['run']['seed']}", "method": name}, updates, rollout["lag"]


def fork_times(lines: pd.DataFrame) -> pd.DataFrame:
    """By run with an alarm, the updates of its forks: alarm, exchanged and random."""
    quarter = lines.groupby(["method", "update"])["ess_sequence"].transform("quantile", 0.25)
    low = lines[(lines["ess_sequence"] <= quarter) & (lines["update"] >= FROM)]
    times = low.groupby(["method", "run"], sort=False)["update"].min().rename("alarm").reset_index("method")
    times["exchanged"] = times.groupby("method", sort=False)["alarm"].transform(lambda of: np.roll(of, -1))
    random = np.random.default_rng(0).integers(FROM, lines["update"].max() - AHEAD, len(times))
    return times.assign(random=random)


def forks(folder: Path, run_lines: dict, times: pd.Series, problems: int, done: set[tuple]) -> Iterator[dict]:
    """The lines of one run: its final reward after each treatment, at each of its times."""
    _, updates, _ = describe(folder)
    for update in sorted(set(times)):
        for treatment in TREATMENTS:
            line = run_lines | {"update": int(update), "treatment": treatment}
            if tuple(line.values()) not in done:
                for at, run, _ in replay(folder, updates, keep=1):
                    if at == update:
                        treat(run, treatment)
                yield line | {"reward": float(Fork(run, problems, 1, run.config.run.seed).before[0].mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("watch", "fork"):
        command = commands.add_parser(name)
        command.add_argument("runs", nargs="+", type=Path, metavar="RUN")
        command.add_argument("--problems", type=int, default=256, help="that rewards are measured on")
        command.add_argument("--output", type=Path, required=True)
    command.add_argument("--watch", type=Path, required=True, dest="lines", help="of all runs")
    args = parser.parse_args()
    written = read_jsonl(args.output)
    for folder in args.runs:
        names, updates, lag = describe(folder)
        if args.command == "watch":
            have = {of["update"] for of in written if of["run"] == names["run"]}
            for update, run, policies in replay(folder, updates if len(have) < updates else 0, lag + 1):
                if update not in have:
                    found = watch(run, policies, args.problems, update == updates)
                    append_jsonl(args.output, names | {"update": update} | found)
        else:
            times = fork_times(pd.DataFrame(read_jsonl(args.lines)))
            done = {tuple(of[key] for key in ("run", "method", "update", "treatment")) for of in written}
            if names["run"] in times.index:
                when = times.loc[names["run"], ["alarm", "exchanged", "random"]]
                for line in forks(folder, names, when, args.problems, done):
                    append_jsonl(args.output, line)


if __name__ == "__main__":
    main()
