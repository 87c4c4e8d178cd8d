"""What a run says of itself: before its first rollout, after its end, and in the README.md of its models."""

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pspo import __version__
from pspo import distributed as dist
from pspo.cli.parse import DERIVED, Settings, argument_text, flat, make_config
from pspo.config import TrainConfig, switches_with
from pspo.evaluate.statistics import ESTIMATES, MEANS, Record, as_text, measure_name, read_numbers, table
from pspo.model.find import resolve_adapters
from pspo.rollout import Prompts
from pspo.tasks.files import plain
from pspo.terminal import clip, one_line


def print_header(run: Any) -> None:
    """Print model, data, method and learning rate of a `Run`."""
    config = run.config
    policy = run.learner.policy
    trained = policy.num_parameters(only_trainable=True)
    sizes = [f"{len(prompts):,} {split}" for split, prompts in run.validator.prompts.items()]
    stops = run.recorder.tokenizer.convert_ids_to_tokens(run.how.sampling.stop_ids)
    stops = [stop or "no token" for stop in stops] + [repr(text) for text in run.how.sampling.stop_strings]
    print(f"""\
model   {config.model.name_or_path}: {policy.num_parameters() / 1e6:.1f}M parameters, \
{trained / 1e6:.1f}M trained, in {policy.dtype}, on {dist.world_size()} x {policy.device}
data    {config.data.name}: {", ".join(sizes)} problems; completions end at {" or ".join(stops) or "their limit alone"}
system  {clip(repr(config.data.system_text), 100) if config.data.system_text else "no system prompt"}
method  {config.algorithm.surrogate}, {config.algorithm.epochs} epochs x {config.algorithm.minibatches} minibatches \
per rollout of {config.rollout.prompts} x {config.rollout.group_size}
rate    {config.optimizer.lr:g}, {config.optimizer.schedule}; {config.optimizer.name}
changed {changed_switches(run.settings)}""")


def changed_switches(settings: Settings) -> str:
    """Switches that differ from their defaults, such as "optimizer.lr 0.003"; paths are left out."""
    hidden = switches_with("no setting") | switches_with("path") | {*settings[DERIVED]}
    defaults = flat(make_config(TrainConfig, "pspo", [], {})[1])
    changed = []
    for switch, value in flat(settings).items():
        if switch not in hidden and value != defaults.get(switch):
            name = switch.removesuffix(".class_path").replace(".init_args.", ".")
            changed.append(f"{name} {argument_text(value)}")
    return ", ".join(changed) or "nothing"


def print_warnings(config: TrainConfig, prompts: dict[str, Prompts]) -> None:
    """Warn of training prompts that are also held out, and of a distillation by k3, which follows another KL."""
    if not config.reward.functions and config.algorithm.kl_estimator == "k3":
        other = "KL(reference || policy), from tokens of the policy: k2 and unbiased_k3 follow KL(policy || reference)"
        print(f"WARNING: --algorithm.kl_estimator k3 has the gradient of {other}", file=sys.stderr)
    train = {repr(problem.prompt) for problem in prompts["train"].problems}
    held_out = {repr(problem.prompt) for split in prompts if split != "train" for problem in prompts[split].problems}
    if train & held_out:
        print(f"WARNING: {len(train & held_out):,} training prompts are also in validation or test", file=sys.stderr)


def describe_results(summary: Record) -> str:
    """A text of the tests (of the model before training, the best and the final model) and the validation rewards."""
    best_step = summary["best_step"]
    tests = {"before": summary["before"], f"after, step {best_step}": summary["after"]}
    if best_step != summary["optimizer_steps"]:
        tests[f"final, step {summary['optimizer_steps']}"] = summary["final"]
    numbers = {model: read_numbers(test) for model, test in tests.items()}
    columns = {}
    for name in ("mean_reward", "accuracy", "gold_anywhere", *MEANS):
        if name in summary["after"]:
            header = f"{measure_name(name)} [95%]" if name in ESTIMATES else measure_name(name)
            columns[header] = {model: as_text(name, test[name]) for model, test in numbers.items() if name in test}
    lines = [table("greedy, held-out", columns)] if columns else []
    validations = [plain(record) for record in summary["validation"].values() if record]
    rewards = []
    for step, reward in sorted({record["step"]: record["validation_reward"] for record in validations}.items()):
        rewards.append(f"{'unknown' if reward is None else format(reward, '.3f')} at step {step}")
    if rewards:
        lines.append(f"validation reward {', '.join(rewards)}; the model of step {best_step} is returned")
    return "\n".join(lines)


def summary_text(summary: Record) -> str:
    """A text of tests and validations, of what the run has cost, and of where its best model is."""
    model = summary["best_model"]
    cost = f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s, peak memory {summary['peak_memory_gb']:.1f} GiB"
    returned = f"step {summary['best_step']}'s" if summary["best_step"] else "no trained step was better; the untrained"
    steps = f"{summary['optimizer_steps']} steps, {cost}; {returned} model: {model}"
    return f"{describe_results(summary)}\n{steps}\nlook inside: pspo view {Path(model).parent}".lstrip("\n")


def model_card(config: TrainConfig, settings: Settings, step: int, summary: Record) -> str:
    """The README.md of the model after ``step`` optimizer steps, as the Hugging Face hub reads it."""
    base = config.model.name_or_path
    is_on_hub = not Path(base).is_dir() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", base) is not None
    data = ModelCardData(
        library_name="peft" if resolve_adapters(config.model).has_adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_on_hub else None,  # the hub refuses a path
        tags=["pspo", "reinforcement-learning"],
    )
    text = f"""{config.algorithm.surrogate}, {step:,} optimizer steps on {config.data.name}, seed {config.run.seed}
changed: {changed_switches(settings)}
system prompt: {one_line(config.data.system_text or "none")}

{describe_results(summary)}"""
    title = f"# {one_line(Path(base).name)}, trained by pspo {__version__}"
    return f"---\n{data.to_yaml()}\n---\n\n{title}\n\n{textwrap.indent(text, '    ')}\n"
