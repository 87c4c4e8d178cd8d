"""Bias or variance: what is wrong with each surrogate's gradient on a stale rollout?

    python scripts/gradient_bias.py runs/a runs/b --rollouts 9 16 --lags 8 \
        --surrogates NoClip Clip 'PSPO(alpha=0.3)' GSPO:grpo NoClip::replay my_losses.Mine --output bias.jsonl

Each run is made again from its config.yaml, up to the checkpoint after N of its rollouts. A replicate is a rollout of
prompts of its own, drawn by the policy of ``lag`` rollouts before; g is the gradient there of the loss of
SURROGATE:AGGREGATION:NUCLEUS (unset, the run's), as the first of a rollout's steps has it before clipping. The target t
is the gradient of the expected reward of completions as they are sampled, at the temperature and from the nucleus: mean
of (R - group mean) grad log q over on-policy rollouts, q renormalised over the nucleus. At almost every weight vector,
where no token is about to enter or leave a nucleus, that is exactly the gradient, times 1 - 1 / group size. Divided by
the mean length of completions it has the scale of ``dapo``.

A line has estimates from pairs of different replicates and of different parts of the truth, the first four unbiased:

    target2 = |t|^2   dot = <E g, t>   norm2 = |E g|^2   second = E |g|^2
    bias2 = |E g - t|^2   variance = E |g - E g|^2   mse = bias2 + variance
    cosine = dot / sqrt(norm2 target2)   signal = norm2 / second   rho = cosine sqrt(signal)

A learning rate absorbs scale: min over c of E |c g - t|^2 / |t|^2 is 1 - rho^2. Bias lowers the cosine, variance the
signal. ``.._se`` are jackknife errors over replicates and parts. In the metric ``plain`` inner products are Euclidean;
in ``adam`` coordinates weigh 1 / (sqrt(v) + eps), so that lr <g, t> is the first-order gain of a step without momentum.
``realised`` is the cosine of t and g on the one rollout from which scripts/equal_movement.py forks. ``back`` is that of
E g and what the weights have moved since the rollout was drawn: above 0, a step leads back to where they were. What is
in the file already is not done again.
"""

import argparse
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from equal_movement import Fork, checkpoints
from torch import Tensor

from pspo.config import TrainConfig
from pspo.run.learner import Learner
from pspo.cli.files import append_jsonl, read_jsonl
from pspo.rollout import Rollout
from pspo.run.run import Run
from pspo.update import update
from pspo_lab.view.data import make_surrogate


def with_loss(config: TrainConfig, name: str, **more: str) -> TrainConfig:
    """A configuration with the loss of SURROGATE:AGGREGATION:NUCLEUS."""
    surrogate, *named = name.split(":")
    more |= {key: value for key, value in zip(("aggregation", "nucleus"), named, strict=False) if value}
    return replace(config, algorithm=replace(config.algorithm, surrogate=make_surrogate(surrogate), **more))


def replicate(fork: Fork, policy: dict[str, Tensor], seed: int, config: TrainConfig) -> tuple[Rollout, Tensor]:
    """A rollout of random training prompts by a policy, with its log-probs, and advantages (B,)."""
    prompts, n = fork.run.stream.prompts, config.rollout.prompts
    indices = np.random.default_rng(seed).choice(len(prompts), n, replace=False).tolist()
    fork.run.config, fork.seed = config, seed
    return fork.stale(policy, indices, prompts.take(indices))


