"""Messages of a run before its first rollout, and after its end."""

import sys
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo.cli.files import Settings
from pspo.cli.terminal import clip, printable
from pspo.config import TrainConfig
from pspo.model import casts_to_bf16
from pspo.rollout import Prompts
from pspo.run.describe import changed_switches, describe_results, evaluate_command
from pspo.run.run import Run

FEWEST_TO_CHOOSE = 30  # validation problems, below which choosing the best model is mostly luck


def print_header(run: Run) -> None:
    """Print model, data, method and learning rate."""
    config = run.config
    policy = run.learner.policy
    dtypes = " and ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in policy.parameters()))
    trained = policy.num_parameters(only_trainable=True)
    autocast = " under bf16 autocast" if casts_to_bf16(config.model.autocast, policy.device) else ""
    sizes = [f"{len(prompts):,} {split}" for split, prompts in run.validator.prompts.items()]
    test = f" (a share of {config.data.holdout:g} is held out as test)" if config.data.holdout else ""
    if config.data.name == "file" and not config.run.test_limit:
        test = ", no test (--run.test_limit, --data.holdout)"
    stops = run.recorder.tokenizer.convert_ids_to_tokens(run.how.sampling.stop_ids)
    stops += [repr(text) for text in run.how.sampling.stop_strings]
    print(f"""\
model   {config.model.name_or_path}: {policy.num_parameters() / 1e6:.1f}M parameters, \
{trained / 1e6:.1f}M trained, in {dtypes}{autocast}, on {dist.world_size()} x {policy.device}
data    {config.data.name}: {", ".join(sizes)} problems{test}; \
completions end at {" or ".join(stops) or "their limit alone"}
system  {clip(repr(config.data.system_text), 100) if config.data.system_text else "no system prompt"}
method  {config.algorithm.surrogate}, {config.algorithm.epochs} epochs x {config.algorithm.minibatches} minibatches \
per rollout of {config.rollout.prompts} x {config.rollout.group_size}
rate    {config.optimizer.lr:g}, {config.optimizer.schedule}; {config.optimizer.name}""")
    if policy.device.type == "cuda" and config.rollout.engine is None:
        print(f"memory  {run.learner.microbatch_tokens:,} tokens in a microbatch, "
              f"{run.how.sampling.max_rows:,} rows decoded at a time")  # fmt: skip
    changed = changed_switches(config.model, run.settings)
    if changed:
        print(f"changed {', '.join(changed)}")


def print_warnings(config: TrainConfig, prompts: dict[str, Prompts]) -> None:
    """Warn if training prompts are also validated or tested on, if too few problems choose the best model, and of a
    distillation whose estimator has another gradient than its KL divergence.
    """
    if not config.reward.functions and config.algorithm.kl_estimator == "k3":
        other = "KL(reference || policy), from tokens of the policy: k2 and unbiased_k3 follow KL(policy || reference)"
        print(f"WARNING: --algorithm.kl_estimator k3 has the gradient of {other}", file=sys.stderr)
    train = {repr(problem.prompt) for problem in prompts["train"].problems}
    held_out = {repr(problem.prompt) for split in prompts if split != "train" for problem in prompts[split].problems}
    if train & held_out:
        print(f"WARNING: {len(train & held_out):,} training prompts are also in validation or test", file=sys.stderr)
    if "validation" in prompts and len(prompts["validation"]) < FEWEST_TO_CHOOSE:
        n_validation = len(prompts["validation"])
        fix = "add some, or return the last model by --run.validate_every 0"
        print(f"WARNING: {n_validation} validation problems choose the best model, by luck: {fix}", file=sys.stderr)


def summary_text(settings: Settings, summary: dict[str, Any]) -> str:
    """Tests and validations, what the run has cost, where its best model is, and how to evaluate it."""
    model = summary["best_model"]
    cost = f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s, peak memory {summary['peak_memory_gb']:.1f} GiB"
    returned = f"step {summary['best_step']}'s" if summary["best_step"] else "the untrained"
    lines = [
        describe_results(summary),
        f"{summary['optimizer_steps']} steps, {cost}; {returned} model: {model}",
        f"look inside: pspo view {Path(model).parent}",
        f"evaluate it: {printable(evaluate_command(settings, model))}",
    ]
    return "\n".join(line for line in lines if line)
