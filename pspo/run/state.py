"""The state of a training run: everything around the algorithm that `pspo.train.train` moves forward."""

import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.engines import EngineError
from pspo.model import fill_adapters, has_adapters, load_policy
from pspo.rollout import Drawing, Experience, Prompts, Rollout, Sampling, generate, prompt_order, sampling_context
from pspo.run.card import model_card
from pspo.run.checkpoint import (
    Progress,
    RunFailed,
    checkpoints,
    random_state,
    save_checkpoint,
    save_model,
    writing,
)
from pspo.run.evaluation import evaluate
from pspo.run.failures import UserCodeFailed, fail_together
from pspo.run.progress import Bar
from pspo.run.records import append_jsonl, describe_changes, read_jsonl, to_jsonl, write_json, write_text
from pspo.run.results import Evaluation
from pspo.run.signals import Stopped, StopSignals
from pspo.run.trackers import Tracker
from pspo.tasks import matches_format
from pspo.tasks.failures import FIRST_FAILURES, RewardError
from pspo.update import Learner


@dataclass
class Run:
    """A run, as `pspo.run.prepare.prepare` makes it, new or resumed."""

    config: TrainConfig
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    prompts: dict[str, Prompts]  # by split: train, validation, test
    output: Path  # the run's folder,
    lock: contextlib.ExitStack  # and what holds it while the run is open
    progress: Progress  # the part of the state that checkpoints hold,
    stateful: dict[str, Any]  # with optimizer and schedule by name
    tracker: Tracker
    signals: StopSignals = field(default_factory=StopSignals)  # ask the run to stop

    def start(self) -> None:
        """Test and validate the untrained model, unless the run is resumed."""
        self.began = time.perf_counter() - self.progress.seconds
        FIRST_FAILURES.clear()  # of an earlier run in this process
        order = prompt_order(len(self.prompts["train"]), self.config.run.seed)
        self.order, self.drawn = islice(order, self.progress.prompts, None), self.progress.prompts
        while len(self.progress.waiting) > self.config.rollout.lag:  # of a fork's parent
            self.progress.waiting.popleft()
        resumed = self.progress.before is not None
        self.stopped, self.saved = False, self.position if resumed else None
        if not resumed:
            self.progress.before = self.test(self.learner.policy, "before")
            if self.config.run.validate_every:
                self.keep_best()
        drawn = self.progress.unvalidated.get("first_step", self.learner.steps)
        steps = {"total": self.config.run.max_steps, "initial": drawn}
        bar = Bar(desc="step", unit="step", quiet=self.config.run.quiet or not dist.is_main(), **steps)
        self.bar = self.lock.enter_context(bar)  # closed before an error is printed
        self.started_at = self.first_step = self.learner.steps
        self.seconds = {}
        if self.progress.unvalidated:  # a reward raised in the validation of the last rollout
            vars(self).update(self.progress.unvalidated)
            self.validate_if_due()
            self.save_if_due()

    @property
    def position(self) -> tuple[int, int]:
        """Optimizer steps taken and prompts drawn: under --rollout.lag rollouts are drawn before the first step."""
        return self.learner.steps, self.progress.prompts

    @property
    def limit_reached(self) -> bool:
        config = self.config.run
        return self.learner.steps >= config.max_steps or self.progress.tokens >= (config.max_tokens or math.inf)

    def ended(self) -> bool:
        """True if a limit is reached, or a signal to any rank has asked to stop."""
        self.boundary = random_state(self.learner.policy.device)
        self.stopped = bool(dist.max_over_ranks(self.signals.received is not None))
        return self.stopped or self.limit_reached

    def next_prompts(self, n: int) -> tuple[list[int], Prompts]:
        """This rank's share of the next n training prompts: their indices, and themselves."""
        minibatches = self.config.algorithm.minibatches if n == self.config.rollout.prompts else 1
        indices = dist.take_rank_share(list(islice(self.order, n)), minibatches)
        self.drawn += n
        return indices, self.prompts["train"].take(indices)

    @contextlib.contextmanager
    def weights_to_sample(self, policy: PreTrainedModel, sampling: Sampling) -> Iterator[None]:
        """Push the weights to the engine that draws; else unshard them, under autocast."""
        if sampling.served_by is not None:
            with self.engine_at_work():
                sampling.served_by.push(policy, self.learner.steps)
                yield
            return
        with sampling_context(policy, self.config.model.autocast, self.config.distributed.rollout):
            yield

    @contextlib.contextmanager
    def engine_at_work(self) -> Iterator[None]:
        """RunFailed, on all ranks, if an engine fails."""
        failure = None
        try:
            yield
        except EngineError as error:
            failure = error
        errors = list(filter(None, dist.gather_objects(failure and str(failure))))
        if errors:
            again = f"the same command with --run.output_dir {self.output} resumes from the last checkpoint"
            raise RunFailed(f"the engine failed: {errors[0]}; {again}") from failure

    def begin_to_draw(self) -> Drawing:
        """Have the engine begin to complete the next prompts."""
        indices, prompts = self.next_prompts(self.config.rollout.prompts)
        with self.phase("generate"), self.weights_to_sample(self.learner.policy, self.sampling):
            self.sampling.served_by.begin(prompts.ids, self.sampling, self.config.rollout.group_size)
        return Drawing(indices)

    def drawn_ahead(self) -> Drawing | None:
        """What the engine drew during the last update, once it has; None if it did not.

        If it has failed, that is for its next use to say: what is trained must be saved first.
        """
        waiting, rollout = self.progress.waiting, self.config.rollout
        if not (waiting and isinstance(waiting[-1], Drawing)):
            return None
        if waiting[-1].rollout is None:
            prompts, how = self.prompts["train"].take(waiting[-1].prompts), (self.sampling, rollout.group_size)
            try:
                with self.phase("generate"), self.engine_at_work():
                    waiting[-1].rollout = generate(self.learner.policy, self.tokenizer, prompts.ids, *how)
            except RunFailed:
                waiting.pop()
                self.progress.prompts -= rollout.prompts
                return None
        return waiting[-1]

    def delay(self, experience: Experience) -> Experience | None:
        """Keep a rollout; return the one drawn --rollout.lag rollouts before it, None if there is none yet."""
        waiting = self.progress.waiting
        ahead = [self.begin_to_draw()] if self.config.draws_ahead else []
        if self.drawn_ahead():
            waiting.pop()  # it is this one
        waiting += [experience, *ahead]
        self.progress.prompts, self.progress.ranks = self.drawn, dist.world_size()
        return waiting.popleft() if len(waiting) > self.config.rollout.lag else None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the rollout, for its line of metrics."""
        self.bar.set_description(name)
        began = time.perf_counter()
        playing = name == "generate" and self.sampling.play is not None
        with self.saved_on_error("an environment") if playing else contextlib.nullcontext():
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @contextlib.contextmanager
    def saved_on_error(self, who: str = "a reward") -> Iterator[None]:
        """If the user's code raises on any rank, save the run as it was before this rollout or validation, and end it.

        Raises UserCodeFailed on every rank. Before the first optimizer step there is nothing to save.
        """
        try:
            with fail_together():
                yield
        except UserCodeFailed as error:
            saved = "not saved before its first step: the same command starts anew"
            if self.learner.steps:
                self.progress.seconds = time.perf_counter() - self.began
                self.save_checkpoint(self.boundary)
                resume = f"the same command with --run.output_dir {self.output} resumes"
                saved = f"saved at step {self.learner.steps}: {resume}"
            raise UserCodeFailed(f"{who} failed\n\n{error}\n\nThe run is {saved}") from error.__cause__

    def check_rewards(self, rewards: Tensor) -> None:
        """End the run, saved, if no completion of any rank has a reward (B,), and functions have failed."""
        unknown, failures = all(dist.gather_objects(bool(rewards.isnan().all()))), self.failures()
        with self.saved_on_error():
            if unknown and failures:
                raise RewardError(f"every completion of this rollout is without a reward: {failures}")

    def failures(self) -> str:
        """The first failure of each reward on any rank, in one line; "" without any."""
        first = {name: error for of_rank in dist.gather_objects(FIRST_FAILURES) for name, error in of_rank.items()}
        return "; ".join(f"{name} ({error})" for name, error in first.items())

    def record(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Count a rollout that was trained on and describe it, of all ranks: metrics, a few samples."""
        self.drawn_ahead()  # before the engine is asked for a validation's, and the checkpoint written
        rollout, group_size = experience.rollout, self.config.rollout.group_size
        problems = self.prompts["train"].problems
        of_rank = {
            "problem": [problems[i] for i in experience.prompts for _ in range(group_size)],
            "text": rollout.texts,
            "episode": self.episodes(rollout),
            "reward": experience.rewards.tolist(),
            "advantage": experience.advantages.tolist(),
            "tokens": rollout.loss_mask.sum(dim=1).tolist(),
            "truncated": (~rollout.terminated).tolist(),
        } | {f"reward/{name}": values for name, values in experience.rewards_by_name.items()}
        if rollout.sampled_mask is not None:
            of_rank["turns"] = rollout.turns.tolist()
        of_ranks = dist.gather_objects((experience.drawn_tokens, experience.drawn_rewards, of_rank))
        rows = {name: list(chain(*(values[name] for _, _, values in of_ranks))) for name in of_rank}
        drawn_rewards = list(chain(*(values for _, values, _ in of_ranks)))
        progress, learner = self.progress, self.learner
        progress.tokens += sum(tokens for tokens, _, _ in of_ranks)
        progress.microbatch_limit = learner.microbatch_limit
        self.steps = steps
        self.line = {"step": learner.steps, "tokens": progress.tokens}
        self.line |= rollout_metrics(rows) | steps[-1]  # the most off-policy one
        if self.config.rollout.resample:
            self.line["resampled_share"] = (len(drawn_rewards) - len(rows["reward"])) / len(rows["reward"])
            self.line["reward_drawn"] = float(np.mean(known(drawn_rewards)))
        self.line["steps_skipped"] = sum(step["step_skipped"] for step in steps)
        shown = zip(*(rows[name][::group_size] for name in ("problem", "episode", "reward")), strict=True)
        self.samples = [
            {"step": learner.steps, **problem.record(), "completion": text, "reward": reward}
            for problem, text, reward in islice(shown, self.config.run.samples)
        ]

    def episodes(self, rollout: Rollout) -> list[str]:
        """The completions as texts; episodes whole, with the tokens between the turns."""
        if rollout.sampled_mask is None:
            return rollout.texts
        pairs = zip(rollout.completion_ids, rollout.completion_mask, strict=True)
        return self.tokenizer.batch_decode([ids[mask] for ids, mask in pairs])

    def validate_if_due(self) -> None:
        """Validate if due, for the rollout's line, and keep the model if it is the best so far."""
        every = self.config.run.validate_every
        if every and (self.limit_reached or crossed(every, self.first_step, self.learner.steps)):
            names = ("first_step", "seconds", "steps", "line", "samples")
            self.progress.unvalidated = {name: getattr(self, name) for name in names}
            self.boundary = random_state(self.learner.policy.device)
            with self.phase("validate"):
                self.line |= self.keep_best()
            self.progress.unvalidated = {}

    def save_if_due(self) -> None:
        """Write the rollout's line and samples, and a checkpoint if one is due."""
        self.line |= {f"seconds/{phase}": round(spent, 4) for phase, spent in self.seconds.items()}
        if dist.is_main():
            with writing(f"cannot write into {self.output}", self.output):
                append_jsonl(self.output / "metrics.jsonl", self.line)
                append_jsonl(self.output / "samples.jsonl", *self.samples)
            self.tracker.log(self.line)
        self.count_skipped()
        self.progress.seconds = time.perf_counter() - self.began
        if self.limit_reached or crossed(self.config.run.save_every, self.first_step, self.learner.steps):
            self.save_checkpoint()
        first = self.first_step == self.started_at
        self.bar.advance(self.learner.steps - self.first_step, self.status(), always=first or self.limit_reached)
        self.first_step, self.seconds = self.learner.steps, {}

    def status(self) -> str:
        """The rollout in a few numbers, for the progress bar or a line of a log."""
        line, steps = self.line, self.learner.steps - self.first_step
        parts = [f"reward {line['reward']:.2f}", f"loss {line['loss']:.4f}", f"kl {line['kl_old_new']:.2g}"]
        parts += [f"kl to initial {line['kl_reference']:.2g}"] if "kl_reference" in line else []
        parts += [f"truncated {line['truncated_share']:.0%}"]
        parts += [f"format {line['format_share']:.0%}"] if "format_share" in line else []
        seconds = self.seconds["generate"] + self.seconds["reward"] + self.seconds["train"]
        parts += [f"{seconds / steps:.1f} s/step"] if self.bar.in_lines else []  # a bar has its own
        return "  ".join(parts)

    def count_skipped(self) -> None:
        """Raise RunFailed after --optimizer.max_skipped skipped steps in a row."""
        for step in self.steps:
            self.progress.skipped = self.progress.skipped + 1 if step["step_skipped"] else 0
            if self.progress.skipped >= self.config.optimizer.max_skipped:
                saved = next(iter(checkpoints(self.output)), "none yet")
                raise RunFailed(
                    f"{self.progress.skipped} optimizer steps in a row were skipped: loss ({step['loss']}), gradient "
                    f"(norm {step['grad_norm']}) or log-probs were not finite. The weights are unchanged; last "
                    f"checkpoint: {saved}. Lower --optimizer.lr, or check the reward and the surrogate"
                )

    def warn(self) -> None:
        """Say on stderr that completions had no reward, and why; or that no step has moved the model."""
        failures = self.failures()
        lines = read_jsonl(self.output / "metrics.jsonl") if dist.is_main() else []
        if not lines:
            return
        rows = self.config.rollout.prompts * self.config.rollout.group_size
        unknown, total = round(sum(line["reward_unknown_share"] for line in lines) * rows), len(lines) * rows
        if unknown or failures:
            why = failures or "every function returned None"
            print(f"WARNING: {unknown:,} of {total:,} completions had no reward: {why}", file=sys.stderr)
        if unknown < total and all(line["zero_advantage_share"] == 1 for line in lines):
            print("WARNING: no step had a gradient: all rewards of every group were equal", file=sys.stderr)
        if sum(line["steps_skipped"] for line in lines) == self.learner.steps:
            print("WARNING: every step was skipped: loss, gradient or log-probs were not finite", file=sys.stderr)

    def finish(self) -> dict[str, Any]:
        """Save the final model, test it and the returned one, and return the summary; Stopped if a signal ended it.

        The returned model is the best by validation, step 0's included; without validation it is the final one.
        """
        self.bar.close()
        self.warn()
        if self.stopped:
            self.save_checkpoint()
            raise Stopped
        progress, policy, steps = self.progress, self.learner.policy, self.learner.steps
        save_model(policy, self.tokenizer, self.output / "final", self.card())
        best_step = progress.best.get("step", steps)
        after = final = self.test(policy, "after" if best_step == steps else "final")
        if best_step != steps:
            best = replace(self.config.model, name_or_path=str(self.output / "best"))
            if has_adapters(policy):
                fill_adapters(policy, best.name_or_path)
            else:
                policy = load_policy(best, policy.device, dist.is_sharded(policy))
            after = self.test(policy, "after")
        summary = {
            "before": progress.before,
            "after": after,
            "final": final,
            "validation": progress.validations(steps),
            "tokens": progress.tokens,
            "optimizer_steps": self.learner.steps,
            "seconds": round(time.perf_counter() - self.began, 2),
            "peak_memory_gb": round(peak_memory_gb(policy.device), 3),
            "best_model": str(self.output / ("best" if progress.best else "final")),
            "best_step": best_step,
        }
        if dist.is_main():
            with writing(f"cannot write into {self.output}", self.output):
                for name in ("best", "final") if progress.best else ("final",):
                    write_text(self.output / name / "README.md", self.tested_card(name, summary))
                write_json(self.output / "summary.json", summary)
            self.tracker.finish()
        return summary

    def validate(self) -> dict[str, float]:
        """Mean reward under the training's sampling, and greedy accuracy (without gold answers greedy reward)."""
        sampled, greedy = (
            {"mean_reward": -math.inf}  # if none is known
            | self.evaluate(self.learner.policy, "validation", sampling, "validate").means()
            for sampling in (self.sampling, self.sampling.greedy())
        )
        validation = {"validation_reward": sampled["mean_reward"]}
        if "accuracy" in greedy:
            return validation | {"validation_accuracy": greedy["accuracy"]}
        return validation | {"validation_greedy_reward": greedy["mean_reward"]}

    def test(self, policy: PreTrainedModel, when: str) -> dict[str, Any]:
        """Evaluate greedily on the held-out problems, and keep the completions; {} for --run.test_limit 0."""
        if not self.config.run.test_limit:
            return {}
        evaluation = self.evaluate(policy, "test", self.sampling.greedy(), f"test {when}")
        if dist.is_main():
            with writing(f"cannot write into {self.output}", self.output):
                write_text(self.output / f"test-{when}.jsonl", to_jsonl(evaluation.completions))
        return evaluation.record()

    def evaluate(self, policy: PreTrainedModel, split: str, sampling: Sampling, bar: str) -> Evaluation:
        """One completion of each prompt; the ranks share the prompts evenly, unless they must decode in step."""
        prompts, bar = self.prompts[split], "" if self.config.run.quiet else bar
        rows = math.inf if sampling.synced else math.ceil(len(prompts) / dist.world_size())
        with self.weights_to_sample(policy, sampling):
            how = {"step": self.learner.steps, "max_rows": rows, "bar": bar}
            return evaluate(policy, self.tokenizer, prompts, sampling, self.config.reward, **how)

    def keep_best(self) -> dict[str, float]:
        """Validate, and save the model if it is the best so far."""
        progress = self.progress
        with self.saved_on_error():
            validation = self.validate()
        progress.validated = {"step": self.learner.steps, "tokens": progress.tokens} | validation
        if self.learner.steps == 0:
            progress.untrained = progress.validated
        elif is_better(validation, progress.best_trained):
            progress.best_trained = progress.validated
        if is_better(validation, progress.best):
            progress.best = progress.validated
            save_model(self.learner.policy, self.tokenizer, self.output / "best", self.card(), progress.best)
        return validation

    def save_checkpoint(self, random: dict[str, Any] | None = None) -> None:
        """Save a checkpoint, once per position; ``random`` as for `pspo.run.checkpoint.save_checkpoint`."""
        if self.saved != self.position:
            self.drawn_ahead()
            save_checkpoint(self, random)
            self.saved = self.position

    def card(self) -> str:
        """The model card of the policy as it is now."""
        now = {"step": self.learner.steps, "tokens": self.progress.tokens}
        return self.card_of(now, {"base model": self.progress.before or {}}, [self.progress.validated])

    def tested_card(self, name: str, summary: dict[str, Any]) -> str:
        """The model card of ``best`` or ``final``, with the tests of both and all validations."""
        steps = {"best": summary["best_step"], "final": summary["optimizer_steps"]}
        of_model = {"best": "after", "final": "final"}
        tests = {"base model": summary["before"], "this model": summary[of_model[name]]}
        if steps["best"] != steps["final"]:
            other = "final" if name == "best" else "best"
            tests[f"the {other} model, of step {steps[other]:,}"] = summary[of_model[other]]
        now = {"step": steps[name], "tokens": summary["tokens"]} | (self.progress.best if name == "best" else {})
        return self.card_of(now, tests, summary["validation"].values())

    def card_of(self, now: dict[str, Any], tests: dict[str, Any], validations: Iterable[dict[str, Any]]) -> str:
        counts = {"problems": len(self.prompts["train"]), "step": now["step"], "tokens": now["tokens"]}
        changes = describe_changes(self.output)
        return model_card(self.config, **counts, tests=tests, validations=validations, changes=changes)


