"""Record the run of any `trl.GRPOTrainer` for ``pspo view`` and ``pspo report``.

`Record` watches the trainer, `Rollout` holds the records of the current rollout, `RunFolder` writes them.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
import trl
import yaml
from torch import Tensor
from transformers import TrainerCallback

from pspo.losses import CISPO, GSPO, SAPO, VESPO, Clip, diagnose
from pspo.token_table import TOKENS, token_texts, write_tokens
from pspo_bridge import BUILT_IN

TRIED = "pip install trl==1.16.0"
LOGPROBS = "_get_per_token_logps_and_entropies"  # a method of TRL's loss
METRICS = {  # TRL's name of a metric: its name in metrics.jsonl
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
GOLD = ("answer", "solution", "gold", "ground_truth", "target")  # columns in which datasets hold the gold answer


@contextmanager
def watched(trainer: trl.GRPOTrainer, method: str, see: Callable[..., None]) -> Iterator[None]:
    """Inside the context, every call of this method also calls ``see`` with its result and positional arguments."""
    call = getattr(trainer, method)

    def call_and_see(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        see(outputs, *args)
        return outputs

    with patch.object(trainer, method, call_and_see):
        yield


def loss_tensors(inputs: dict[str, Any], logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Old log-probs (B, T), advantages (B, 1) or (B, T), and mask (B, T) of a microbatch, as TRL's loss uses them."""
    old = inputs.get("old_per_token_logps")
    old = logprobs.detach() if old is None else old
    return old, inputs["advantages"].view(len(old), -1), (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def check_trainer(kind: type, args: trl.GRPOConfig | None) -> None:
    """Raise ValueError unless a class computes its loss by the methods of TRL that the bridge and `Record` watch."""
    if getattr(args, "use_liger_kernel", False):
        raise ValueError("use_liger_kernel=True computes a loss of its own, without log-probs: leave it out")
    for name in ("_compute_loss", LOGPROBS, "_calculate_rewards"):
        if not hasattr(kind, name):
            raise ValueError(f"{kind.__name__} of TRL {trl.__version__} has no method {name}: {TRIED}")
    module = kind.compute_loss.__module__
    if not module.startswith("trl."):
        fix = "use TRL's trainer without what replaces it (Unsloth: import pspo_bridge.trl before unsloth)"
        raise ValueError(f"compute_loss of {kind.__name__} is {module}'s, not TRL's: it passes the bridge by; {fix}")


class RunFolder:
    """The files of a run, as pspo writes them."""

    def __init__(self, path: Path, step: int) -> None:
        """Continue after ``step``, the step of the resumed checkpoint: delete what was recorded later.

        Raises ValueError if ``step`` is 0 and the folder holds a run.
        """
        self.path = path
        self.problems: dict[str, int] = {}  # by prompt its number, in order of appearance
        self.line: dict[str, Any] = {}  # the last line of metrics.jsonl
        self.line_begins = 0  # bytes of the file before that line
        if step == 0 and (path / "metrics.jsonl").exists():
            raise ValueError(f"{path} holds a run already: resume it, or give Record another folder")
        (path / TOKENS).mkdir(parents=True, exist_ok=True)
        for file in path.glob("*.jsonl"):
            lines = file.read_bytes().split(b"\n")[:-1]  # without the rest of a line that a kill cut off
            kept = [record for record in map(json.loads, lines) if record["step"] <= step]
            shortened = file.with_suffix(".new")
            shortened.write_text(as_lines(kept), encoding="utf-8")
            shortened.replace(file)  # a kill in between loses nothing
            self.problems |= {json.dumps(one["prompt"]): one["problem"] for one in kept if "prompt" in one}
        for file in (path / TOKENS).glob("step-*.parquet"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def add_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Add to the step's line of metrics.jsonl, which training and evaluation share."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            if self.line.get("step") != step:
                self.line = {"step": step}
                self.line_begins = lines.tell()
            self.line |= metrics
            lines.truncate(self.line_begins)
            lines.write(as_lines([self.line]))

    def write_rollout(self, step: int, rollout: "Rollout") -> None:
        """Write the samples and tokens of a rollout that ends with this step."""
        with (self.path / "samples.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(as_lines({"step": step} | sample for sample in rollout.samples))
        write_tokens(self.path, step, rollout.visits)


def as_lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, default=str) + "\n" for record in records)


@dataclass
class Rollout:
    """Records of one rollout, or of several if a rollout ends inside an optimizer step."""

    drawn: int = 0  # number of completions so far; the next one has this number
    samples: list[dict[str, Any]] = field(default_factory=list)  # lines of samples.jsonl, of the first groups
    tokens: list[pd.DataFrame] = field(default_factory=list)  # a table for each sample
    microbatches: list[dict[str, Tensor]] = field(default_factory=list)  # tensors (n,), of the current optimizer step
    visits: list[dict[str, Any]] = field(default_factory=list)  # columns of tokens.parquet, a dict for each step


class Record(TrainerCallback):
    """Write a run folder: the settings, all that TRL logs, completions and tokens of each rollout's first groups.

    Process 0 writes. Recording changes no bit of the training. Methods stand in the order in which TRL calls them.

    The weight of a token is d loss / d logprob of TRL's own backward pass, after masks, corrections and KL, times the
    step's number of tokens. It lacks the gradients of an entropy bonus and of a router's loss.

    Args:
        folder: the run's folder: a new one, or with `resume_from_checkpoint` the folder of the resumed run.
        groups: number of groups of each rollout whose completions and tokens are recorded, at least 1.
    """

    def __init__(self, folder: str | Path, groups: int = 2) -> None:
        if groups < 1:
            raise ValueError(f"groups must be at least 1; got {groups}")
        self.path = Path(folder)
        self.groups = groups
        self.trainer: trl.GRPOTrainer | None = None
        self.folder: RunFolder | None = None  # on process 0, once a run begins
        self.rollout = Rollout()
        self.statistics: dict[str, float] = {}  # of the last step of a rollout, for the next line of metrics.jsonl

    def attach(self, trainer: trl.GRPOTrainer) -> None:
        """Record a trainer's runs. Raises ValueError if the trainer's loss is not TRL's."""
        if self.trainer is trainer:
            return
        check_trainer(type(trainer), trainer.args)
        self.trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        trainer._compute_loss = partial(self.watch_loss, trainer._compute_loss)  # the class stays as it is
        generate_and_score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = partial(self.watch_rollout, generate_and_score)

    def on_train_begin(self, args: trl.GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None:
            raise ValueError(f"Record({str(self.path)!r}) records no trainer: call its method attach(trainer)")
        self.rollout = Rollout()  # an interrupted run leaves a partial rollout
        self.statistics = {}
        if state.is_world_process_zero:
            self.folder = RunFolder(self.path, state.global_step)
            settings = run_settings(self.trainer, args, state.max_steps, self.path)
            (self.path / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")

    def watch_rollout(self, generate_and_score: Callable[..., Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: list[tuple] = []  # rewards, then the arguments of TRL's call
        with watched(self.trainer, "_calculate_rewards", lambda *call: scored.append(call)):
            outputs = generate_and_score(inputs)
        if self.trainer.model.training:
            numbers = range(self.rollout.drawn, self.rollout.drawn + len(inputs))
            self.rollout.drawn += len(inputs)
            outputs["drawn"] = torch.tensor(numbers, device=outputs["completion_ids"].device)  # TRL shuffles the rows
            if self.folder is not None:
                self.add_samples(inputs, scored[0], outputs["advantages"], numbers)
        return outputs

    def add_samples(self, inputs: list[dict[str, Any]], scored: tuple, advantages: Tensor, numbers: range) -> None:
        """Keep the samples of a rollout's first groups, and their tokens."""
        rewards, *_, completion_ids = scored  # ids before masking; rewards of all processes, process 0 first
        trainer = self.trainer
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # or a processor
        eos = trainer.accelerator.unwrap_model(trainer.model).generation_config.eos_token_id  # some models have several
        stop_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id, tokenizer.pad_token_id}
        problems = self.folder.problems
        for i, number in enumerate(numbers[: self.groups * trainer.num_generations]):
            prompt = json.dumps(inputs[i].get("prompt", ""), default=str)
            ids = list(completion_ids[i])
            values = [None if math.isnan(value) else value for value in rewards[i].tolist()]
            weighted = zip(trainer.reward_weights.tolist(), values, strict=True)
            place = {"problem": problems.setdefault(prompt, len(problems)), "sample": i % trainer.num_generations}
            tokens = {"token_id": ids, "text": token_texts(tokenizer, ids), "position": range(len(ids))}
            row = len(self.rollout.samples)
            self.rollout.tokens.append(pd.DataFrame(tokens).assign(drawn=number, row=row, **place))
            sample = place | {
                "prompt": json.loads(prompt),
                "gold": next((inputs[i][name] for name in GOLD if name in inputs[i]), None),
                "completion": tokenizer.decode(ids, skip_special_tokens=True),
                "reward": sum(weight * value for weight, value in weighted if value is not None),
                "advantage": advantages[i].flatten()[0].item(),
                "tokens": len(ids),
                "truncated": not ids or ids[-1] not in stop_ids,
                "rewards": dict(zip(trainer.reward_func_names, values, strict=True)),
            }
            self.rollout.samples.append(sample)

    def watch_loss(self, compute_loss: Callable[..., Tensor], model: Any, inputs: dict[str, Any]) -> Tensor:
        with watched(self.trainer, LOGPROBS, partial(self.add_microbatch, inputs)):
            return compute_loss(model, inputs)

    def add_microbatch(self, inputs: dict[str, Any], outputs: tuple[Tensor, ...], *_: Any) -> None:
        """Keep a microbatch's values at its n unmasked tokens, (n,) each; the backward pass adds the gradient."""
        if not self.trainer.model.training:
            return
        logprobs, entropies, *_ = outputs
        old_logprobs, advantages, mask = loss_tensors(inputs, logprobs)
        values = {
            "logprob": logprobs.detach(),
            "old_logprob": old_logprobs,
            "sampler_logprob": inputs.get("sampling_per_token_logps"),
            "reference_logprob": inputs.get("ref_per_token_logps"),
            "entropy": entropies.detach(),
            "advantage": advantages,
            "drawn": inputs["drawn"][:, None],
            "position": torch.arange(logprobs.shape[1], device=logprobs.device),
        }
        microbatch = {name: value.expand_as(mask)[mask].cpu() for name, value in values.items() if value is not None}
        self.rollout.microbatches.append(microbatch)

        def keep_gradient(gradient: Tensor) -> None:
            scaler = self.trainer.accelerator.scaler  # None unless in float16
            microbatch["weight"] = gradient[mask].cpu() / (1.0 if scaler is None else scaler.get_scale())

        logprobs.register_hook(keep_gradient)

    def on_step_end(self, args: trl.GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Keep this step's values at the samples' tokens (a visit); after the rollout's last step, write all visits."""
        rollout = self.rollout
        if not rollout.microbatches:
            raise RuntimeError(f"TRL {trl.__version__} computes its loss by methods unknown to Record: {TRIED}")
        step = {name: torch.cat([one[name] for one in rollout.microbatches]) for name in rollout.microbatches[0]}
        step["weight"] *= len(step["weight"])
        rollout.microbatches = []
        if self.folder is not None:
            visit = pd.DataFrame({name: values.double().numpy() for name, values in step.items()})
            visit = visit.merge(pd.concat(rollout.tokens), on=["drawn", "position"])
            rollout.visits.append(dict(visit.assign(step=state.global_step)))
        if self.trainer._step % (args.steps_per_generation * self.trainer.num_iterations) == 0:
            self.statistics = step_statistics(step)
            self.end_rollout(state.global_step)

    def end_rollout(self, step: int) -> None:
        if self.rollout.visits:
            self.folder.write_rollout(step, self.rollout)
        self.rollout = Rollout()

    def on_log(self, args: trl.GRPOConfig, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write what TRL logs; at the end of the training, write the run's totals."""
        if self.folder is None:  # not process 0, or an evaluation before the training
            return
        if "train_runtime" in logs:
            self.end_rollout(state.global_step)
            summary = {"trainer": "trl", "optimizer_steps": state.global_step, "tokens": state.num_input_tokens_seen}
            summary |= {"seconds": logs["train_runtime"]} | logs
            (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            return
        metrics = {metric_name(name): value for name, value in logs.items()}
        self.folder.add_metrics(state.global_step, metrics | self.statistics)
        self.statistics = {}


def step_statistics(tokens: dict[str, Tensor]) -> dict[str, float]:
    """Return the diagnostics of a step, and its ``slope``, which `token_losses` defines."""
    active = {name: values[tokens["advantage"] != 0] for name, values in tokens.items()}
    slopes = active["weight"] / -active["advantage"] / (active["logprob"] - active["old_logprob"]).exp()
    names = ("logprob", "old_logprob", "advantage", "weight", "drawn")
    return diagnose(*(active[name] for name in names)) | {"slope": slopes.mean().item() if len(slopes) else math.nan}


def metric_name(name: str) -> str:
    """Return the name in metrics.jsonl of a metric of TRL's; ``rewards/f/mean`` becomes ``reward/f``."""
    for prefix, ours in (("rewards/", "reward/"), ("eval_rewards/", "validation_reward/")):
        if name.startswith(prefix) and name.endswith("/mean"):
            return ours + name.removeprefix(prefix).removesuffix("/mean")
    return METRICS.get(name, name)


def surrogate_settings(trainer: trl.GRPOTrainer, args: trl.GRPOConfig) -> dict[str, Any]:
    """Return the surrogate as config.yaml names it; for one of TRL's own losses, the surrogate that equals it."""
    surrogate = getattr(trainer, "surrogate", None)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if surrogate is not None:
        kind, arguments = type(surrogate), asdict(surrogate) if is_dataclass(surrogate) else {}
    elif args.loss_type == "cispo":
        kind, arguments = CISPO, {"epsilon_high": high - 1}  # TRL's epsilon_high is the bound itself
    elif args.loss_type == "sapo":
        kind, arguments = SAPO, {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
    elif args.loss_type == "vespo":
        kind, arguments = VESPO, {one.name: getattr(args, f"vespo_{one.name}") for one in fields(VESPO)}
    elif args.importance_sampling_level == "sequence":
        kind, arguments = GSPO, {"epsilon": args.epsilon, "epsilon_high": high}
    else:
        kind, arguments = Clip, {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high, "delta": args.delta}
    module = "pspo.losses" if kind.__name__ in BUILT_IN else kind.__module__
    return {"class_path": f"{module}.{kind.__name__}", "init_args": arguments}


def run_settings(trainer: trl.GRPOTrainer, args: trl.GRPOConfig, max_steps: int, folder: Path) -> dict[str, Any]:
    """Return TRL's arguments as switches of pspo, translated as in docs/guide/trl.md."""
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
