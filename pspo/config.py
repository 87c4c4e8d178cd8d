"""Configuration of training and evaluation: nested frozen dataclasses with a field and ``--help`` per switch.

The defaults are the embedded default run, spelled out in ``configs/tiny.yaml``. A value out of range raises ValueError
naming its switch, before any model is loaded.
"""

import math
import operator
import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, Literal

from pspo import losses
from pspo.tasks.datasets import SOURCES, DataSpec, Source
from pspo.tasks.problem import SYSTEM_PROMPT, AnswerKind
from pspo.tasks.rewards import MathReward, Reward
from pspo.tasks.scoring import OnError, Scoring
from pspo.tasks.workers import check_importable

Advantages = Literal["none", "group", "batch", "rloo", "maxrl", "gdpo"]
Decoder = Literal["auto", "pspo", "graphs", "hf"]


def require(ok: object, switch: str, rule: str, value: object) -> None:
    """Raise ValueError, naming the switch, unless ok."""
    if not ok:
        raise ValueError(f"--{switch} {rule}, got {value!r}")


COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
Fact = Literal[
    "basic",  # `--help` shows it, `--help all` every switch
    "main",  # from Python its value alone may stand for the section: model="tiny-math"
    "path",  # a path of this machine, or a name: ~ is the home folder, and model cards leave it out
    "mapping",  # a mapping of the user's keys
    "class",  # the import path of a class, or {class_path: ..., init_args: {...}}
    "free",  # may differ when a run is resumed: no number depends on it, unless a reward fails
    "may grow",  # may be raised when a run is resumed at a constant learning rate
    "no setting",  # comparisons of runs ignore it: files, logs, processes, memory, seeds
]
NO_SWITCH = {"is_switch": False}  # metadata of fields that are no switches


def switch(default: Any, text: str, *facts: Fact, **limits: float) -> Any:
    """Field of a section, from its default (or a function that makes the default), its help text and its facts.

    The limits of a number have the names of `COMPARISONS`: at_least=0.
    """
    metadata = {"text": text, "facts": facts, "limits": limits}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Section:
    """Base of the configuration's sections: frozen dataclasses that check and complete their switches' values."""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section = f"{name}." if name else ""

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            facts = part.metadata.get("facts", ())
            if "path" in facts and isinstance(value, str):
                object.__setattr__(self, part.name, os.path.expanduser(value))
            if "class" in facts and isinstance(value, str):
                object.__setattr__(self, part.name, None if value == "null" else {"class_path": value})
            limits = part.metadata.get("limits")
            if limits and value is not None:
                fits = [abs(value) < math.inf, *(COMPARISONS[name](value, limit) for name, limit in limits.items())]
                rules = ["finite", *(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())]
                require(all(fits), f"{self.section}{part.name}", f"must be {' and '.join(rules)}", value)