def is_better(validation: dict[str, Any], best: dict[str, Any]) -> bool:
    return not best or validation["validation_reward"] > best["validation_reward"]


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far: of the GPU's tensors, or of the whole process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, but bytes on macOS
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def crossed(every: int, before: int, after: int) -> bool:
    """True if a multiple of ``every`` lies in (before, after]; never for 0."""
    return every > 0 and before // every < after // every


def known(values: list[float]) -> list[float]:
    """Without NaN; a single NaN if there is nothing else."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def rollout_metrics(rows: dict[str, list[Any]]) -> dict[str, float]:
    """Statistics of one rollout from its B rows' values; unknown rewards (NaN) are left out of the means."""

    pairs = zip(rows["text"], rows["problem"], strict=True)
    formats = [matches_format(text) for text, problem in pairs if isinstance(problem.answer, Fraction)]
    metrics = {
        "reward": np.mean(known(rows["reward"])),
        "reward_std": np.std(known(rows["reward"])),
        **{name: np.mean(known(values)) for name, values in rows.items() if name.startswith("reward/")},
        "reward_unknown_share": np.isnan(rows["reward"]).mean(),
        "empty_share": np.mean([not text.strip() for text in rows["text"]]),
        "zero_advantage_share": np.mean([advantage == 0 for advantage in rows["advantage"]]),
        "completion_tokens": np.mean(rows["tokens"]),
        "completion_tokens_max": max(rows["tokens"]),
        "truncated_share": np.mean(rows["truncated"]),
        **({"turns": np.mean(rows["turns"])} if "turns" in rows else {}),
        **({"format_share": np.mean(formats)} if formats else {}),
    }
    return {name: float(value) for name, value in metrics.items()}
