"""TRL's GRPOTrainer with a surrogate of pspo, and a record of any GRPOTrainer's run for ``pspo view``.

    trainer = trl.GRPOTrainer(model, reward, config, train_dataset)             # as it is, its training unchanged
    pspo_bridge.trl.Record("runs/trl").attach(trainer)

    trainer = pspo_bridge.trl.GRPOTrainer(
        model, reward, config, train_dataset, surrogate="PSPO", callbacks=[pspo_bridge.trl.Record("runs/trl")]
    )

TRL multiplies advantages by ratios. `LossAdvantages` stands for the advantages there, and gives minus the surrogate's
loss. TRL's masks, corrections, KL, entropy and normalisation then apply to that.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
import trl
import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback

from pspo.losses import CISPO, GSPO, SAPO, VESPO, Clip, Surrogate, diagnose
from pspo.token_table import TOKENS, token_texts, write_tokens
from pspo_bridge import BUILT_IN, make_surrogate, token_losses

TRIED = "pip install trl==1.16.0"
LOGPROBS = "_get_per_token_logps_and_entropies"  # a method of TRL's loss
AGGREGATIONS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # values of loss_type whose losses are PPO's clip
REPLACED = ("epsilon", "delta", "importance_sampling_level", "sapo_", "vespo_")  # arguments of TRL's losses begin so
METRICS = {  # names in metrics.jsonl of what TRL logs
    "num_tokens": "tokens",
    "completions/mean_length": "completion_tokens",
    "completions/max_length": "completion_tokens_max",
    "completions/clipped_ratio": "truncated_share",
    "frac_reward_zero_std": "zero_advantage_share",
    "learning_rate": "lr",
    "kl": "kl_reference",
    "step_time": "seconds/step",
    "eval_reward": "validation_reward",
}
GOLD = ("answer", "solution", "gold", "ground_truth", "target")  # columns of datasets that hold it


@contextmanager
def watched(trainer: trl.GRPOTrainer, method: str, see: Callable[..., None]) -> Iterator[None]:
    """Within, ``see`` gets what this method of the trainer returns, then the method's arguments."""
    call = getattr(trainer, method)

    def call_and_see(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        see(outputs, *args)
        return outputs

    with patch.object(trainer, method, call_and_see):
        yield


class LossAdvantages:
    """Compared, it is the advantages (B, 1) or (B, T); multiplied, minus the losses (B, T)."""

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
    """TRL's trainer with one more argument. All others are TRL's, and so are its metrics, clip ratios included.

    ``surrogate`` is what `pspo_bridge.make_surrogate` takes, or None for TRL's own loss, unchanged. Raises ValueError
    for an unknown one, and for arguments of TRL's own losses, which have no effect.
    """

    def __init__(self, *args: Any, surrogate: Surrogate | str | dict[str, Any] | None = "PSPO", **options: Any) -> None:
        self.surrogate = None if surrogate is None else make_surrogate(surrogate)
        config = next((each for each in (*args, *options.values()) if isinstance(each, trl.GRPOConfig)), None)
        check_trainer(type(self), config)
        if config and self.surrogate:
            check_arguments(config, self.surrogate)
        super().__init__(*args, **options)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Record):
                callback.attach(self)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.surrogate is None:
            return super()._compute_loss(model, inputs)
        stand_in = LossAdvantages(inputs["advantages"])
        with watched(self, LOGPROBS, lambda outputs, *_: self.set_losses(stand_in, inputs, outputs[0])):
            loss = super()._compute_loss(model, inputs | {"advantages": stand_in})
        if stand_in.losses is None:
            raise RuntimeError(f"the loss of TRL {trl.__version__} takes another way: {TRIED}")
        return loss

    def set_losses(self, stand_in: LossAdvantages, inputs: dict[str, Any], logprobs: Tensor) -> None:
        """The surrogate's, as soon as TRL has a microbatch's log-probs."""
        surrogate = self.surrogate.bind_step(self.state.global_step)
        old = old_logprobs(inputs, logprobs)
        stand_in.losses, metrics = token_losses(surrogate, logprobs, old, stand_in.advantages, loss_mask(inputs))
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            mean = self.accelerator.gather(value).nanmean().item()
            if not math.isnan(mean):
                self._metrics[mode][f"surrogate/{name}"].append(mean)


