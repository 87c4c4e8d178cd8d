"""Recorder: counts what a run has used, and writes a line of metrics and a few samples for every rollout."""

import importlib
import math
import secrets
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.parse import Changes, Settings
from pspo.config import TrainConfig
from pspo.environments import transcripts
from pspo.errors import RunFailed
from pspo.files import append_jsonl, checkpoints, write_errors
from pspo.rollout import Experience, Prompts
from pspo.rollout.types import trained_rows
from pspo.tasks import Problem, matches_format
from pspo.terminal import Bar, clip, print_timed
from pspo.token_table import TOKENS, write_tokens
from pspo.update.learner import Learner
from pspo.update.tokens import TokenRecord

MAX_SKIPPED = 10  # skipped optimizer steps in a row, at which the run fails
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}  # by tracker


@dataclass
class OpenRollout:
    """A rollout from its drawing until its line is written; a validation may come in between."""

    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    steps: list[dict[str, float]] = field(default_factory=list)  # metrics of its optimizer steps, once taken
    line: dict[str, Any] = field(default_factory=dict)  # for metrics.jsonl, begun then; rank 0's has statistics
    samples: list[dict[str, Any]] = field(default_factory=list)  # for samples.jsonl


@dataclass
class Recorder:
    """Counts the tokens and time of a run, and writes and shows its rollouts."""

    config: TrainConfig
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts  # training prompts
    output: Path
    began: float = field(default_factory=time.perf_counter)
    tokens: int = 0  # of prompts and completions of the rollouts that were trained on
    skipped: int = 0  # optimizer steps skipped in a row, up to now
    rollout: OpenRollout = field(default_factory=OpenRollout)
    bar: Bar = field(init=False)  # `start` sets bar and tracker
    tracker: Any = field(init=False)
    failures: dict[str, str] = field(default_factory=dict)  # each reward's first error in this process, in one line

    def __post_init__(self) -> None:
        n = self.config.run.record_tokens
        if n > 0:
            groups = self.config.rollout.prompts // dist.world_size()
            left = max(n - groups * dist.rank(), 0)  # minus the groups of lower ranks
            self.learner.record = TokenRecord(min(left, groups) * self.config.rollout.group_size)

    def start(self, settings: Settings) -> Bar:
        """Begin to track and to show progress; returns the progress bar."""
        run = self.config.run
        quiet = run.quiet or not dist.is_main()
        self.bar = Bar(desc="step", unit="step", quiet=quiet, total=run.max_steps, initial=self.first_step)
        has_tracker = dist.is_main() and run.tracker != "none"
        self.tracker = start_tracker(run.tracker, self.output, settings, self.learner.steps) if has_tracker else None
        return self.bar

    @property
    def elapsed(self) -> float:
        """Seconds of training and evaluating, including those before a resume."""
        return time.perf_counter() - self.began

    @property
    def first_step(self) -> int:
        """Optimizer steps before the open rollout's."""
        return self.learner.steps - len(self.rollout.steps)

    @property
    def limit_reached(self) -> bool:
        run = self.config.run
        return self.learner.steps >= run.max_steps or self.tokens >= (run.max_tokens or math.inf)

    def is_due(self, every: int) -> bool:
        """True if the rollout's steps crossed a multiple of ``every``, or ended the run; for 0 only at the end."""
        return self.limit_reached or (every > 0 and self.first_step // every < self.learner.steps // every)

    def record(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Count a rollout that was trained on, begin its line (statistics over all ranks), and write its tokens."""
        self.tokens += sum(dist.gather_objects(experience.drawn_tokens or experience.rollout.tokens))
        self.rollout.steps = steps
        line = self.rollout.line = {"step": self.learner.steps, "tokens": self.tokens}
        rows = dist.gather_on_main(make_rows(experience, self.config, self.tokenizer))
        drawn_rewards = dist.gather_on_main(experience.drawn_rewards or experience.rewards.tolist())
        if dist.is_main():
            line |= rollout_metrics(rows, self.prompts.problems) | steps[-1]  # the last step is the most off-policy one
            line["steps_skipped"] = sum(step["step_skipped"] for step in steps)
            line["grad_norm_max"] = float(np.max([step["grad_norm"] for step in steps]))  # NaN if one is
            if self.config.rollout.resample > 0:
                line["resampled_share"] = len(drawn_rewards) / len(rows) - 1
                line["reward_drawn"] = float(np.mean(known(drawn_rewards)))
        if self.config.run.record_tokens > 0:
            self.record_samples(experience, rows)

    def record_samples(self, experience: Experience, rows: list[dict[str, Any]]) -> None:
        """Keep the first groups' completions for ``samples.jsonl``; write what the steps computed at their tokens."""
        group_size = self.config.rollout.group_size
        visits = dist.gather_on_main([self.learner.record.take(self.tokenizer, experience, group_size)])
        if dist.is_main():
            for i, row in enumerate(rows[: self.config.run.record_tokens * group_size]):
                record = {"step": self.learner.steps, "problem": row["problem"], "sample": i % group_size}
                record |= self.prompts.record(row["problem"])
                names = ("completion", "reward", "advantage", "tokens", "truncated", "rewards", "logged")
                record |= {name: row[name] for name in names if name != "logged" or row["logged"]}
                self.rollout.samples.append(record)
            with write_errors(self.output / TOKENS):
                write_tokens(self.output, self.learner.steps, visits)

    def write(self) -> None:
        """Write and show the rollout's line, and samples; RunFailed after too many skipped steps in a row."""
        rollout = self.rollout
        rollout.line |= {f"seconds/{phase}": round(spent, 4) for phase, spent in rollout.seconds.items()}
        if dist.is_main():
            with write_errors(self.output / "metrics.jsonl"):
                append_jsonl(self.output / "metrics.jsonl", rollout.line)
                append_jsonl(self.output / "samples.jsonl", *rollout.samples)
            self.show(rollout)
        self.rollout = OpenRollout()
        for step in rollout.steps:
            self.skipped = self.skipped + 1 if step["step_skipped"] else 0
            if self.skipped >= MAX_SKIPPED:
                newest = next(iter(checkpoints(self.output)), "none yet")
                raise RunFailed(
                    f"{self.skipped} optimizer steps in a row were skipped: loss ({step['loss']}) or gradient norm "
                    f"({step['grad_norm']}) were not finite; lower --optimizer.lr; last checkpoint: {newest}"
                )

    def show(self, rollout: OpenRollout) -> None:
        """Show the rollout's line in tracker and progress bar, and the first sample where it is notable."""
        line = rollout.line
        if self.tracker is not None:
            metrics = {name: value for name, value in line.items() if name != "step" and math.isfinite(value)}
            self.tracker.log(metrics, step=line["step"])
        is_notable = self.first_step == self.bar.first or self.limit_reached
        if rollout.samples and (is_notable or "validation_reward" in line):
            sample = rollout.samples[0]
            text = f"sample  {clip(sample['completion'], 120)}  (reward {sample['reward']:.2f})"
            print_timed(text, self.config.run.quiet)
        self.bar.advance(len(rollout.steps), status(line, len(rollout.steps)), is_notable)

    def finish(self) -> None:
        """Close the tracker."""
        if self.tracker is not None:
            self.tracker.finish()

    def state_dict(self) -> dict[str, Any]:
        counts = {"tokens": self.tokens, "skipped": self.skipped, "elapsed": self.elapsed}
        return counts | deepcopy(vars(self.rollout))

    def fork_state(self, state: dict[str, Any], changes: Changes) -> dict[str, Any]:
        """Return a parent's counts, without a rollout that the parent had not validated yet."""
        return state | vars(OpenRollout())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]
        self.skipped = state["skipped"]
        self.began = time.perf_counter() - state["elapsed"]
        self.rollout = OpenRollout(*(state[part.name] for part in fields(OpenRollout)))


def make_rows(experience: Experience, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """What is recorded of each of this rank's completions that were trained on."""
    rollout = experience.rollout
    columns = {
        "problem": [i for i in experience.prompt_indices for _ in range(config.rollout.group_size)],
        "text": rollout.texts,
        "completion": transcripts(tokenizer, rollout),
        "reward": experience.rewards.tolist(),  # NaN if unknown
        "advantage": experience.row_advantages,
        "trained": trained_rows(rollout, experience.advantages, config.algorithm).tolist(),
        "tokens": rollout.loss_mask.sum(dim=1).tolist(),
        "truncated": (~rollout.terminated).tolist(),
        "rewards": by_row(experience.rewards_by_name, len(rollout)),  # by reward function
        "logged": by_row(experience.logged, len(rollout)),
    }
    if rollout.sampled_mask is not None:
        columns["turns"] = rollout.turns.tolist()
    return by_row(columns, len(rollout))


def by_row(columns: dict[str, list[Any]], n: int) -> list[dict[str, Any]]:
    """Values by name of each of n rows."""
    return [{name: values[row] for name, values in columns.items()} for row in range(n)]


def rollout_metrics(rows: list[dict[str, Any]], problems: Sequence[Problem]) -> dict[str, float]:
    """Statistics of one rollout from its B rows; unknown rewards (NaN) are left out of the means."""
    column = {name: [row[name] for row in rows] for name in rows[0]}
    metrics = {"reward": np.mean(known(column["reward"])), "reward_std": np.std(known(column["reward"]))}
    for name in rows[0]["rewards"]:
        metrics[f"reward/{name}"] = np.mean(known([rewards[name] for rewards in column["rewards"]]))
    metrics["reward_unknown_share"] = np.isnan(column["reward"]).mean()
    metrics["empty_share"] = np.mean([not text.strip() for text in column["text"]])
    metrics["trained_share"] = np.mean(column["trained"])
    metrics["zero_advantage_share"] = np.equal(column["advantage"], 0).mean()
    metrics["completion_tokens"] = np.mean(column["tokens"])
    metrics["completion_tokens_max"] = max(column["tokens"])
    metrics["truncated_share"] = np.mean(column["truncated"])
    if "turns" in column:
        metrics["turns"] = np.mean(column["turns"])
    formats = [matches_format(row["text"]) for row in rows if isinstance(problems[row["problem"]].answer, Fraction)]
    if formats:
        metrics["format_share"] = np.mean(formats)
    for name in dict.fromkeys(chain(*column["logged"])):  # names differ by rank
        numbers = [logged[name] for logged in column["logged"] if isinstance(logged.get(name), int | float)]
        if numbers:
            metrics[f"logged/{name}"] = np.mean(numbers)
    return {name: float(value) for name, value in metrics.items()}


def known(values: list[float]) -> list[float]:
    """The values without NaN; a single NaN if no other value is left."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def status(line: dict[str, Any], steps: int) -> str:
    """A few numbers of a rollout's line, for the progress bar or a log."""
    seconds = sum(line[f"seconds/{phase}"] for phase in ("generate", "reward", "train"))
    return (
        f"reward {line['reward']:.3f}  loss {line['loss']:.4f}  kl {line['kl_old_new']:.2g}  "
        f"grad {line['grad_norm']:.2g}  entropy {line['entropy']:.2g}  tokens {line['completion_tokens']:.0f}  "
        f"truncated {line['truncated_share']:.0%}  {seconds / steps:.1f} s/step"
    )


class TensorBoard:
    """Gives tensorboard's writer the methods of the other trackers."""

    def __init__(self, writer: Any):
        self.writer = writer
        self.finish = writer.close

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


def start_tracker(name: str, folder: Path, config: dict[str, Any], step: int) -> Any:
    """Start a tracker and return an object with `log(metrics, step)` and `finish()`: for wandb and trackio, the module.

    The run is named as its folder. Resumed, it continues its curves after ``step``: wandb by an id, trackio by name.
    """
    module = importlib.import_module(MODULES[name])
    if name == "tensorboard":
        return TensorBoard(module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1))
    if name == "wandb":
        file = folder / "wandb-id"
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        arguments = {"resume": "allow", "id": file.read_text(), "dir": str(folder)}
    else:
        arguments = {"resume": "allow" if step else "never"}
    module.init(project="pspo", name=folder.resolve().name, config=config, **arguments)
    return module
