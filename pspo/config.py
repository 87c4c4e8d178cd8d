"""Configuration of training and evaluation: nested frozen dataclasses, one field per switch.

The defaults are the embedded default run, spelled out in ``configs/tiny.yaml``. The Args texts are the ``--help`` of
the switches. A value out of range raises ValueError naming its switch, before any model is loaded.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

from pspo import losses
from pspo.tasks.files import local_path
from pspo.tasks.problem import SYSTEM_PROMPT, AnswerKind
from pspo.tasks.rewards import MathReward, OnError, Reward
from pspo.tasks.sources import default_answer_kind
from pspo.tasks.workers import check_importable

Advantages = Literal["none", "group", "batch", "rloo", "maxrl", "gdpo"]
Decoder = Literal["auto", "pspo", "graphs", "hf"]


def require(ok: object, switch: str, rule: str, value: object) -> None:
    """Raise ValueError, naming the switch, unless ok."""
    if not ok:
        raise ValueError(f"--{switch} {rule}, got {value!r}")


COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
Fact = Literal[
    "main",  # from Python a section may be its value alone: model="tiny-math"
    "path",  # a path of this machine, or a name: ~ is the home folder, and model cards leave it out
    "mapping",  # a mapping of the user's keys
    "class",  # the import path of a class, or {class_path: ..., init_args: {...}}
    "free",  # may differ when a run is resumed: no number depends on it, unless a reward fails
    "may grow",  # when a run is resumed, unless the learning rate depends on it
    "no setting",  # makes no other setting in comparisons: files, logs, processes, memory, seeds
]


def switch(default: Any, *facts: Fact, **limits: float) -> Any:
    """Field of a section: its default, or the class or function that makes it, and what holds for its switch.

    Limits of a number have the names of `COMPARISONS`: at_least=0.
    """
    metadata = {"facts": facts, "limits": limits}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Section:
    """Base of the configuration's sections, frozen dataclasses: checks and completes the values of their switches."""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section = f"{name}." if name else ""

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            facts = part.metadata.get("facts", ())
            if "path" in facts and isinstance(value, str):
                path = local_path(value)
                if value.startswith("~"):
                    object.__setattr__(self, part.name, str(path))
            if "class" in facts and isinstance(value, str):
                object.__setattr__(self, part.name, {"class_path": value})
            limits = part.metadata.get("limits")
            if limits and value is not None:
                is_within = all(COMPARISONS[name](value, limit) for name, limit in limits.items())
                rule = " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())
                is_finite = isinstance(value, int) or math.isfinite(value)  # an int may be too large for a float
                require(is_within and is_finite, f"{self.section}{part.name}", f"must be {rule}", value)


@dataclass(frozen=True)
class LoraConfig(Section, name="model.lora"):
    """LoRA adapters: the model is frozen, and only small matrices next to its linear layers are trained.

    Args:
        rank: rank of new adapters; 0 for none
        alpha: new adapters' output is scaled by alpha / rank
        target_modules: layers that get new adapters, by name or as a regular expression
    """

    rank: int = switch(0, at_least=0)
    alpha: float = switch(32.0, above=0)
    target_modules: str | list[str] = "all-linear"
    name_or_path = None  # no switch: `LoraFolder` has it


