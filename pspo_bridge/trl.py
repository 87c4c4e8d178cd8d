"""TRL's GRPOTrainer with a surrogate of pspo, and a record of its run for ``pspo view``.

    trainer = pspo_bridge.trl.GRPOTrainer(
        model, reward, config, train_dataset, surrogate="PSPO", callbacks=[pspo_bridge.trl.Record("runs/trl")]
    )

TRL multiplies advantages by ratios. `LossAdvantages` stands for the advantages there, and gives minus the surrogate's
loss: what TRL does next with the loss of a token (masks, corrections, KL, entropy, normalisation) it does with that.
Tried with the versions of TRL that docs/guide/bridge.md names.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import trl
import yaml
from torch import Tensor
from transformers import TrainerCallback

import pspo.losses
from pspo.losses import Surrogate, diagnose
from pspo.token_table import TOKENS, token_texts, write_tokens
from pspo_bridge import Evaluation, evaluate, make_surrogate

AGGREGATIONS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # values of loss_type whose losses are PPO's clip
REPLACED = (  # arguments of losses of TRL's
    "epsilon", "epsilon_high", "delta", "importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg",
)  # fmt: skip
METRICS = {  # names in metrics.jsonl of what TRL logs
    "num_tokens": "tokens",
    "completions/mean_length": "completion_tokens",
    "completions/max_length": "completion_tokens_max",
    "completions/clipped_ratio": "truncated_share",
    "frac_reward_zero_std": "zero_advantage_share",
    "learning_rate": "lr",
    "kl": "kl_reference",
    "step_time": "seconds/step",
}


class LossAdvantages:
    """Advantages (B, 1) or (B, T) to whoever compares them, and minus the losses (B, T) to whoever multiplies."""

    def __init__(self, advantages: Tensor) -> None:
        self.advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        self.losses: Tensor | None = None

    def dim(self) -> int:
        return 2

    def __gt__(self, other: float) -> Tensor:
        return self.advantages > other

    def __ge__(self, other: float) -> Tensor:
        return self.advantages >= other

    def __lt__(self, other: float) -> Tensor:
        return self.advantages < other

    def __rmul__(self, ratio: Tensor) -> Tensor:
        return -self.losses


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's trainer with one more argument; all others are TRL's, and its metrics, clip ratios at its epsilon included.

    Args:
        surrogate: an instance of a `pspo.losses.Surrogate`; a name or an import path; or one with arguments as
            {"class_path": "PSPO", "init_args": {"alpha": 0.2}}.

    Raises ValueError for a surrogate that there is not, and for arguments of TRL's own losses, which have no effect.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: trl.GRPOConfig | None = None,
        *others: Any,
        surrogate: Surrogate | str | dict[str, Any] = "PSPO",
        **options: Any,
    ) -> None:
        self.surrogate = make_surrogate(surrogate)
        for method in ("_compute_loss", "_get_per_token_logps_and_entropies", "_calculate_rewards"):
            if not hasattr(trl.GRPOTrainer, method):
                raise ValueError(f"TRL {trl.__version__} has no GRPOTrainer.{method}: pip install trl==1.16.0")
        if args is not None:
            check_arguments(args)
        self.loss_inputs: dict[str, Any] | None = None  # of the microbatch whose loss is computed
        self.rows = 0  # drawn so far
        super().__init__(model, reward_funcs, args, *others, **options)

    @property
    def records(self) -> list["Record"]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, Record)]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        for record in self.records:
            record.trainer = self
        return super().train(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        advantages = LossAdvantages(inputs["advantages"])
        self.loss_inputs = inputs | {"advantages": advantages}
        try:
            loss = super()._compute_loss(model, self.loss_inputs)
        finally:
            self.loss_inputs = None
        if advantages.losses is None:
            raise RuntimeError(f"the loss of TRL {trl.__version__} takes another way: pip install trl==1.16.0")
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self.loss_inputs is not None:
            self._evaluate_surrogate(outputs[0], outputs[1])
        return outputs

    def _evaluate_surrogate(self, logprobs: Tensor, entropies: Tensor) -> None:
        """Give the losses to the advantages' stand-in, log metrics, record; logprobs and entropies (B, T)."""
        inputs = self.loss_inputs
        advantages = inputs["advantages"].advantages
        old_logprobs = inputs.get("old_per_token_logps")
        if old_logprobs is None:
            old_logprobs = logprobs.detach()
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        surrogate = self.surrogate.bind_step(self.state.global_step)
        result = evaluate(surrogate, logprobs, old_logprobs, advantages, mask)
        inputs["advantages"].losses = result.losses
        mode = "train" if self.model.training else "eval"
        means = torch.stack(list(result.metrics.values()))
        if not (result.mask & (advantages != 0)).any():
            means = torch.full_like(means, torch.nan)  # of no token
        means = self.accelerator.gather(means[None]).nanmean(dim=0).tolist()
        for name, mean in zip(result.metrics, means, strict=True):
            if not math.isnan(mean):
                self._metrics[mode][f"surrogate/{name}"].append(mean)
        if mode == "train":
            for record in self.records:
                record.add_visit(inputs, entropies, result)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Tensor:
        self.completion_ids = completion_ids  # masks may hide some of them later
        self.rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)  # of all processes
        return self.rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        outputs = super()._generate_and_score_completions(inputs)
        first = self.rows
        self.rows += len(inputs)
        outputs["row"] = torch.arange(first, self.rows, device=outputs["completion_ids"].device)  # will be shuffled
        if self.model.training:
            for record in self.records:
                record.begin_rollout(inputs, outputs)
        return outputs