def old_logprobs(inputs: dict[str, Any], logprobs: Tensor) -> Tensor:
    """(B, T) that TRL forms ratios against: the policy's own where it keeps none."""
    kept = inputs.get("old_per_token_logps")
    return logprobs.detach() if kept is None else kept


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def check_trainer(kind: type, args: trl.GRPOConfig | None) -> None:
    """Raise ValueError unless a class computes its loss by TRL's methods, which the bridge and `Record` go through."""
    if getattr(args, "use_liger_kernel", False):
        raise ValueError("use_liger_kernel=True computes a loss of its own, without log-probs: leave it out")
    for name in ("_compute_loss", LOGPROBS, "_calculate_rewards"):
        if not hasattr(kind, name):
            raise ValueError(f"{kind.__name__} of TRL {trl.__version__} has no method {name}: {TRIED}")
    module = kind.compute_loss.__module__
    if not module.startswith("trl."):
        fix = "use TRL's trainer without what replaces it (Unsloth: import pspo_bridge.trl before unsloth)"
        raise ValueError(f"compute_loss of {kind.__name__} is {module}'s, not TRL's: it passes the bridge by; {fix}")


def check_arguments(args: trl.GRPOConfig, surrogate: Surrogate) -> None:
    """Raise ValueError for arguments of TRL's own losses that say anything else than the surrogate does."""
    if args.loss_type not in AGGREGATIONS:
        fix = f"loss_type says how losses are averaged: one of {', '.join(AGGREGATIONS)}"
        raise ValueError(f"loss_type={args.loss_type!r} is a loss of TRL's: name it as surrogate=; {fix}")
    own = {name: value for name, value in vars(surrogate).items() if value is not None}
    own = {"epsilon_high": own.get("epsilon")} | own
    for name, value in vars(args).items():
        if name.startswith(REPLACED) and value not in (None, own.get(name), getattr(type(args), name)):
            raise ValueError(f"{name}={value!r} has no effect here: leave it out; it is an argument of surrogate=")