def gradient(fork: Fork, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> np.ndarray:
    """(D,) float32: the gradient, at the checkpoint, of the loss on a whole rollout: what an optimizer is given."""
    fork.policy.load_state_dict(fork.weights)
    trained, found = [weight for weight in fork.policy.parameters() if weight.requires_grad], []
    optimizer = torch.optim.SGD(trained, lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: found.append(torch.cat([weight.grad.flatten() for weight in trained])))
    algorithm, unclipped = replace(config.algorithm, minibatches=1), replace(config.optimizer, max_grad_norm=0.0)
    one_step = replace(config, algorithm=algorithm, optimizer=unclipped, run=replace(config.run, max_steps=1))
    update(Learner(fork.policy, optimizer), rollout, advantages, one_step)
    return found[0].numpy()


def true_gradient(fork: Fork, config: TrainConfig, parts: int, rollouts: int, seed: int) -> np.ndarray:
    """(parts, D) float32: independent estimates of the target, each from so many rollouts."""
    config, lengths = with_loss(config, "NoClip:dr_grpo:replay", advantages="none"), []
    found = empty_rows(fork, parts)
    for part in range(parts):
        total = 0.0
        for i in range(rollouts):
            rollout, advantages = replicate(fork, fork.weights, seed + part * rollouts + i, config)
            total = total + gradient(fork, rollout, advantages, config).astype(np.float64) / rollouts
            lengths.append(rollout.loss_mask.sum(dim=1).double().mean().item())
        found[part] = total
    found *= config.rollout.max_completion_tokens / np.mean(lengths)
    return found


def empty_rows(fork: Fork, n: int) -> np.ndarray:
    """(n, D) float32, to be filled: of a large model there is no room for a second copy."""
    return np.empty((n, sum(weight.numel() for weight in fork.policy.parameters() if weight.requires_grad)), np.float32)


def adam_weights(run: Run) -> np.ndarray:
    """(D,) 1 / (sqrt(v) + eps), of AdamW's second moments v, corrected for their start at 0."""
    (group,), state = run.learner.optimizer.param_groups, run.learner.optimizer.state
    seconds = [state[p]["exp_avg_sq"].double() / (1 - group["betas"][1] ** float(state[p]["step"]))
               for p in group["params"]]  # fmt: skip
    return torch.cat([1 / (second.sqrt() + group["eps"]).flatten() for second in seconds]).numpy()


def products(left: np.ndarray, right: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(n, m) float64: inner products of the rows of (n, D) and (m, D), coordinates weighed by (D,)."""
    places = np.array_split(np.arange(len(weights)), 32)  # float64 copies of all columns would not fit
    return sum(left[:, at].astype(np.float64) @ (right[:, at] * weights[at]).T for at in places)


def mean_of_different(gram: np.ndarray) -> float:
    """Mean of products (n, n) of different rows: unbiased for the square of the rows' expectation."""
    return (gram.sum() - gram.trace()) / (len(gram) * (len(gram) - 1))


def derived(target2: Any, dot: Any, norm2: Any, second: Any) -> dict[str, Any]:
    """What a line says, from its four unbiased estimates, numbers or columns; NaN where a square is not above 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine, rho = dot / np.sqrt(norm2 * target2), dot / np.sqrt(second * target2)
        signal = np.divide(norm2, second)  # NaN also for two floats: a loss may leave no token with weight
    return {"target2": target2, "dot": dot, "norm2": norm2, "second": second, "bias2": norm2 - 2 * dot + target2,
            "variance": second - norm2, "mse": second - 2 * dot + target2, "cosine": cosine, "signal": signal,
            "rho": rho}  # fmt: skip


def estimates(own: np.ndarray, cross: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """A line's, from products of K replicates (K, K), with the truth's P parts (K, P), and of these (P, P)."""

    def compute(rows: np.ndarray, parts: np.ndarray) -> dict[str, float]:
        return derived(
            mean_of_different(truth[np.ix_(parts, parts)]),
            cross[np.ix_(rows, parts)].mean(),
            mean_of_different(own[np.ix_(rows, rows)]),
            own.diagonal()[rows].mean(),
        )

    rows, parts = np.arange(len(own)), np.arange(len(truth))
    without_row = pd.DataFrame([compute(np.delete(rows, i), parts) for i in rows])
    without_part = pd.DataFrame([compute(rows, np.delete(parts, i)) for i in parts])
    errors = np.sqrt(sum((len(of) - 1) * of.var(ddof=0) for of in (without_row, without_part)))
    return {name: float(x) for name, x in (compute(rows, parts) | errors.add_suffix("_se").to_dict()).items()}


def lines(
    run: Run, policies: deque[dict[str, Tensor]], args: argparse.Namespace, cell: dict[str, Any], done: set[tuple]
) -> Iterator[list[dict[str, Any]]]:
    """The lines of one checkpoint, a pair of metrics at a time; the run goes on as if nothing had happened."""
    cells = [cell | {"lag": lag, "surrogate": name} for lag in args.lags for name in args.surrogates]
    if not (cells := [of for of in cells if tuple(of.values()) not in done]):
        return
    position, generators, config = run.stream.position, run.generators.state_dict(), run.config
    fork_seed = config.run.seed * 1000 + cell["rollouts"]  # as scripts/equal_movement.py, for the same rollout
    fork, prompts = Fork(run, problems=1, held_out=1, seed=fork_seed), run.stream.next(config.rollout.prompts)
    realised = {lag: fork.stale(policies[-1 - lag], *prompts) for lag in args.lags}
    trained = [name for name, weight in fork.policy.named_parameters() if weight.requires_grad]
    fork.sampler = replace(fork.sampler, sampling=replace(fork.sampler.sampling, nucleus=True))
    truth = true_gradient(fork, config, args.parts, args.truth, seed=fork_seed * 1_000_000)
    metrics = {"plain": np.broadcast_to(1.0, truth.shape[1]), "adam": adam_weights(run)}
    truths, drawn = {metric: products(truth, truth, weights) for metric, weights in metrics.items()}, {}
    for of in cells:
        loss, lag = with_loss(config, of["surrogate"]), of["lag"]
        if (key := (lag, loss.algorithm.nucleus)) not in drawn:
            first = fork_seed * 1_000_000 + 100_000 * (1 + lag)
            drawn = {key: [replicate(fork, policies[-1 - lag], first + i, loss) for i in range(args.replicates)]}
        found = empty_rows(fork, args.replicates)
        for i, of_one in enumerate(drawn[key]):
            found[i] = gradient(fork, *of_one, loss)
        same_nucleus = loss.algorithm.nucleus == config.algorithm.nucleus
        moved = gradient(fork, *realised[lag], loss)[None] if same_nucleus else None
        drift = torch.cat([(fork.weights[name] - policies[-1 - lag][name]).flatten() for name in trained]).numpy()[None]
        yield [of | {"metric": metric} | line(found, truth, moved, drift, weights, truths[metric])
               for metric, weights in metrics.items()]  # fmt: skip
    run.config = config
    run.learner.policy.load_state_dict(fork.weights)
    run.generators.load_state_dict(generators)
    run.stream.seek(position)


def line(
    found: np.ndarray,
    truth: np.ndarray,
    moved: np.ndarray | None,
    drift: np.ndarray,
    weights: np.ndarray,
    truths: np.ndarray,
) -> dict[str, float | None]:
    """Estimates from gradients: replicates' (K, D), the truth's (P, D), ``moved`` (1, D) of the realised rollout.

    ``drift`` (1, D) is what the weights have moved, ``truths`` (P, P) are products of the truth.
    """
    of = estimates(products(found, found, weights), products(found, truth, weights), truths)
    drift2, along = products(drift, drift, weights).item(), products(found, drift, weights).mean()
    of |= {"back": float(derived(drift2, along, of["norm2"], of["second"])["cosine"]), "realised": None}
    if moved is None:
        return of
    dot, size2 = products(moved, truth, weights).mean(), products(moved, moved, weights).item()
    return of | {"realised": float(derived(of["target2"], dot, size2, size2)["cosine"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--rollouts", nargs="+", type=int, required=True, help="checkpoints: after so many rollouts")
    parser.add_argument("--lags", nargs="+", type=int, default=[8])
    parser.add_argument("--surrogates", nargs="+", required=True, metavar="SURROGATE")
    parser.add_argument("--parts", type=int, default=16, help="independent estimates of the true gradient")
    parser.add_argument("--truth", type=int, default=8, help="on-policy rollouts in each of them")
    parser.add_argument("--replicates", type=int, default=32, help="stale rollouts")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    done = {tuple(of[key] for key in ("run", "rollouts", "lag", "surrogate")) for of in read_jsonl(args.output)}
    for folder in args.runs:
        for rollouts, run, policies in checkpoints(folder, args.rollouts, args.lags):
            for found in lines(run, policies, args, {"run": folder.name, "rollouts": rollouts}, done):
                append_jsonl(args.output, *found)


if __name__ == "__main__":
    main()
