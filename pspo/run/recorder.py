"""Recorder: counts what a run has used, and writes a line of metrics and a few samples for every rollout."""

import math
import sys
import time
from collections.abc import Sequence
from copy import copy
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.settings import Changes, Settings
from pspo.config import TrainConfig
from pspo.environments import transcripts
from pspo.errors import RunFailed
from pspo.files import append_jsonl, checkpoints, read_jsonl, write_errors
from pspo.rollout import Experience, Prompts
from pspo.rollout.types import trained_rows
from pspo.run.trackers import start_tracker
from pspo.tasks import Problem, matches_format
from pspo.terminal import Bar, clip, print_timed
from pspo.token_table import TOKENS, write_tokens
from pspo.update.learner import Learner
from pspo.update.tokens import TokenRecord

STATE = ("tokens", "skipped", "first_step", "line", "samples", "steps", "seconds")
MAX_SKIPPED = 10  # optimizer steps in a row


class Row(NamedTuple):
    """A completion that was trained on, and what is recorded of it."""

    problem: int  # among the training problems
    text: str
    reward: float  # NaN if unknown
    advantage: float
    trained: bool
    tokens: int
    truncated: bool
    turns: int | None  # of an episode
    rewards: dict[str, float]  # by function
    logged: dict[str, Any]  # by functions