def check_arguments(args: trl.GRPOConfig) -> None:
    """Raise ValueError for arguments of TRL's own losses: with a surrogate they would have no effect."""
    if args.loss_type not in AGGREGATIONS:
        fix = f"loss_type says how losses are averaged: one of {', '.join(AGGREGATIONS)}"
        raise ValueError(f"loss_type={args.loss_type!r} is a loss of TRL's: name it as surrogate=; {fix}")
    for name in REPLACED:
        value = getattr(args, name, None)
        if value is not None and value != getattr(type(args), name):  # the default
            raise ValueError(f"{name}={value!r} has no effect here: leave it out; it is an argument of surrogate=")
    for name in ("use_liger_kernel", "use_liger_loss"):
        if getattr(args, name, False):
            raise ValueError(f"{name}=True computes a loss of its own, without log-probs: leave it out")


class Record(TrainerCallback):
    """Writes a run folder for ``pspo view`` and the curves of ``pspo report``: settings, metrics of each log, and of
    each rollout's first groups completions and tokens. For `GRPOTrainer` of this module; of process 0's rows.

    Args:
        folder: of the run, a new one, also if TRL resumes from a checkpoint.
        groups: per rollout whose completions and tokens are recorded, as --run.record_tokens.
    """

    def __init__(self, folder: str | Path, groups: int = 2) -> None:
        self.folder = Path(folder)
        self.groups = groups
        self.trainer: GRPOTrainer | None = None
        self.problems: dict[str, int] = {}  # numbers of prompts, in the order in which they come
        self.samples: dict[int, dict[str, Any]] = {}  # by row, of the rollout that is trained on
        self.token_ids: dict[int, list[int]] = {}
        self.visits: list[pd.DataFrame] = []  # to tokens of these
        self.step_visits: list[dict[str, Tensor]] = []  # to all tokens, of the optimizer step that is computed
        self.statistics: dict[str, float] = {}

    def on_train_begin(self, args: trl.GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None:
            raise ValueError("Record needs pspo_bridge.trl.GRPOTrainer: TRL's own does not tell what its loss computes")
        if state.is_world_process_zero:
            if (self.folder / "metrics.jsonl").exists():
                raise ValueError(f"{self.folder} holds a run already: give Record another folder")
            (self.folder / TOKENS).mkdir(parents=True, exist_ok=True)
            settings = run_settings(self.trainer, args, state.max_steps, self)
            (self.folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")

    def begin_rollout(self, inputs: list[dict[str, Any]], outputs: dict[str, Any]) -> None:
        """Keep the first groups of a rollout; ``outputs`` as TRL's has them."""
        if not self.step_visits:  # else an optimizer step takes several rollouts
            self.write_rollout()
        trainer = self.trainer
        rewards = trainer.rewards[trainer.accelerator.process_index * len(inputs) :].tolist()
        group_size = trainer.num_generations
        eos = trainer.processing_class.eos_token_id
        for row in range(min(self.groups * group_size, len(inputs))):
            prompt = inputs[row].get("prompt", "")
            ids = list(trainer.completion_ids[row])
            values = [None if math.isnan(value) else value for value in rewards[row]]
            weighted = zip(trainer.reward_weights.tolist(), values, strict=True)
            number = int(outputs["row"][row])
            self.token_ids[number] = ids
            self.samples[number] = {
                "step": None,  # the last one on this rollout, known when it is written
                "problem": self.problems.setdefault(json.dumps(prompt), len(self.problems)),
                "sample": row % group_size,
                "prompt": prompt,
                "completion": trainer.processing_class.decode(ids, skip_special_tokens=True),
                "reward": sum(weight * value for weight, value in weighted if value is not None),
                "advantage": outputs["advantages"][row].flatten()[0].item(),
                "tokens": len(ids),
                "truncated": len(ids) == trainer.max_completion_length and ids[-1] != eos,
                "rewards": dict(zip(trainer.reward_func_names, values, strict=True)),
            }

    def add_visit(self, inputs: dict[str, Any], entropies: Tensor, result: Evaluation) -> None:
        """Keep what an optimizer step computes at a microbatch's tokens; entropies (B, T)."""
        mask = result.mask
        values = {
            "logprob": result.logprobs,
            "old_logprob": result.old_logprobs,
            "sampler_logprob": inputs.get("sampling_per_token_logps"),
            "reference_logprob": inputs.get("ref_per_token_logps"),
            "entropy": entropies.detach(),
            "advantage": result.advantages,
            "weight": result.weights,
            "row": inputs["row"][:, None],
            "position": torch.arange(mask.shape[1], device=mask.device),
        }
        tokens = {name: value.expand_as(mask)[mask].cpu() for name, value in values.items() if value is not None}
        self.step_visits.append(tokens)

    def on_step_end(self, args: trl.GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        names = self.step_visits[0]
        tokens = {name: torch.cat([visit[name] for visit in self.step_visits]) for name in names}
        self.step_visits = []
        active = {name: values[tokens["advantage"] != 0] for name, values in tokens.items()}
        self.statistics = diagnose(
            active["logprob"], active["old_logprob"], active["advantage"], active["weight"], active["row"]
        )
        is_recorded = torch.isin(tokens["row"], torch.tensor(list(self.samples)))
        visit = pd.DataFrame({name: values[is_recorded].numpy() for name, values in tokens.items()})
        self.visits.append(visit.assign(step=state.global_step))

    def write_rollout(self) -> None:
        """Write samples and tokens of the rollout that was trained on, by its last step, and forget them."""
        if self.visits and self.trainer.accelerator.is_main_process:
            step = self.trainer.state.global_step
            append_lines(self.folder / "samples.jsonl", [sample | {"step": step} for sample in self.samples.values()])
            parts = []
            for place, (row, ids) in enumerate(self.token_ids.items()):
                texts = token_texts(self.trainer.processing_class, ids)
                names = {name: self.samples[row][name] for name in ("problem", "sample")} | {"drawn": row, "row": place}
                parts.append(
                    pd.DataFrame({"position": range(len(ids)), "token_id": ids, "text": texts}).assign(**names)
                )
            visits = pd.concat(self.visits, ignore_index=True).rename(columns={"row": "drawn"})
            tokens = visits.merge(pd.concat(parts), on=["drawn", "position"])
            write_tokens(self.folder, step, [{name: tokens[name] for name in tokens.columns}])
        self.samples = {}
        self.token_ids = {}
        self.visits = []

    def on_log(self, args: trl.GRPOConfig, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if not state.is_world_process_zero or "loss" not in logs:  # the summary of the whole run has none
            return
        line: dict[str, Any] = {"step": state.global_step}
        for name, value in logs.items():
            if name.startswith("rewards/") and name.endswith("/mean"):
                name = f"reward/{name.removeprefix('rewards/').removesuffix('/mean')}"
            line[METRICS.get(name, name)] = value
        append_lines(self.folder / "metrics.jsonl", [line | self.statistics])

    def on_train_end(self, args: trl.GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        self.write_rollout()


def append_lines(file: Path, records: list[dict[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record, default=str) + "\n" for record in records)


def run_settings(trainer: GRPOTrainer, args: trl.GRPOConfig, max_steps: int, record: Record) -> dict[str, Any]:
    """TRL's arguments as switches of pspo: those that docs/guide/trl.md translates."""
    surrogate = trainer.surrogate
    kind = type(surrogate)
    module = "pspo.losses" if vars(pspo.losses).get(kind.__name__) is kind else kind.__module__
    fields = dataclasses.asdict(surrogate) if dataclasses.is_dataclass(surrogate) else {}
    return {
        "trainer": "trl",
        "model": {"name_or_path": trainer.model.config._name_or_path},
        "data": {"name": "train_dataset"},
        "rollout": {
            "prompts": args.generation_batch_size // args.num_generations,
            "group_size": args.num_generations,
            "max_completion_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
        },
        "algorithm": {
            "surrogate": {"class_path": f"{module}.{kind.__name__}", "init_args": fields},
            "epochs": args.num_iterations,
            "minibatches": max(1, args.steps_per_generation // args.gradient_accumulation_steps),
            "aggregation": args.loss_type,
            "advantages": args.scale_rewards,
            "beta": args.beta,
        },
        "optimizer": {"lr": args.learning_rate, "max_grad_norm": args.max_grad_norm},
        "run": {"output_dir": str(record.folder), "seed": args.seed, "max_steps": max_steps},
    }