@dataclass(frozen=True)
class LoraConfig(Section, name="model.lora"):
    """LoRA adapters: the model is frozen, and only small matrices next to its linear layers are trained."""

    rank: int = switch(0, "rank of new adapters; 0 for none", "basic", at_least=0)
    alpha: float = switch(32.0, "new adapters' output is scaled by alpha / rank", above=0)
    target_modules: str | list[str] = switch("all-linear", "layers with new adapters, by name or a regular expression")
    name_or_path: str | None = field(default=None, metadata=NO_SWITCH)  # a PEFT folder: `resolve_adapters` sets it


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """Model and numerics."""

    name_or_path: str = switch(
        "tiny-base", "tiny-base, tiny-math, tiny-text, a folder or a hub id", "basic", "main", "path"
    )
    revision: str | None = switch(None, "branch, tag or commit on the hub")
    dtype: Literal["auto", "float32", "bfloat16"] = switch("auto", "weights; auto: float32, frozen ones as autocast")
    autocast: Literal["auto", "bf16", "none"] = switch("auto", "bf16 over float32 weights; auto: on GPUs that have it")
    gradient_checkpointing: bool = switch(False, "compute activations again: less memory, slower", "no setting")
    attn_implementation: str | None = switch(None, "sdpa, eager, flash_attention_2; unset, transformers'", "no setting")
    trust_remote_code: bool = switch(False, "run Python code that comes with the model")
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters are trained; for a PEFT folder, only after `resolve_adapters`."""
        return self.lora.rank > 0 or self.lora.name_or_path is not None


@dataclass(frozen=True)
class DataConfig(Section, DataSpec, name="data"):
    """Problems and prompts."""

    name: str = switch(
        "arithmetic", "letters, sums, gsm8k, math, svamp, asdiv, a hub id; several with +", "basic", "main"
    )
    path: str | None = switch(None, "local file or folder that has the data", "basic", "path", "free", "no setting")
    hub: dict[str, str | dict[str, str]] = switch(dict, "config, revision, and splits: {train: NAME, ...}", "mapping")
    limit: int | None = switch(None, "number of problems of the split to use; unset, all", "basic", above=0)
    seed: int = switch(0, "shuffles the problems and draws the validation split")
    columns: dict[str, str] = switch(dict, "your columns: {prompt: question, answer: label}", "basic", "mapping")
    answer_kind: AnswerKind | None = switch(None, "gold answers: number, text or none; unset, number (letters: text)")
    holdout: float | None = switch(
        None, "share that training holds out for a test; unset, a fifth", "basic", at_least=0, below=1
    )
    system_prompt: str | None = switch(None, 'system message, "" for none; unset, the paper\'s if answers are numbers')
    chat_template: dict[str, Any] | str | None = switch(None, "a Jinja file, or arguments", "path", "mapping")
    max_prompt_tokens: int = switch(512, "drop problems with longer prompts", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", {"prompt": "prompt", "answer": "answer"} | self.columns)
        if self.name == "arithmetic" and self.path is not None:
            object.__setattr__(self, "name", "file")
        for name, given, known in (
            ("hub", self.hub, ("config", "revision", "splits")),
            ("hub.splits", self.hub.get("splits", {}), ("train", "validation", "test")),
            ("columns", self.columns, ("prompt", "answer")),
        ):
            require({*given} <= {*known}, f"data.{name}", f"must have no keys but {', '.join(known)}", given)

    @property
    def numeric(self) -> bool:
        """True if all gold answers are numbers."""
        sources = [SOURCES.get(name, Source(name)) for name in self.name.split("+")]
        return all((self.answer_kind or source.answer_kind) == "number" for source in sources)

    @property
    def system_text(self) -> str:
        """System prompt in effect."""
        if self.system_prompt is not None:
            return self.system_prompt
        return SYSTEM_PROMPT if self.numeric else ""


@dataclass(frozen=True)
class RewardConfig(Section, Scoring, name="reward"):
    """Reward: a weighted sum of functions."""

    functions: list[Reward | Callable] = switch(lambda: [MathReward()], "rewards, by name or path", "basic", "main")
    weights: list[float] | None = switch(None, "one weight per function; unset, all 1", "basic")
    timeout: float = switch(0.0, "seconds for a prompt's completions; 0: no limit", "free", "no setting", at_least=0)
    on_error: OnError = switch("raise", "raise, or none: that prompt's advantages are 0", "free", "no setting")
    workers: int = switch(0, "worker processes; 0: none, or one with a timeout", "free", "no setting", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout > 0:
            object.__setattr__(self, "workers", max(self.workers, 1))
        if self.workers > 0:
            for function in self.functions:
                check_importable(function)
        if self.weights is not None:
            is_complete = len(self.weights) == len(self.functions) and all(map(math.isfinite, self.weights))
            rule = f"must have one finite weight for each of {len(self.functions)} rewards"
            require(is_complete, "reward.weights", rule, self.weights)


@dataclass(frozen=True)
class RolloutConfig(Section, name="rollout"):
    """Sampling of completions."""

    prompts: int = switch(32, "prompts per rollout", "basic", above=0)
    group_size: int = switch(4, "completions per prompt, at least 2", "basic", at_least=2)
    max_completion_tokens: int = switch(128, "maximum length of a completion", "basic", above=0)
    stop_tokens: list[str] | None = switch(None, "tokens that end a completion; unset, the model's and its template's")
    stop_strings: list[str] = switch(list, 'texts that end a completion, too, such as "Question:"')
    temperature: float = switch(0.6, "sampling temperature, also applied to every log-prob", "basic", above=0)
    top_p: float = switch(0.85, "nucleus sampling mass", above=0, at_most=1)
    top_k: int = switch(0, "sample from the k most likely tokens; 0 for all", at_least=0)
    max_rows: int | None = switch(None, "completions decoded at a time; unset, by memory", "no setting", above=0)
    decoder: Decoder = switch("auto", "pspo, graphs (CUDA graphs), hf (transformers); auto, the fastest that can")
    engine: str | dict[str, Any] | None = switch(None, "class that draws, such as pspo_vllm.VLLM; unset, pspo", "class")
    environment: str | dict[str, Any] | None = switch(None, "class that answers the model; unset, one turn", "class")
    lag: int = switch(0, "train on each rollout after LAG later ones are sampled", at_least=0)
    resample: int = switch(0, "times that groups without a signal are replaced (DAPO's dynamic sampling)", at_least=0)

    @property
    def draws_by_engine(self) -> bool:
        """True if an engine draws whole rollouts, and not the turns of an environment's episodes."""
        return self.engine is not None and self.environment is None


