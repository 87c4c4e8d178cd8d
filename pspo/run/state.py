"""The state of a training run: everything around the algorithm that `pspo.train.train` moves forward."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.model import fill_adapters, has_adapters, load_policy, peak_memory_gb
from pspo.rollout import Prompts, Rollout, Sampling, prompt_order, sampling_context
from pspo.run.card import model_card
from pspo.run.checkpoint import Progress, RunFailed, checkpoints, save_checkpoint, save_model, writing
from pspo.run.evaluation import evaluate
from pspo.run.records import append_jsonl, write_json
from pspo.run.results import Evaluation
from pspo.run.signals import Stopped, StopSignals
from pspo.run.trackers import Tracker
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
        order = prompt_order(len(self.prompts["train"]), self.config.run.seed)
        self.order = islice(order, self.progress.prompts, None)
        self.stopped, self.saved_step = False, None
        if self.progress.before is None:
            self.progress.before = self.test(self.learner.policy, "test before")
            if self.config.run.validate_every:
                self.keep_best()
        steps = {"total": self.config.run.max_steps, "initial": self.learner.steps}
        bar = tqdm(desc="train", unit="step", disable=not dist.is_main(), **steps)
        self.bar = self.lock.enter_context(bar)  # closed before an error is printed

    @property
    def limit_reached(self) -> bool:
        config = self.config.run
        return self.learner.steps >= config.max_steps or self.progress.tokens >= (config.max_tokens or math.inf)

    def ended(self) -> bool:
        """True if a limit is reached, or a signal to any rank has asked to stop."""
        self.stopped = bool(dist.max_over_ranks(self.signals.received is not None))
        return self.stopped or self.limit_reached

    def next_prompts(self) -> Prompts:
        """This rank's prompts of the next rollout."""
        self.first_step, self.seconds = self.learner.steps, {}
        drawn = list(islice(self.order, self.config.rollout.prompts))
        self.drawn = self.prompts["train"].take(dist.take_rank_share(drawn, self.config.algorithm.minibatches))
        return self.drawn

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the rollout, for its line of metrics."""
        self.bar.set_description(name)
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def record(
        self,
        rollout: Rollout,
        rewards: Tensor,
        rewards_by_name: dict[str, list[float]],
        advantages: Tensor,
        steps: list[dict[str, float]],
    ) -> None:
        """Count a rollout and describe it, of all ranks: metrics, a few samples; ``rewards``, ``advantages`` (B,)."""
        of_rank = (rollout.cpu(), self.drawn.problems, rewards.tolist(), rewards_by_name, advantages.cpu())
        rollouts, problems, rewards, by_name, advantages = zip(*dist.gather_objects(of_rank), strict=True)
        rollout, problems, rewards = Rollout.join(rollouts), list(chain(*problems)), list(chain(*rewards))
        by_name = {name: list(chain(*(values[name] for values in by_name))) for name in rewards_by_name}
        progress, learner, group_size = self.progress, self.learner, self.config.rollout.group_size
        progress.prompts += self.config.rollout.prompts
        progress.tokens += rollout.tokens
        progress.ranks, progress.microbatch_limit = dist.world_size(), learner.microbatch_limit
        self.tokens, self.steps = rollout.tokens, steps
        self.line = {"step": learner.steps, "tokens": progress.tokens}
        self.line |= rollout_metrics(rollout, rewards, by_name, torch.cat(advantages))
        self.line |= steps[-1]  # the most off-policy one
        self.line["steps_skipped"] = sum(step["step_skipped"] for step in steps)
        self.samples = [
            {"step": learner.steps, "prompt": problem.prompt, "gold": str(problem.answer),
             "completion": rollout.texts[i * group_size], "reward": rewards[i * group_size]}
            for i, problem in enumerate(problems[: self.config.run.samples])
        ]  # fmt: skip

    def validate_if_due(self) -> None:
        """Validate if due, for the rollout's line, and keep the model if it is the best so far."""
        every = self.config.run.validate_every
        if every and (self.limit_reached or crossed(every, self.first_step, self.learner.steps)):
            with self.phase("validate"):
                self.line |= self.keep_best()

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
        self.bar.update(self.learner.steps - self.first_step)
        rate = self.tokens / (self.seconds["generate"] + self.seconds["train"])
        length = self.line["completion_tokens"]
        self.bar.set_postfix_str(f"reward {self.line['reward']:.3f}, length {length:.0f}, {rate:,.0f} tokens/s")

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

    def finish(self) -> dict[str, Any]:
        """Save the final model, test the returned one, and return the summary; Stopped if a signal ended the run."""
        self.bar.close()
        if self.stopped:
            self.save_checkpoint()
            raise Stopped
        save_model(self.learner.policy, self.tokenizer, self.output / "final", self.card())
        policy, returned = self.learner.policy, self.output / "final"
        if self.progress.best:
            returned = self.output / "best"
            best = replace(self.config.model, name_or_path=str(returned))
            if has_adapters(policy):
                fill_adapters(policy, str(returned))
            else:
                policy = load_policy(best, policy.device, dist.is_sharded(policy))
        summary = {
            "before": self.progress.before,
            "after": self.test(policy, "test after"),
            "tokens": self.progress.tokens,
            "optimizer_steps": self.learner.steps,
            "seconds": round(time.perf_counter() - self.began, 2),
            "peak_memory_gb": round(peak_memory_gb(policy.device), 3),
            "best_model": str(returned),
            "best_step": self.progress.best.get("step", self.learner.steps),
        }
        if dist.is_main():
            with writing(f"cannot write into {self.output}", self.output):
                write_json(self.output / "summary.json", summary)
            self.tracker.finish()
        return summary

    def validate(self) -> dict[str, float]:
        """Mean reward under the training's sampling, and greedy accuracy, on the validation problems."""
        sampled, greedy = (
            self.evaluate(self.learner.policy, "validation", sampling, "validate").results
            for sampling in (self.sampling, self.sampling.greedy())
        )
        return {"validation_reward": sampled["mean_reward"], "validation_accuracy": greedy["accuracy"]["value"]}

    def test(self, policy: PreTrainedModel, bar: str) -> dict[str, Any]:
        """Greedy accuracy on the held-out problems; {} for --run.test_limit 0."""
        greedy = self.sampling.greedy()
        return self.evaluate(policy, "test", greedy, bar).record() if self.config.run.test_limit else {}

    def evaluate(self, policy: PreTrainedModel, split: str, sampling: Sampling, bar: str) -> Evaluation:
        """One completion of each prompt; the ranks share the prompts evenly, unless they must decode in step."""
        prompts, model = self.prompts[split], self.config.model
        rows = math.inf if sampling.synced else math.ceil(len(prompts) / dist.world_size())
        with sampling_context(policy, model.autocast, self.config.distributed.rollout):
            return evaluate(policy, self.tokenizer, prompts, sampling, self.config.reward, max_rows=rows, bar=bar)

    def keep_best(self) -> dict[str, float]:
        """Validate, and save the model if it is the best so far."""
        validation, progress = self.validate(), self.progress
        progress.validated = {"step": self.learner.steps} | validation
        if not progress.best or validation["validation_reward"] > progress.best["validation_reward"]:
            progress.best = progress.validated
            save_model(self.learner.policy, self.tokenizer, self.output / "best", self.card(), progress.best)
        return validation

    def save_checkpoint(self) -> None:
        """Save a checkpoint, once per step."""
        if self.saved_step != self.learner.steps:
            save_checkpoint(self)
            self.saved_step = self.learner.steps

    def card(self) -> str:
        """The model card of the policy as it is now."""
        progress, problems = self.progress, len(self.prompts["train"])
        counts = {"problems": problems, "step": self.learner.steps, "tokens": progress.tokens}
        return model_card(self.config, **counts, before=progress.before or {}, validation=progress.validated)


def crossed(every: int, before: int, after: int) -> bool:
    """True if a multiple of ``every`` lies in (before, after]; never for 0."""
    return every > 0 and before // every < after // every


def rollout_metrics(
    rollout: Rollout, rewards: list[float], rewards_by_name: dict[str, list[float]], advantages: Tensor
) -> dict[str, float]:
    """Statistics of one rollout's B samples; unknown rewards (NaN) are left out of the means."""
    lengths = rollout.completion_mask.sum(dim=1).float()

    def known(values: list[float]) -> list[float]:
        return [value for value in values if not math.isnan(value)] or [math.nan]

    return {
        "reward": float(np.mean(known(rewards))),
        "reward_std": float(np.std(known(rewards))),
        **{f"reward/{name}": float(np.mean(known(values))) for name, values in rewards_by_name.items()},
        "reward_unknown_share": float(np.isnan(rewards).mean()),
        "empty_share": float(np.mean([not text.strip() for text in rollout.texts])),
        "zero_advantage_share": (advantages == 0).float().mean().item(),
        "completion_tokens": lengths.mean().item(),
        "completion_tokens_max": lengths.max().item(),
        "truncated_share": (~rollout.terminated).float().mean().item(),
    }