class Record(TrainerCallback):
    """Writes a run folder for ``pspo view``, ``report`` and ``compare``: settings, all that TRL logs, and completions
    and tokens of each rollout's first groups, on process 0. It changes no bit of the training.

    Methods stand in the order in which TRL calls them: `on_train_begin`; for each rollout `watch_rollout`; for each
    microbatch `watch_loss`, then the hook of `add_microbatch` in its backward pass; after each optimizer step
    `on_step_end` and `on_log`, which also ends the run. `forget` lists what is kept between these calls.

    The weight of a token is d loss / d logprob of TRL's own backward pass, after masks, corrections and KL, times the
    step's number of tokens. It lacks the gradients of an entropy bonus and of a router's loss.

    Args:
        folder: of the run: a new one, or with `resume_from_checkpoint` that of the run that is resumed.
        groups: per rollout whose completions and tokens are recorded, at least 1.
    """

    def __init__(self, folder: str | Path, groups: int = 2) -> None:
        if groups < 1:
            raise ValueError(f"groups must be at least 1; got {groups}")
        self.folder = Path(folder)
        self.groups = groups
        self.trainer: trl.GRPOTrainer | None = None
        self.forget()

    def forget(self) -> None:
        """Forget an earlier run, and what an interrupted one left."""
        self.rows = 0  # drawn so far
        self.problems: dict[str, int] = {}  # numbers of prompts, in the order in which they come
        self.line: dict[str, Any] = {}  # of metrics.jsonl, the last one
        self.line_begins = 0  # bytes before it
        self.microbatches: list[dict[str, Tensor]] = []  # (n,), of the optimizer step that is computed
        self.statistics: dict[str, float] = {}  # of a rollout's last step, for its line
        self.forget_rollout()

    def forget_rollout(self) -> None:
        self.samples: dict[int, dict[str, Any]] = {}  # lines of samples.jsonl, by row
        self.tokens: list[pd.DataFrame] = []  # of each sample
        self.visits: list[dict[str, Any]] = []  # by optimizer step, columns of tokens.parquet

    def attach(self, trainer: trl.GRPOTrainer) -> "Record":
        """Record a trainer's runs. ValueError if its loss is not TRL's."""
        if self.trainer is trainer:
            return self
        check_trainer(type(trainer), trainer.args)
        self.trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        trainer._compute_loss = partial(self.watch_loss, trainer._compute_loss)  # on the instance: its class stays
        generate_and_score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = partial(self.watch_rollout, generate_and_score)
        return self

    def on_train_begin(self, args: trl.GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None:
            raise ValueError(f"Record({str(self.folder)!r}) records no trainer: call its method attach(trainer)")
        self.forget()
        if state.is_world_process_zero:
            self.keep_steps(state.global_step)
            (self.folder / TOKENS).mkdir(parents=True, exist_ok=True)
            settings = run_settings(self.trainer, args, state.max_steps, self.folder)
            (self.folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")

    def keep_steps(self, step: int) -> None:
        """Remove what a run recorded after the checkpoint that is resumed; ValueError for a run that is not resumed."""
        if step == 0 and (self.folder / "metrics.jsonl").exists():
            raise ValueError(f"{self.folder} holds a run already: resume it, or give Record another folder")
        for file in self.folder.glob("*.jsonl"):
            lines = file.read_bytes().split(b"\n")[:-1]  # without one that was cut off by a kill
            records = [json.loads(line) for line in lines]
            kept = [record for record in records if record["step"] <= step]
            file.write_text(as_lines(kept), encoding="utf-8")
            self.problems |= {json.dumps(one["prompt"]): one["problem"] for one in kept if "prompt" in one}
        for file in (self.folder / TOKENS).glob("step-*.parquet"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def watch_rollout(self, generate_and_score: Callable[..., Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: list[tuple] = []  # rewards, with TRL's arguments
        with watched(self.trainer, "_calculate_rewards", lambda *call: scored.append(call)):
            outputs = generate_and_score(inputs)
        rows = range(self.rows, self.rows + len(inputs))
        self.rows += len(inputs)
        outputs["row"] = torch.tensor(rows, device=outputs["completion_ids"].device)  # TRL shuffles them
        if self.trainer.model.training:
            self.add_rollout(inputs, scored[0], outputs["advantages"], rows)
        return outputs

    def add_rollout(self, inputs: list[dict[str, Any]], scored: tuple, advantages: Tensor, rows: range) -> None:
        """Keep the samples of a rollout's first groups, and their tokens."""
        rewards, *_, completion_ids = scored  # of all processes, and before masks hide some tokens
        trainer = self.trainer
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # it may be a processor
        own_rewards = rewards[trainer.accelerator.process_index * len(inputs) :].tolist()
        stops = stop_ids(trainer, tokenizer)
        for i, row in enumerate(rows[: self.groups * trainer.num_generations]):
            prompt = json.dumps(inputs[i].get("prompt", ""), default=str)
            ids = list(completion_ids[i])
            values = [None if math.isnan(value) else value for value in own_rewards[i]]
            weighted = zip(trainer.reward_weights.tolist(), values, strict=True)
            place = {
                "problem": self.problems.setdefault(prompt, len(self.problems)),
                "sample": i % trainer.num_generations,
            }
            tokens = {"token_id": ids, "text": token_texts(tokenizer, ids), "position": range(len(ids))}
            self.tokens.append(pd.DataFrame(tokens).assign(drawn=row, row=len(self.samples), **place))
            self.samples[row] = place | {
                "prompt": json.loads(prompt),
                "gold": next((inputs[i][name] for name in GOLD if name in inputs[i]), None),
                "completion": tokenizer.decode(ids, skip_special_tokens=True),
                "reward": sum(weight * value for weight, value in weighted if value is not None),
                "advantage": advantages[i].flatten()[0].item(),
                "tokens": len(ids),
                "truncated": not ids or ids[-1] not in stops,
                "rewards": dict(zip(trainer.reward_func_names, values, strict=True)),
            }

    def watch_loss(self, compute_loss: Callable[..., Tensor], model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.trainer.model.training:
            return compute_loss(model, inputs)
        with watched(self.trainer, LOGPROBS, partial(self.add_microbatch, inputs)):
            return compute_loss(model, inputs)

    def add_microbatch(self, inputs: dict[str, Any], outputs: tuple[Tensor, ...], *_: Any) -> None:
        """Keep what an optimizer step computes at a microbatch's n tokens, (n,), and the gradient once it is there."""
        logprobs, entropies, *_ = outputs
        mask = loss_mask(inputs)  # (b, t)
        advantages = inputs["advantages"]
        values = {
            "logprob": logprobs.detach(),
            "old_logprob": old_logprobs(inputs, logprobs),
            "sampler_logprob": inputs.get("sampling_per_token_logps"),
            "reference_logprob": inputs.get("ref_per_token_logps"),
            "entropy": entropies.detach(),
            "advantage": advantages if advantages.dim() == 2 else advantages[:, None],
            "drawn": inputs["row"][:, None],
            "position": torch.arange(logprobs.shape[1], device=logprobs.device),
        }
        microbatch = {name: value.expand_as(mask)[mask].cpu() for name, value in values.items() if value is not None}
        self.microbatches.append(microbatch)

        def keep_gradient(gradient: Tensor) -> None:
            scaler = self.trainer.accelerator.scaler  # of float16
            microbatch["weight"] = gradient[mask].cpu() / (1.0 if scaler is None else scaler.get_scale())

        logprobs.register_hook(keep_gradient)

    def on_step_end(self, args: trl.GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Keep the step's visits to the samples' tokens; after the rollout's last step write them."""
        if not self.microbatches:
            raise RuntimeError(f"the loss of TRL {trl.__version__} takes another way than Record knows: {TRIED}")
        step = {name: torch.cat([one[name] for one in self.microbatches]) for name in self.microbatches[0]}
        step["weight"] *= len(step["weight"])
        self.microbatches = []
        is_recorded = torch.isin(step["drawn"], torch.tensor(list(self.samples)))
        visit = pd.DataFrame({name: values[is_recorded].double().numpy() for name, values in step.items()})
        visit = visit.merge(pd.concat(self.tokens), on=["drawn", "position"])
        self.visits.append(dict(visit.assign(step=state.global_step)))
        if self.trainer._step % (args.steps_per_generation * self.trainer.num_iterations) == 0:
            self.statistics = step_statistics(step)
            self.write_rollout()

    def write_rollout(self) -> None:
        """Write samples and tokens of the rollout that was trained on, and forget them."""
        if self.visits and self.trainer.accelerator.is_main_process:
            step = self.trainer.state.global_step
            with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(as_lines({"step": step} | sample for sample in self.samples.values()))
            write_tokens(self.folder, step, self.visits)
        self.forget_rollout()

    def on_log(self, args: trl.GRPOConfig, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write the step's line of metrics.jsonl, which training and evaluation share; last, summary.json."""
        if "train_runtime" in logs:
            self.finish(state, logs)
        elif state.is_world_process_zero and self.folder.exists():  # not of an evaluation before the training
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as lines:
                if self.line.get("step") != state.global_step:
                    self.line = {"step": state.global_step}
                    self.line_begins = lines.tell()
                self.line |= {metric_name(name): value for name, value in logs.items()}
                if "loss" in logs:
                    self.line |= self.statistics
                    self.statistics = {}
                lines.truncate(self.line_begins)
                lines.write(as_lines([self.line]))

    def finish(self, state: Any, logs: dict[str, Any]) -> None:
        self.write_rollout()
        if state.is_world_process_zero:
            summary = {"trainer": "trl", "optimizer_steps": state.global_step, "tokens": state.num_input_tokens_seen}
            summary |= {"seconds": logs["train_runtime"]} | logs
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def step_statistics(tokens: dict[str, Tensor]) -> dict[str, float]:
    """Diagnostics of a step, and its slope as `token_losses` has it."""
    active = {name: values[tokens["advantage"] != 0] for name, values in tokens.items()}
    slopes = active["weight"] / -active["advantage"] / (active["logprob"] - active["old_logprob"]).exp()
    names = ("logprob", "old_logprob", "advantage", "weight", "drawn")
    return diagnose(*(active[name] for name in names)) | {"slope": slopes.mean().item() if len(slopes) else math.nan}


def metric_name(name: str) -> str:
    """The name in metrics.jsonl of what TRL logs; ``rewards/f/mean`` is ``reward/f``."""
    for prefix, ours in (("rewards/", "reward/"), ("eval_rewards/", "validation_reward/")):
        if name.startswith(prefix) and name.endswith("/mean"):
            return ours + name.removeprefix(prefix).removesuffix("/mean")
    return METRICS.get(name, name)


def as_lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, default=str) + "\n" for record in records)


def stop_ids(trainer: trl.GRPOTrainer, tokenizer: PreTrainedTokenizerBase) -> set[int | None]:
    """Ids of which one ends a completion that is not truncated; a model may have several."""
    ids = trainer.accelerator.unwrap_model(trainer.model).generation_config.eos_token_id
    return {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id, tokenizer.pad_token_id}


def surrogate_settings(trainer: trl.GRPOTrainer, args: trl.GRPOConfig) -> dict[str, Any]:
    """The surrogate as config.yaml names it; of a loss of TRL's the one that it is."""
    surrogate = getattr(trainer, "surrogate", None)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if surrogate is not None:
        kind, fields = type(surrogate), dataclasses.asdict(surrogate) if dataclasses.is_dataclass(surrogate) else {}
    elif args.loss_type == "cispo":
        kind, fields = CISPO, {"epsilon_high": high - 1}  # TRL's is the bound itself
    elif args.loss_type == "sapo":
        kind, fields = SAPO, {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
    elif args.loss_type == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        kind, fields = VESPO, {name: getattr(args, f"vespo_{name}") for name in names}
    elif args.importance_sampling_level == "sequence":
        kind, fields = GSPO, {"epsilon": args.epsilon, "epsilon_high": high}
    else:
        kind, fields = Clip, {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high, "delta": args.delta}
    module = "pspo.losses" if kind.__name__ in BUILT_IN else kind.__module__
    return {"class_path": f"{module}.{kind.__name__}", "init_args": fields}


def run_settings(trainer: trl.GRPOTrainer, args: trl.GRPOConfig, max_steps: int, folder: Path) -> dict[str, Any]:
    """TRL's arguments as switches of pspo: those that docs/guide/trl.md translates."""
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
            "surrogate": surrogate_settings(trainer, args),
            "epochs": args.num_iterations,
            "minibatches": max(1, args.steps_per_generation // args.gradient_accumulation_steps),
            "aggregation": args.loss_type,
            "advantages": args.scale_rewards,
            "beta": args.beta,
        },
        "optimizer": {"lr": args.learning_rate, "max_grad_norm": args.max_grad_norm},
        "run": {"output_dir": str(folder), "seed": args.seed, "max_steps": max_steps},
    }