@dataclass(frozen=True)
class AlgorithmConfig(Section, name="algorithm"):
    """Advantages and loss."""

    surrogate: losses.Surrogate = switch(losses.PSPO, "a class of pspo.losses, or your own by path", "basic", "main")
    terms: list[losses.Term | Callable] = switch(list, "import paths of changes to the surrogate's loss")
    epochs: int = switch(2, "passes over each rollout", "basic", above=0)
    minibatches: int = switch(1, "optimizer steps per pass", above=0)
    shuffle: bool = switch(False, "shuffle the minibatches again in each later pass")
    aggregation: losses.Aggregation | Callable = switch("dapo", "dapo, grpo, dr_grpo, or a function")
    advantages: Advantages | Callable = switch("none", "none, group, batch, rloo, maxrl, gdpo, or a function", "basic")
    beta: float = switch(0.0, "weight of the KL penalty to the reference model", "basic", at_least=0)
    kl_estimator: losses.KLEstimator = switch("k3", "k1, k2, k3, or unbiased_k3 (k3 times ratio)")
    reference: str | None = switch(None, "a model of the same vocabulary; unset, with beta, the initial model", "path")
    reference_every: int = switch(0, "rollouts after which the policy becomes the reference; 0: never", at_least=0)
    entropy_coef: float = switch(0.0, "weight of the entropy bonus", at_least=0)
    mask_truncated: bool = switch(False, "exclude completions that hit the token limit from the loss")
    nucleus: Literal["ignore", "replay"] = switch("ignore", "replay: log-probs over the tokens kept")
    ratio_to: Literal["behaviour", "proximal"] = switch("behaviour", "proximal: ratio to the policy before the update")
    correction: losses.Correction | Callable | None = switch(None, "weight by old / sampler probability")
    correction_cap: float = switch(3.0, "largest correction weight", above=0)
    correction_floor: float = switch(0.0, "smallest correction weight", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"must be at most algorithm.correction_cap ({self.correction_cap})"
        require(self.correction_floor <= self.correction_cap, "algorithm.correction_floor", rule, self.correction_floor)
        if self.reference_every > 0:
            rule = "needs --algorithm.beta above 0, and no --algorithm.reference, which is not replaced"
            require(self.beta > 0 and self.reference is None, "algorithm.reference_every", rule, self.reference_every)

    def ratios_to_engine(self, rollout: RolloutConfig) -> bool:
        """True if ratios are formed against an engine's own log-probs: the weights that drew are gone by then."""
        return rollout.draws_by_engine and rollout.lag > 0 and self.ratio_to == "behaviour"

    def is_off_policy(self, rollout: RolloutConfig) -> bool:
        """True if an engine draws, and the old log-probs are not the engine's own."""
        return rollout.draws_by_engine and not self.ratios_to_engine(rollout)

    def correction_for(self, rollout: RolloutConfig) -> losses.Correction | Callable:
        """The correction in effect for rollouts drawn as ``rollout`` says; "none" if nothing is corrected."""
        if self.correction is not None:
            return self.correction
        return "token_truncate" if self.is_off_policy(rollout) else "none"

    def check_rollouts(self, rollout: RolloutConfig) -> None:
        """Raise ValueError if a switch of this section does not fit the way rollouts are drawn."""
        rule = f"must not be above rollout.prompts ({rollout.prompts}): groups stay whole"
        require(self.minibatches <= rollout.prompts, "algorithm.minibatches", rule, self.minibatches)
        by_policy = rollout.engine is rollout.environment is None and rollout.decoder != "hf"  # which records log-probs
        rule = "must be none with --rollout.decoder hf, an environment, or ratios to an engine that lags"
        correction = self.correction_for(rollout)
        is_allowed = by_policy or self.is_off_policy(rollout) or correction == "none"
        require(is_allowed, "algorithm.correction", rule, correction)
        can_replay = by_policy and (rollout.top_p < 1 or rollout.top_k > 0)
        rule = "must be ignore with --rollout.decoder hf, an environment, an engine, or neither top_p nor top_k"
        require(can_replay or self.nucleus == "ignore", "algorithm.nucleus", rule, self.nucleus)


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """Optimizer and batch size in memory."""

    name: Literal["adamw", "adamw8bit", "paged_adamw8bit", "sgd"] = switch("adamw", "optimizer")
    lr: float | None = switch(None, "peak rate; unset, 3e-5 for small models, else 1e-6; LoRA: x 10", "basic", above=0)
    options: dict[str, Any] = switch(dict, "arguments of the optimizer's class: {weight_decay: 0.1}", "mapping")
    warmup_steps: int = switch(0, "optimizer steps of linear warm-up, from 0", at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = switch("constant", "linear and cosine: to 0 at run.max_steps")
    max_grad_norm: float = switch(1.0, "clip gradients to this global norm; 0 for no clipping", at_least=0)
    microbatch_tokens: int | None = switch(None, "tokens per pass; unset, by memory", "no setting", above=0)


@dataclass(frozen=True)
class RunConfig(Section, name="run"):
    """Length of the run, evaluation, checkpoints and logs."""

    output_dir: str | None = switch(None, "folder; unset, runs/...", "basic", "path", "free", "no setting")
    fork_from: str | None = switch(None, "start at a checkpoint of another run, or its newest", "path", "no setting")
    seed: int = switch(0, "seed of sampling and prompt order", "basic", "no setting", at_least=0, below=2**32)
    max_steps: int = switch(100, "optimizer steps", "basic", "may grow", above=0)
    max_tokens: int | None = switch(None, "end after this many prompt and completion tokens", "may grow", above=0)
    validate_every: int = switch(20, "steps between validations; 0 for none", "basic", "no setting", at_least=0)
    validation_limit: int = switch(128, "validation problems", "no setting", above=0)
    test_limit: int = switch(500, "test problems, before and after; 0 for none", "basic", "no setting", at_least=0)
    save_every: int = switch(50, "steps between checkpoints; 0: only at the end", "free", "no setting", at_least=0)
    keep: int = switch(2, "newest checkpoints to keep, besides the best model", "free", "no setting", above=0)
    record_tokens: int = switch(2, "groups per rollout whose texts and tokens are written", "no setting", at_least=0)
    quiet: bool = switch(False, "print no progress", "free", "no setting")
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = switch("none", "log there too", "free", "no setting")


@dataclass(frozen=True)
class DistributedConfig(Section, name="distributed"):
    """Several GPUs: one process each, started by torchrun."""

    strategy: Literal["none", "ddp", "fsdp2"] = switch("none", "ddp: whole models; fsdp2: shards", "no setting")


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model by reinforcement learning. Guide: README.md; defaults: configs/tiny.yaml."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self.algorithm.check_rollouts(self.rollout)
        rule = "must name at least one reward, or --algorithm.beta be above 0: on-policy distillation"
        require(self.reward.functions or self.algorithm.beta > 0, "reward.functions", rule, self.reward.functions)
        if self.distributed.strategy == "fsdp2":  # which cannot shard these
            name = self.optimizer.name
            require("8bit" not in name, "optimizer.name", "must be adamw or sgd under fsdp2, which shards it", name)
            every = self.algorithm.reference_every
            require(every == 0, "algorithm.reference_every", "must be 0 under fsdp2", every)

    @cached_property
    def correction(self) -> losses.Correction | Callable:
        """The correction in effect: --algorithm.correction if set, else what the rollouts need."""
        return self.algorithm.correction_for(self.rollout)

    @cached_property
    def loss_terms(self) -> list[losses.Term | Callable]:
        """The terms that are on, in the order in which they are called."""
        algorithm = self.algorithm
        terms = list(algorithm.terms)
        if self.correction != "none":
            bounds = (algorithm.correction_cap, algorithm.correction_floor)
            terms.append(losses.SamplerCorrection(self.correction, *bounds))
        if algorithm.beta > 0:
            terms.append(losses.KLPenalty(algorithm.beta, algorithm.kl_estimator))
        if algorithm.entropy_coef > 0:
            terms.append(losses.EntropyBonus(algorithm.entropy_coef))
        return terms

    @property
    def split_limits(self) -> dict[str, int | None]:
        """Splits that the run uses, each with its number of problems; None for all."""
        validation = self.run.validation_limit if self.run.validate_every else 0
        limits = {"train": self.data.limit, "validation": validation, "test": self.run.test_limit}
        return {split: limit for split, limit in limits.items() if limit != 0}

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError unless a minibatch's prompts divide evenly among the ranks."""
        if ranks > 1:
            parts = self.algorithm.minibatches * ranks
            rule = f"must be a multiple of algorithm.minibatches x ranks ({parts})"
            require(self.rollout.prompts % parts == 0, "rollout.prompts", rule, self.rollout.prompts)


@dataclass(frozen=True)
class EvalConfig(Section, name="eval"):
    """Sampling of completions and the split they are evaluated on."""

    split: Literal["train", "validation", "test"] = switch("test", "train, validation or test", "basic")
    temperatures: list[float] = switch(lambda: [0.0], "temperatures, each evaluated; 0 is greedy", "basic")
    samples: int = switch(1, "completions per problem at temperatures above 0", "basic", above=0)
    top_p: float = switch(1.0, "nucleus sampling mass", above=0, at_most=1)
    max_completion_tokens: int = switch(128, "maximum length of a completion", "basic", above=0)
    stop_tokens: list[str] | None = switch(None, "tokens that end a completion; unset, the model's and its template's")
    stop_strings: list[str] = switch(list, 'texts that end a completion, too, such as "Question:"')
    max_tokens: int = switch(65_536, "tokens decoded at a time; fewer save memory, the samples differ", above=0)
    environment: str | dict[str, Any] | None = switch(None, "environment's class, as in training", "class")

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "must be one or more finite numbers of at least 0"
        is_range = self.temperatures and all(0 <= temperature < math.inf for temperature in self.temperatures)
        require(is_range, "eval.temperatures", rule, self.temperatures)


@dataclass(frozen=True)
class EvalRunConfig(Section, name="run"):
    """Output folder and seed."""

    output_dir: str = switch("evaluation", "new folder for results.json and completions.jsonl", "basic", "path")
    seed: int = switch(0, "seed of sampling", "basic", at_least=0, below=2**32)
    quiet: bool = switch(False, "print no progress")


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate a model on the problems of a data set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: EvalRunConfig = field(default_factory=EvalRunConfig)


def find_switches(config_class: type, prefix: str = "") -> dict[str, Field]:
    """Fields of all switches of a command, by name: "run.seed" has the field `RunConfig.seed`."""
    found = {}
    for part in fields(config_class):
        if is_dataclass(part.type):
            found |= find_switches(part.type, f"{prefix}{part.name}.")
        elif part.metadata.get("is_switch", True):
            found[f"{prefix}{part.name}"] = part
    return found


@cache
def switches_with(fact: Fact) -> frozenset[str]:
    """Names of the switches of training and evaluation that have this fact."""
    every = find_switches(EvaluateConfig) | find_switches(TrainConfig)
    return frozenset(name for name, part in every.items() if fact in part.metadata.get("facts", ()))
