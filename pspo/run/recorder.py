"""Recorder: counts what a run has used, and writes a line of metrics and a few samples for every rollout."""

import contextlib
import math
import time
from collections.abc import Iterator
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.files import append_text, to_jsonl
from pspo.cli.progress import Bar
from pspo.config import TrainConfig
from pspo.environments import transcripts
from pspo.rollout import Experience, Prompts
from pspo.run.folders import RunFailed, newest_checkpoint, writing
from pspo.run.learner import Learner
from pspo.run.metrics import rollout_metrics, sample, status
from pspo.run.tokens import TokenRecord, write_tokens
from pspo.run.trackers import Tracker

STATE = ("tokens", "skipped", "first_step", "line", "samples", "steps", "seconds")


class Recorder:
    """Counts and records; knows nothing of the algorithm.

    Attributes:
        tokens: prompt and completion tokens of the rollouts that were trained on.
        skipped: consecutive optimizer steps skipped up to now.
        first_step: optimizer steps before the rollout that is being recorded.
        line: its line of metrics, open until `write`; {} between rollouts. Only rank 0's has statistics.
    """

    def __init__(
        self, config: TrainConfig, learner: Learner, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, output: Path
    ) -> None:
        self.config, self.learner, self.tokenizer, self.prompts = config, learner, tokenizer, prompts
        self.output, self.began = output, time.perf_counter()
        self.tokens, self.skipped, self.first_step = 0, 0, 0
        groups, group_size = config.rollout.prompts // dist.world_size(), config.rollout.group_size
        recorded = min(max(config.run.record_tokens - groups * dist.rank(), 0), groups)  # of this rank's
        learner.record = TokenRecord(recorded * group_size)
        self._clear()

    def _clear(self) -> None:
        self.line: dict[str, Any] = {}
        self.samples = ""  # lines of samples.jsonl
        self.steps: list[dict[str, float]] = []
        self.seconds: dict[str, float] = {}  # by phase of the rollout

    def start(self, tracker: Tracker) -> Bar:
        """Begin to track, and to show progress in the bar that is returned."""
        recorded = self.first_step if self.line else self.learner.steps
        self.tracker, self.started_at = tracker, recorded
        steps = {"total": self.config.run.max_steps, "initial": recorded}
        self.bar = Bar(desc="step", unit="step", quiet=self.config.run.quiet or not dist.is_main(), **steps)
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
        """True if the rollout's steps have crossed a multiple of ``every``, or were the last; 0 is at the end alone."""
        return self.limit_reached or (every > 0 and self.first_step // every < self.learner.steps // every)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the rollout, for its line of metrics."""
        self.bar.set_description_str(f"step, {name}")
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def begin_line(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Count a rollout that was trained on, begin its line (statistics of all ranks' rows), and write its tokens."""
        self.steps, self.first_step = steps, self.learner.steps - len(steps)
        self.tokens += sum(dist.gather_objects(experience.drawn_tokens))
        self.line = {"step": self.learner.steps, "tokens": self.tokens}
        run, group_size = self.config.run, self.config.rollout.group_size
        visits = self.learner.record.take(self.tokenizer, experience, group_size)
        by_rank = dist.gather_on_main((experience.drawn_rewards, self._rows(experience), visits))
        if not dist.is_main():
            return
        drawn_rewards, rows, visits = zip(*by_rank, strict=True)
        names = dict.fromkeys(chain(*rows))  # what rewards log may differ from rank to rank
        rows = {name: list(chain(*(part.get(name, [None] * len(part["text"])) for part in rows))) for name in names}
        rows["problem"] = [self.prompts.problems[i] for i in rows["index"]]
        drawn_rewards = list(chain(*drawn_rewards)) if self.config.rollout.resample else None
        self.line |= rollout_metrics(rows, drawn_rewards) | steps[-1]  # the most off-policy one
        self.line["steps_skipped"] = sum(step["step_skipped"] for step in steps)
        recorded = min(max(run.samples, run.record_tokens) * group_size, len(rows["reward"]))
        self.samples = to_jsonl(sample(rows, row, self.learner.steps, group_size) for row in range(recorded))
        with writing(f"cannot write into {self.output}", self.output):
            write_tokens(self.output, self.learner.steps, visits)

    def _rows(self, experience: Experience) -> dict[str, list[Any]]:
        """By name a value for each row of this rank."""
        rollout, group_size = experience.rollout, self.config.rollout.group_size
        rows = {
            "index": [i for i in experience.prompts for _ in range(group_size)],
            "text": rollout.texts, "episode": transcripts(self.tokenizer, rollout),
            "reward": experience.rewards.tolist(), "advantage": experience.row_advantages,
            "tokens": rollout.loss_mask.sum(dim=1).tolist(), "truncated": (~rollout.terminated).tolist(),
        }  # fmt: skip
        rows |= {f"reward/{name}": values for name, values in experience.rewards_by_name.items()}
        rows |= {f"logged/{name}": values for name, values in experience.logged.items()}
        return rows | ({} if rollout.sampled_mask is None else {"turns": rollout.turns.tolist()})

    def write(self, best: dict[str, Any]) -> None:
        """Write and show the rollout's line, and samples; RunFailed after --optimizer.max_skipped skipped in a row."""
        self.line |= {f"seconds/{phase}": round(spent, 4) for phase, spent in self.seconds.items()}
        if dist.is_main():
            with writing(f"cannot write into {self.output}", self.output):
                append_text(self.output / "metrics.jsonl", to_jsonl([self.line]))
                append_text(self.output / "samples.jsonl", self.samples)
            self.tracker.log(self.line, self.samples)
            always = self.first_step == self.started_at or self.limit_reached or self.line["steps_skipped"] > 0
            shown = status(self.line, len(self.steps), best, newest_checkpoint(self.output))
            self.bar.advance(len(self.steps), shown, always)
        steps = self.steps
        self._clear()
        for step in steps:
            self.skipped = self.skipped + 1 if step["step_skipped"] else 0
            if self.skipped >= self.config.optimizer.max_skipped:
                raise RunFailed(
                    f"{self.skipped} optimizer steps in a row were skipped: loss ({step['loss']}), gradient (norm "
                    f"{step['grad_norm']}) or log-probs were not finite. The weights are unchanged; last checkpoint: "
                    f"{newest_checkpoint(self.output)}. Lower --optimizer.lr, or check the reward and the surrogate"
                )

    def state_dict(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in STATE} | {"elapsed": self.elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.began = time.perf_counter() - state["elapsed"]
        for name in STATE:
            setattr(self, name, state[name])