@dataclass(frozen=True)
class LoraFolder(LoraConfig, name="model.lora"):
    """Adapters of a PEFT folder, as `pspo.model.find.resolve_adapters` finds them."""

    name_or_path: str = ""


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """Model and numerics.

    Args:
        name_or_path: embedded model (tiny-base, tiny-math, tiny-text), local folder (also of PEFT) or hub id
        revision: branch, tag or commit on the hub
        dtype: weights; auto is float32, but bfloat16 for the frozen ones under LoRA where autocast uses it
        autocast: bf16 autocast over float32 weights; auto uses it on GPUs that support bf16
        gradient_checkpointing: recompute activations in the backward pass: less memory, slower
        attn_implementation: sdpa, eager, flash_attention_2, ...; unset, the choice of transformers
        trust_remote_code: run Python code that comes with the model
        lora: LoRA adapters, trained in place of the model
    """

    name_or_path: str = switch("tiny-base", "main", "path")
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    autocast: Literal["auto", "bf16", "none"] = "auto"
    gradient_checkpointing: bool = switch(False, "no setting")
    attn_implementation: str | None = switch(None, "no setting")
    trust_remote_code: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters are trained; of a PEFT folder only once it is resolved."""
        return self.lora.rank > 0 or self.lora.name_or_path is not None


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Problems and prompts.

    Args:
        name: arithmetic, letters, sums, gsm8k, math, svamp, asdiv, a hub id, file (your own), or gsm8k+math
        path: local file or folder, of your own unless another name is given; unset, the hub
        hub: of a hub id, any of {config: main, revision: COMMIT, splits: {train: train_sft, test: test_sft}}
        limit: number of problems of the split to use; unset, all
        seed: shuffles the problems and draws the validation split
        columns: with file or a hub id, columns of the problem (a text, or a chat as a list of turns; without prompt,
            messages) and of the gold answer
        answer_kind: gold answers are exact numbers, text, or none; unset, text if no answer of your file is a number,
            else the source's own kind (mostly number)
        holdout: share of a single split that becomes test; unset, a fifth of your file from 50 problems on if a run
            tests, else 0
        system_prompt: system message before every problem, "" for none; unset, the paper's if answers are numbers
        chat_template: a Jinja file, or arguments such as {enable_thinking: false} of the model's own; saved with it
        max_prompt_tokens: drop problems with longer prompts
    """

    name: str = switch("arithmetic", "main")
    path: str | None = switch(None, "path", "free", "no setting")
    hub: dict[str, str | dict[str, str]] = switch(dict, "mapping")
    limit: int | None = switch(None, above=0)
    seed: int = 0
    columns: dict[str, str] = switch(lambda: {"prompt": "prompt", "answer": "answer"}, "mapping")
    answer_kind: AnswerKind | None = None
    holdout: float | None = switch(None, at_least=0, below=1)
    system_prompt: str | None = None
    chat_template: dict[str, Any] | str | None = switch(None, "path", "mapping")
    max_prompt_tokens: int = switch(512, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", {"prompt": "prompt", "answer": "answer"} | self.columns)
        if self.name == "arithmetic" and self.path is not None:
            object.__setattr__(self, "name", "file")
        rule = "must have no keys but config, revision and splits"
        require(self.hub.keys() <= {"config", "revision", "splits"}, "data.hub", rule, self.hub)

    @property
    def numeric(self) -> bool:
        """True if all gold answers are numbers."""
        return all((self.answer_kind or default_answer_kind(name)) == "number" for name in self.name.split("+"))

    @property
    def system_text(self) -> str:
        """System prompt in effect."""
        if self.system_prompt is not None:
            return self.system_prompt
        return SYSTEM_PROMPT if self.numeric else ""


@dataclass(frozen=True)
class RewardConfig(Section, name="reward"):
    """Reward: a weighted sum of functions.

    Args:
        functions: built-in rewards by name, functions and classes of your own by import path (default: [MathReward])
        weights: one weight per function; unset, all 1
        timeout: seconds a function may take for the completions of one prompt; 0 for no limit
        on_error: if a function fails: raise ends the run, none gives the completions of that prompt advantage 0
        workers: processes that are given one prompt's completions at a time, and share no state of a function; 0 calls
            functions in the training process
    """

    functions: list[Reward | Callable] = switch(lambda: [MathReward()], "main")
    weights: list[float] | None = switch(None)
    timeout: float = switch(0.0, "free", "no setting", at_least=0, below=2_000_000)
    on_error: OnError = switch("raise", "free", "no setting")
    workers: int = switch(0, "free", "no setting", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers > 0 or self.timeout > 0:
            for function in self.functions:
                check_importable(function)
        if self.weights is not None:
            is_complete = len(self.weights) == len(self.functions) and all(map(math.isfinite, self.weights))
            rule = f"must have one finite weight for each of {len(self.functions)} rewards"
            require(is_complete, "reward.weights", rule, self.weights)


@dataclass(frozen=True)
class RolloutConfig(Section, name="rollout"):
    """Sampling of completions.

    Args:
        prompts: prompts per rollout
        group_size: completions per prompt; a group of 1 would always have advantage 0
        max_completion_tokens: maximum length of a completion
        stop_tokens: tokens that end a completion, such as <|im_end|>; unset, the model's, tokenizer's and template's
        stop_strings: texts that end a completion, too, such as "Question:"
        temperature: sampling temperature, also applied to every log-prob
        top_p: nucleus sampling mass
        top_k: sample from the k most likely tokens; 0 for all
        max_rows: completions decoded at a time; unset, 256, or by the memory of a GPU; lower ones save memory, and draw
            other tokens
        decoder: pspo, graphs (the same as CUDA graphs), hf (the generate of transformers: slower), or auto: graphs on a
            GPU where the model allows it, else pspo, else hf
        engine: import path of a class that draws in place of the policy, such as pspo_vllm.VLLM; unset, the policy
        environment: import path of a text environment that answers the model's turns; unset, one turn
        lag: train on each rollout LAG rollouts after it was drawn: exactly the staleness of asynchronous training
        resample: times that groups whose advantages are all 0 are replaced by fresh prompts' (DAPO's dynamic sampling)
    """

    prompts: int = switch(32, above=0)
    group_size: int = switch(4, at_least=2)
    max_completion_tokens: int = switch(128, above=0)
    stop_tokens: list[str] | None = None
    stop_strings: list[str] = field(default_factory=list)
    temperature: float = switch(0.6, above=0)
    top_p: float = switch(0.85, above=0, at_most=1)
    top_k: int = switch(0, at_least=0)
    max_rows: int | None = switch(None, "no setting", above=0)
    decoder: Decoder = "auto"
    engine: str | dict[str, Any] | None = switch(None, "class")
    environment: str | dict[str, Any] | None = switch(None, "class")
    lag: int = switch(0, at_least=0)
    resample: int = switch(0, at_least=0)


@dataclass(frozen=True)
class AlgorithmConfig(Section, name="algorithm"):
    """Advantages and loss.

    Args:
        surrogate: PSPO (the default), another class of pspo.losses, or the import path of your own
        terms: more of the loss, after the surrogate: import paths of terms, of pspo.losses or your own
        epochs: passes over each rollout
        minibatches: optimizer steps per pass
        shuffle: draw the minibatches anew in each pass after the first
        aggregation: mean of the loss over tokens (dapo), sequences (grpo), the token limit (dr_grpo), or a function
        advantages: reward - mean of its group (none), over a deviation (group, batch), rloo, maxrl, gdpo, or a function
        beta: weight of the KL penalty to the reference model; without rewards above 0, on-policy distillation
        kl_estimator: k1, k2 (gradient of KL(policy || reference)), k3 (of the reverse KL), unbiased_k3 (k3 times ratio)
        reference: a model of the same vocabulary, named as model.name_or_path; unset, with beta, the initial model
        reference_every: rollouts after which the policy becomes the reference, again and again; 0 for never
        entropy_coef: weight of the entropy bonus
        mask_truncated: exclude completions that hit the token limit from the loss
        nucleus: log-probs over all tokens (ignore), or renormalised over the nucleus that each was drawn from (replay)
        ratio_to: with a lag, the old policy: which drew the rollout (behaviour), or that before the update (proximal)
        correction: truncate or mask weights old / sampler probability, or a function; unset, as an engine needs it
        correction_cap: largest correction weight
        correction_floor: smallest correction weight
    """

    surrogate: losses.Surrogate = switch(losses.PSPO, "main")
    terms: list[losses.Term | Callable] = field(default_factory=list)
    epochs: int = switch(2, above=0)
    minibatches: int = switch(1, above=0)
    shuffle: bool = False
    aggregation: losses.Aggregation | Callable = "dapo"
    advantages: Advantages | Callable = switch("none")
    beta: float = switch(0.0, at_least=0)
    kl_estimator: losses.KLEstimator = "k3"
    reference: str | None = switch(None, "path")
    reference_every: int = switch(0, at_least=0)
    entropy_coef: float = switch(0.0, at_least=0)
    mask_truncated: bool = False
    nucleus: Literal["ignore", "replay"] = "ignore"
    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    correction: losses.Correction | Callable | None = field(default=None, compare=False)
    correction_cap: float = switch(3.0, above=0)
    correction_floor: float = switch(0.0, at_least=0)
    effective_correction: losses.Correction | Callable = field(init=False)  # no switch: `TrainConfig` sets it

    def __post_init__(self) -> None:
        object.__setattr__(self, "effective_correction", self.correction or "none")
        super().__post_init__()
        rule = f"must be at most algorithm.correction_cap ({self.correction_cap})"
        require(self.correction_floor <= self.correction_cap, "algorithm.correction_floor", rule, self.correction_floor)
        if self.reference_every > 0:
            rule = "needs --algorithm.beta above 0, and no --algorithm.reference, which is not replaced"
            require(self.beta > 0 and self.reference is None, "algorithm.reference_every", rule, self.reference_every)
        for term in self.terms:
            rule = "must not have a KL penalty or correction of pspo: set --algorithm.beta or --algorithm.correction"
            by_switch = type(term) in (losses.SamplerCorrection, losses.KLPenalty)  # which need what these two prepare
            require(not by_switch, "algorithm.terms", rule, type(term).__name__)

    @cached_property
    def loss_terms(self) -> list[losses.Term | Callable]:
        """The terms that are on, in the order in which they are called."""
        terms = list(self.terms)
        if self.effective_correction != "none":
            terms.append(
                losses.SamplerCorrection(self.effective_correction, self.correction_cap, self.correction_floor)
            )
        if self.beta > 0:
            terms.append(losses.KLPenalty(self.beta, self.kl_estimator))
        if self.entropy_coef > 0:
            terms.append(losses.EntropyBonus(self.entropy_coef))
        return terms


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """Optimizer and batch size in memory.

    Args:
        name: adamw, adamw8bit (moments in 8 bits), paged_adamw8bit (which move to CPU memory), or sgd without momentum
        lr: peak learning rate (default: 3e-5 for models as small as the embedded, else the paper's 1e-6; LoRA: x 10)
        options: arguments of the optimizer's class, such as {betas: [0.9, 0.95], weight_decay: 0.1}
        warmup_steps: optimizer steps of linear warm-up, from 0
        schedule: learning rate after the warm-up: constant, or to 0 at run.max_steps (linear, cosine)
        max_grad_norm: clip gradients to this global norm; 0 for no clipping
        microbatch_tokens: tokens per forward and backward pass; unset, 4096, or by the memory of a GPU; changes the
            result by rounding alone
    """

    name: Literal["adamw", "adamw8bit", "paged_adamw8bit", "sgd"] = "adamw"
    lr: float | None = switch(None, above=0)
    options: dict[str, Any] = switch(dict, "mapping")
    warmup_steps: int = switch(0, at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float = switch(1.0, at_least=0)
    microbatch_tokens: int | None = switch(None, "no setting", above=0)


@dataclass(frozen=True)
class RunConfig(Section, name="run"):
    """Length of the run, evaluation, checkpoints and logs.

    Args:
        output_dir: folder of the run (default: runs/<model>-<data>-<surrogate>-<time>)
        fork_from: start where another run was: its checkpoint, or its folder for the newest one
        seed: seed of sampling and of the order of prompts
        max_steps: optimizer steps
        max_tokens: end earlier, after MAX_TOKENS prompt and completion tokens; unset, no limit
        validate_every: optimizer steps between validations; 0 for none
        validation_limit: validation problems
        test_limit: test problems evaluated before and after training; 0 for none
        save_every: optimizer steps between checkpoints; 0 saves only at the end
        keep: newest checkpoints to keep, besides the best model
        record_tokens: groups per rollout whose completions are written to samples.jsonl, tokens to tokens.parquet
        quiet: print warnings, errors and the result, but no header and no progress
        tracker: also log metrics to tensorboard, wandb or trackio (pip install 'pspo[wandb]')
    """

    output_dir: str | None = switch(None, "path", "free", "no setting")
    fork_from: str | None = switch(None, "path", "no setting")
    seed: int = switch(0, "no setting", at_least=0, below=2**32)
    max_steps: int = switch(100, "may grow", above=0)
    max_tokens: int | None = switch(None, "may grow", above=0)
    validate_every: int = switch(20, "no setting", at_least=0)
    validation_limit: int = switch(128, "no setting", above=0)
    test_limit: int = switch(500, "no setting", at_least=0)
    save_every: int = switch(50, "free", "no setting", at_least=0)
    keep: int = switch(2, "free", "no setting", above=0)
    record_tokens: int = switch(2, "no setting", at_least=0)
    quiet: bool = switch(False, "free", "no setting")
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = switch("none", "free", "no setting")


@dataclass(frozen=True)
class DistributedConfig(Section, name="distributed"):
    """Several GPUs: one process each, started by torchrun.

    Args:
        strategy: none for one process; ddp replicates the model on every rank; fsdp2 shards it
    """

    strategy: Literal["none", "ddp", "fsdp2"] = switch("none", "no setting")


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
        algorithm = replace(self.algorithm)
        if algorithm.correction is None and self.draws_by_engine and not self.ratios_to_engine:
            object.__setattr__(algorithm, "effective_correction", "token_truncate")
        object.__setattr__(self, "algorithm", algorithm)
        rule = "must name at least one reward, or --algorithm.beta be above 0: on-policy distillation"
        require(self.reward.functions or self.algorithm.beta > 0, "reward.functions", rule, self.reward.functions)
        self.check_sampling()
        self.check_steps()

    def check_sampling(self) -> None:
        """Raise ValueError if the algorithm needs what the sampler does not record."""
        rollout = self.rollout
        algorithm = self.algorithm
        samples_turns = rollout.environment is None and rollout.decoder != "hf"
        can_correct = (samples_turns or self.draws_by_engine) and not self.ratios_to_engine
        rule = (
            "must be none with --rollout.decoder hf or an environment, which record no log-probs, "
            "and with an engine and a lag, whose ratios are to the engine's own"
        )
        correction = algorithm.effective_correction
        require(can_correct or correction == "none", "algorithm.correction", rule, correction)
        cuts = rollout.top_p < 1 or rollout.top_k > 0
        rule = (
            "must be ignore unless --rollout.top_p or top_k cuts something, "
            "and with an engine, an environment or --rollout.decoder hf, which record no nucleus"
        )
        can_replay = samples_turns and rollout.engine is None and cuts
        require(can_replay or algorithm.nucleus == "ignore", "algorithm.nucleus", rule, algorithm.nucleus)

    def check_steps(self) -> None:
        """Raise ValueError for optimizer steps that the rollout or the shards do not allow."""
        minibatches = self.algorithm.minibatches
        rule = f"must not be above rollout.prompts ({self.rollout.prompts}): groups stay whole"
        require(minibatches <= self.rollout.prompts, "algorithm.minibatches", rule, minibatches)
        if self.distributed.strategy == "fsdp2":
            name = self.optimizer.name
            require("8bit" not in name, "optimizer.name", "must be adamw or sgd under fsdp2, which shards it", name)
            every = self.algorithm.reference_every
            require(every == 0, "algorithm.reference_every", "must be 0 under fsdp2", every)

    @property
    def draws_by_engine(self) -> bool:
        """True if an engine draws whole rollouts, and not the turns of an environment's episodes."""
        return self.rollout.engine is not None and self.rollout.environment is None

    @property
    def ratios_to_engine(self) -> bool:
        """True if ratios are to an engine's own log-probs: it drew with weights that are gone when they are needed."""
        return self.draws_by_engine and self.rollout.lag > 0 and self.algorithm.ratio_to == "behaviour"

    @property
    def draws_ahead(self) -> bool:
        """True if an engine draws the next rollout while one is trained on; resampling first needs its rewards."""
        return self.draws_by_engine and self.rollout.lag > 0 and self.rollout.resample == 0

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError unless a minibatch's prompts divide evenly among the ranks."""
        if ranks > 1:
            parts = self.algorithm.minibatches * ranks
            rule = f"must be a multiple of algorithm.minibatches x ranks ({parts})"
            require(self.rollout.prompts % parts == 0, "rollout.prompts", rule, self.rollout.prompts)


@dataclass(frozen=True)
class EvalConfig(Section, name="eval"):
    """Sampling of completions and the split they are evaluated on.

    Args:
        split: train, validation or test
        temperatures: list of temperatures, each evaluated; 0 is greedy
        samples: completions per problem at temperatures above 0
        top_p: nucleus sampling mass
        max_completion_tokens: maximum length of a completion
        stop_tokens: tokens that end a completion, such as <|im_end|>; unset, the model's, tokenizer's and template's
        stop_strings: texts that end a completion, too, such as "Question:"
        max_tokens: tokens decoded at a time, prompts included; fewer save memory, and change which samples are drawn
        environment: import path of a text environment, as in training
    """

    split: Literal["train", "validation", "test"] = switch("test")
    temperatures: list[float] = switch(lambda: [0.0])
    samples: int = switch(1, above=0)
    top_p: float = switch(1.0, above=0, at_most=1)
    max_completion_tokens: int = switch(128, above=0)
    stop_tokens: list[str] | None = None
    stop_strings: list[str] = field(default_factory=list)
    max_tokens: int = switch(65_536, above=0)
    environment: str | dict[str, Any] | None = switch(None, "class")

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "must be one or more finite numbers of at least 0"
        is_range = self.temperatures and all(0 <= temperature < math.inf for temperature in self.temperatures)
        require(is_range, "eval.temperatures", rule, self.temperatures)


@dataclass(frozen=True)
class EvalRunConfig(Section, name="run"):
    """Output folder and seed.

    Args:
        output_dir: new folder for results.json and completions.jsonl
        seed: seed of sampling
        quiet: print no progress
    """

    output_dir: str = switch("evaluation", "path")
    seed: int = switch(0, at_least=0, below=2**32)
    quiet: bool = False


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate a model on the problems of a data set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: EvalRunConfig = field(default_factory=EvalRunConfig)


def find_switches(config_class: type, prefix: str = "") -> dict[str, Field]:
    """The field of every switch of a command, such as that of `RunConfig.seed` for run.seed."""
    found = {}
    for part in fields(config_class):
        if is_dataclass(part.type):
            found |= find_switches(part.type, f"{prefix}{part.name}.")
        elif part.init:
            found[f"{prefix}{part.name}"] = part
    return found


@cache
def switches_with(fact: Fact) -> frozenset[str]:
    """The switches of training and evaluation of which this holds."""
    every = find_switches(EvaluateConfig) | find_switches(TrainConfig)
    return frozenset(name for name, part in every.items() if fact in part.metadata.get("facts", ()))