class Recorder:
    """Counts and records; ``failures`` holds the first of each reward that failed in this process, in one line."""

    def __init__(
        self, config: TrainConfig, learner: Learner, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, output: Path
    ) -> None:
        self.config = config
        self.learner = learner
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.output = output
        self.began = time.perf_counter()
        self.tokens = 0  # prompts' and completions', of the rollouts that were trained on
        self.skipped = 0  # optimizer steps in a row, up to now
        self.first_step = 0  # optimizer steps before the rollout that is being recorded
        self.failures: dict[str, str] = {}
        self.clear_line()
        if config.run.record_tokens > 0:
            groups = config.rollout.prompts // dist.world_size()
            left = max(config.run.record_tokens - groups * dist.rank(), 0)  # after those of the ranks before
            learner.record = TokenRecord(min(left, groups) * config.rollout.group_size)

    def clear_line(self) -> None:
        self.line: dict[str, Any] = {}  # of metrics, open until `write`; rank 0's has statistics
        self.samples: list[dict[str, Any]] = []  # for samples.jsonl
        self.steps: list[dict[str, float]] = []  # metrics of the optimizer steps
        self.seconds: dict[str, float] = {}  # by phase

    def start(self, settings: Settings) -> Bar:
        """Begin to track, and to show progress in the bar that is returned."""
        run = self.config.run
        first = self.first_step if self.line else self.learner.steps
        quiet = run.quiet or not dist.is_main()
        self.bar = Bar(desc="step", unit="step", quiet=quiet, total=run.max_steps, initial=first)
        has_tracker = dist.is_main() and run.tracker != "none"
        self.tracker = start_tracker(run.tracker, self.output, settings, self.learner.steps) if has_tracker else None
        return self.bar

    @property
    def elapsed(self) -> float:
        """Seconds of training and evaluating, those before a resume included."""
        return time.perf_counter() - self.began

    @property
    def limit_reached(self) -> bool:
        run = self.config.run
        return self.learner.steps >= run.max_steps or self.tokens >= (run.max_tokens or math.inf)

    def is_due(self, every: int) -> bool:
        """True if the rollout's steps crossed a multiple of ``every``, or ended the run; with 0 at the end only."""
        return self.limit_reached or (every > 0 and self.first_step // every < self.learner.steps // every)

    def record(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Count a rollout that was trained on, begin its line (statistics of all ranks' rows), and write its tokens."""
        self.steps = steps
        self.first_step = self.learner.steps - len(steps)
        self.tokens += sum(dist.gather_objects(experience.drawn_tokens or experience.rollout.tokens))
        self.line = {"step": self.learner.steps, "tokens": self.tokens}
        rows = dist.gather_on_main(make_rows(experience, self.config))
        drawn_rewards = dist.gather_on_main(experience.drawn_rewards or experience.rewards.tolist())
        if dist.is_main():
            self.line |= rollout_metrics(rows, self.prompts.problems) | steps[-1]  # the most off-policy step
            self.line["steps_skipped"] = sum(step["step_skipped"] for step in steps)
            if self.config.rollout.resample > 0:
                self.line["resampled_share"] = len(drawn_rewards) / len(rows) - 1
                self.line["reward_drawn"] = mean_of_known(drawn_rewards)
        if self.config.run.record_tokens > 0:
            self.record_samples(experience, rows)

    def record_samples(self, experience: Experience, rows: list[Row]) -> None:
        """Keep the first groups' completions for ``samples.jsonl``; write what the steps computed at their tokens."""
        group_size = self.config.rollout.group_size
        visits = dist.gather_on_main([self.learner.record.take(self.tokenizer, experience, group_size)])
        completions = dist.gather_on_main(transcripts(self.tokenizer, experience.rollout))
        if dist.is_main():
            n = self.config.run.record_tokens * group_size
            for i, (row, completion) in enumerate(zip(rows[:n], completions[:n], strict=True)):
                record = {"step": self.learner.steps, "problem": row.problem, "sample": i % group_size}
                record |= self.prompts.record(row.problem) | {"completion": completion}
                names = ("reward", "advantage", "tokens", "truncated", "rewards", "logged")
                record |= {name: getattr(row, name) for name in names if name != "logged" or row.logged}
                self.samples.append(record)
            with write_errors(self.output / TOKENS):
                write_tokens(self.output, self.learner.steps, visits)

    def write(self) -> None:
        """Write and show the rollout's line, and samples; RunFailed after too many skipped steps in a row."""
        for phase, spent in self.seconds.items():
            self.line[f"seconds/{phase}"] = round(spent, 4)
        if dist.is_main():
            with write_errors(self.output / "metrics.jsonl"):
                append_jsonl(self.output / "metrics.jsonl", self.line)
                append_jsonl(self.output / "samples.jsonl", *self.samples)
            if self.tracker is not None:
                metrics = {name: value for name, value in self.line.items() if name != "step" and math.isfinite(value)}
                self.tracker.log(metrics, step=self.line["step"])
            is_notable = self.first_step == self.bar.first or self.limit_reached
            if self.samples and (is_notable or "validation_reward" in self.line):
                sample = self.samples[0]
                text = f"sample  {clip(sample['completion'], 120)}  (reward {sample['reward']:.2f})"
                print_timed(text, self.config.run.quiet)
            self.bar.advance(len(self.steps), status(self.line, len(self.steps)), is_notable)
        for step in self.steps:
            self.skipped = self.skipped + 1 if step["step_skipped"] else 0
            if self.skipped >= MAX_SKIPPED:
                newest = next(iter(checkpoints(self.output)), "none yet")
                raise RunFailed(
                    f"{self.skipped} optimizer steps in a row were skipped: loss ({step['loss']}) or gradient norm "
                    f"({step['grad_norm']}) were not finite; lower --optimizer.lr; last checkpoint: {newest}"
                )
        self.clear_line()

    def finish(self) -> None:
        """Warn if every advantage was 0; close the tracker."""
        lines = read_jsonl(self.output / "metrics.jsonl")
        if self.config.reward.functions and all(line["zero_advantage_share"] == 1 for line in lines):
            print("WARNING: every advantage was 0, as where all rewards of a group are equal", file=sys.stderr)
        if self.tracker is not None:
            self.tracker.finish()

    def state_dict(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in STATE} | {"elapsed": self.elapsed}

    def fork_state(self, state: dict[str, Any], changes: Changes) -> dict[str, Any]:
        """A parent's counts, without the line of a rollout that it was yet to validate."""
        return state | {"line": {}, "samples": [], "steps": [], "seconds": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.began = time.perf_counter() - state["elapsed"]
        for name in STATE:
            setattr(self, name, state[name])


def make_rows(experience: Experience, config: TrainConfig) -> list[Row]:
    """The rows of this rank's rollout."""
    rollout = experience.rollout
    columns = {
        "problem": [i for i in experience.prompt_indices for _ in range(config.rollout.group_size)],
        "text": rollout.texts,
        "reward": experience.rewards.tolist(),
        "advantage": experience.row_advantages,
        "trained": trained_rows(rollout, experience.advantages, config.algorithm).tolist(),
        "tokens": rollout.loss_mask.sum(dim=1).tolist(),
        "truncated": (~rollout.terminated).tolist(),
        "turns": [None] * len(rollout) if rollout.sampled_mask is None else rollout.turns.tolist(),
        "rewards": by_row(experience.rewards_by_name, len(rollout)),
        "logged": by_row(experience.logged, len(rollout)),
    }
    return [Row(**row) for row in by_row(columns, len(rollout))]


def by_row(columns: dict[str, list[Any]], n: int) -> list[dict[str, Any]]:
    """Values by name of each of n rows."""
    return [{name: values[row] for name, values in columns.items()} for row in range(n)]


def rollout_metrics(rows: list[Row], problems: Sequence[Problem]) -> dict[str, float]:
    """Statistics of one rollout from its B rows; unknown rewards (NaN) are left out of the means."""
    rewards = [row.reward for row in rows]
    metrics = {"reward": mean_of_known(rewards), "reward_std": np.std(drop_nan(rewards))}
    for name in rows[0].rewards:
        metrics[f"reward/{name}"] = mean_of_known([row.rewards[name] for row in rows])
    metrics["reward_unknown_share"] = np.isnan(rewards).mean()
    metrics["empty_share"] = np.mean([not row.text.strip() for row in rows])
    metrics["trained_share"] = np.mean([row.trained for row in rows])
    metrics["zero_advantage_share"] = np.mean([row.advantage == 0 for row in rows])
    metrics["completion_tokens"] = np.mean([row.tokens for row in rows])
    metrics["completion_tokens_max"] = max(row.tokens for row in rows)
    metrics["truncated_share"] = np.mean([row.truncated for row in rows])
    if rows[0].turns is not None:
        metrics["turns"] = np.mean([row.turns for row in rows])
    formats = [matches_format(row.text) for row in rows if isinstance(problems[row.problem].answer, Fraction)]
    if formats:
        metrics["format_share"] = np.mean(formats)
    for name in dict.fromkeys(chain(*(row.logged for row in rows))):  # which differ by rank
        numbers = [row.logged[name] for row in rows if isinstance(row.logged.get(name), int | float)]
        if numbers:
            metrics[f"logged/{name}"] = np.mean(numbers)
    return {name: float(value) for name, value in metrics.items()}


def drop_nan(values: list[float]) -> list[float]:
    """The values without NaN; a single NaN if there is nothing else."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def mean_of_known(values: list[float]) -> float:
    """Mean of the values that are not NaN."""
    return float(np.mean(drop_nan(values)))


def status(line: dict[str, Any], steps: int) -> str:
    """A rollout's line in a few numbers, for the progress bar or a log."""
    seconds = sum(line[f"seconds/{phase}"] for phase in ("generate", "reward", "train"))
    return (
        f"reward {line['reward']:.3f}  loss {line['loss']:.4f}  kl {line['kl_old_new']:.2g}  "
        f"grad {line['grad_norm']:.2g}  entropy {line['entropy']:.2g}  tokens {line['completion_tokens']:.0f}  "
        f"truncated {line['truncated_share']:.0%}  {seconds / steps:.1f} s/step"
    )
