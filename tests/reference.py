"""Slow oracles for the tests: Python floats, loops and `math`, one formula at a time; models row by row.

Written from the papers' formulas and not from the package. Matrices are lists of rows. Every surrogate here returns
``(loss, slope)`` of one token, slope = dL/dlogprob in closed form, with r = exp(log_r) and advantage A.
"""

import math
import statistics

import torch
from scipy.stats import chisquare

MAX_LOG_RATIO = 20.0


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def clamp(x, low, high):
    return min(max(x, low), high)


# ---------------------------------------------------------------- surrogates of one token


def clip(r, A, epsilon=0.2, epsilon_high=None, delta=None):
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    delta = math.inf if delta is None else delta
    loss = -min(min(r, delta) * A, clamp(r, low, high) * A)
    # For A > 0 the smallest of r, delta, high counts, otherwise the largest of min(r, delta) and the clipped r.
    moves = r < min(delta, high) if A > 0 else low < r < max(delta, high)
    return loss, (-r * A if moves else 0.0)


def noclip(r, A):
    return -r * A, -r * A


def pspo(r, A, alpha=0.1):
    return -((1 - alpha) * r + alpha) * A, -(1 - alpha) * r * A


def soft_gate(r, A, tau):
    s = sigmoid(tau * (r - 1))
    return -4 / tau * s * A, -4 * s * sigmoid(-tau * (r - 1)) * r * A


def p3o(r, A, tau=4.0, kl_coef=0.0):
    loss, slope = soft_gate(r, A, tau)
    return loss + kl_coef * (r - 1 - math.log(r)), slope + kl_coef * (r - 1)


def sapo(r, A, tau_pos=1.0, tau_neg=3.0):
    return soft_gate(r, A, tau_pos if A > 0 else tau_neg)


def spo(r, A, epsilon=0.2):
    return -(r * A - abs(A) / (2 * epsilon) * (r - 1) ** 2), -r * (A - abs(A) / epsilon * (r - 1))


def cegppo(r, A, epsilon=0.2, epsilon_high=None, beta1=0.75, beta2=1.0):
    """Equations 8 and 10: the value and the gradient's factor are one number, F."""
    high = epsilon if epsilon_high is None else epsilon_high
    F = beta1 * (1 - epsilon) if A < 0 and r < 1 - epsilon else beta2 * (1 + high) if A > 0 and r > 1 + high else r
    return -F * A, -F * A


SCALAR = {"Clip": clip, "NoClip": noclip, "PSPO": pspo, "P3O": p3o, "SAPO": sapo, "SPO": spo, "CEGPPO": cegppo}


# Of token t with its log-probs; the log-ratios of its row {t: value} and the row's advantages [value].


def topr(t, log_r, A, logprob, old, a_pos=1.0, b_pos=1.0, a_neg=0.0, b_neg=1.0, level="sequence"):
    """The weight is held fixed in the slope."""
    log_w = sum(log_r.values()) if level == "sequence" else log_r[t]
    r = math.exp(clamp(log_w, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    w = clamp(r, a_pos, b_pos) if A[t] > 0 else clamp(r, a_neg, b_neg)
    return -w * A[t] * logprob, -w * A[t]


def reinforce(t, log_r, A, logprob, old):
    return -A[t] * logprob, -A[t]


def cispo(t, log_r, A, logprob, old, epsilon=None, epsilon_high=4.0):
    w = min(math.exp(log_r[t]), 1 + epsilon_high)
    w = w if epsilon is None else max(w, 1 - epsilon)
    return -w * A[t] * logprob, -w * A[t]


def gspo(t, log_r, A, logprob, old, epsilon=3e-4, epsilon_high=4e-4):
    """s is the geometric mean of the row's ratios: ds/dlogprob is s / n, for each of the row's n equal terms."""
    return clip(math.exp(sum(log_r.values()) / len(log_r)), A[t], epsilon, epsilon_high)


def gmpo(t, log_r, A, logprob, old, epsilon=0.4):
    one_sided = {i: min(x, epsilon) if A[i] > 0 else max(x, -epsilon) for i, x in log_r.items()}
    loss = -A[t] * math.exp(sum(one_sided.values()) / len(log_r))
    return loss, (loss if one_sided[t] == log_r[t] else 0.0)


def vespo(t, log_r, A, logprob, old, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0):
    log_w = clamp(sum(log_r.values()), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    k, decay = (k_pos, lambda_pos) if A[t] > 0 else (k_neg, lambda_neg)
    weight = math.exp(min(decay + k * log_w - decay * math.exp(log_w), MAX_LOG_RATIO))
    return -weight * A[t] * logprob, -weight * A[t]


def dppo(t, log_r, A, logprob, old, divergence="tv", epsilon=0.15):
    p, q = (math.exp(min(x, 0.0)) for x in (logprob, old))  # tests make log-probs above 0
    distance = abs(p - q)
    if divergence == "kl":
        distance = -q * log_r[t] + (1 - q + 1e-8) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    ignored = distance > epsilon and (p > q if A[t] > 0 else p < q)
    r = math.exp(log_r[t])
    return (0.0, 0.0) if ignored else (-r * A[t], -r * A[t])


def dro(t, log_r, A, logprob, old, tau=0.05, level="sequence"):
    """The row's losses add up to -(A log pi - tau / 2 log^2 w) of the whole row, and each has its gradient."""
    log_w = sum(log_r.values()) if level == "sequence" else log_r[t]
    return -A[t] * logprob + tau / 2 * log_w * log_r[t], -A[t] + tau * log_w


def aspo(t, log_r, A, logprob, old, epsilon=0.2, epsilon_high=None, delta=3.0):
    r = math.exp(log_r[t])
    if A[t] > 0:
        w = 0.0 if r > 1 + (epsilon if epsilon_high is None else epsilon_high) else min(1 / r, delta)
    else:
        w = 0.0 if r < 1 - epsilon else min(r, delta)
    return -w * A[t] * logprob, -w * A[t]


OF_A_ROW = {
    "TOPR": topr, "REINFORCE": reinforce, "CISPO": cispo, "GSPO": gspo, "GMPO": gmpo, "VESPO": vespo, "DPPO": dppo,
    "DRO": dro, "ASPO": aspo,
}  # fmt: skip
WITHOUT_RATIO_IN_THE_SLOPE = {"TOPR", "REINFORCE", "CISPO", "VESPO", "DRO", "ASPO"}


# ---------------------------------------------------------------- surrogates of a batch


def surrogate(name, params, logprobs, old_logprobs, advantages, mask):
    """Per-token loss and dL/dlogprob of a batch, two lists of rows; rows of ``advantages`` have 1 or T entries."""
    losses, slopes = [], []
    for lp_row, old_row, A_row, mask_row in zip(logprobs, old_logprobs, advantages, mask, strict=True):
        length = len(lp_row)
        A_row = A_row * length if len(A_row) == 1 else A_row
        kept = [t for t in range(length) if mask_row[t]]
        raw = {t: lp_row[t] - old_row[t] for t in kept}
        log_r = {t: clamp(raw[t], -MAX_LOG_RATIO, MAX_LOG_RATIO) for t in kept}
        loss, slope = [0.0] * length, [0.0] * length
        for t in kept:
            if name in OF_A_ROW:
                loss[t], slope[t] = OF_A_ROW[name](t, log_r, A_row, lp_row[t], old_row[t], **params)
            else:
                loss[t], slope[t] = SCALAR[name](math.exp(log_r[t]), A_row[t], **params)
            if name not in WITHOUT_RATIO_IN_THE_SLOPE and log_r[t] != raw[t]:  # beyond the clamp the loss is constant
                slope[t] = 0.0
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes


# ---------------------------------------------------------------- correction, KL, advantages


def correction_weights(old_row, sampler_row, mask_row, mode, cap, floor=0.0):
    """Weights of one row, a list."""
    level, _, constraint = mode.partition("_")
    log_r = {t: old_row[t] - sampler_row[t] for t, keep in enumerate(mask_row) if keep}
    weights = [0.0] * len(old_row)
    for t in log_r:
        ratio = math.exp(math.fsum(log_r.values()) if level == "sequence" else log_r[t])
        is_cut = not floor <= ratio <= cap
        weights[t] = ratio if not is_cut else clamp(ratio, floor, cap) if constraint == "truncate" else 0.0
    return weights


def uncertain(entropies, share):
    """The lowest entropy among the most uncertain share of tokens, a list; at least one token."""
    return sorted(entropies, reverse=True)[math.ceil(share * len(entropies)) - 1]


def kl(logprob, ref_logprob, estimator, old_logprob=None):
    """(value, d value / d logprob) of one token's estimate of KL(policy || reference)."""
    if estimator == "unbiased_k3":
        value, slope = kl(logprob, ref_logprob, "k3")
        log_r = clamp(logprob - old_logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        moves = log_r == logprob - old_logprob
        return math.exp(log_r) * value, math.exp(log_r) * (slope + value * moves)
    x = clamp(ref_logprob - logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value, slope = {"k1": (-x, -x), "k2": (x * x / 2, -x), "k3": (math.exp(x) - 1 - x, 1 - math.exp(x))}[estimator]
    return value, slope  # of the bound, where x is beyond it


def group_relative_advantages(rewards, group_size, scale="none", eps=1e-4):
    advantages = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        if all(reward == group[0] for reward in group):
            advantages += [0.0] * group_size
            continue
        mean = math.fsum(group) / group_size
        divisor = 1.0
        if scale in ("group", "batch"):
            divisor = statistics.stdev(group if scale == "group" else rewards) + eps
        elif scale == "maxrl":
            divisor = mean
        elif scale == "rloo":  # R - mean of the others
            advantages += [r - math.fsum(group[:i] + group[i + 1 :]) / (group_size - 1) for i, r in enumerate(group)]
            continue
        advantages += [(reward - mean) / divisor for reward in group]
    return advantages


def gdpo(rewards_by_function, weights, group_size, eps=1e-4):
    """Over all rows' deviation, the weighted sum of each function's rewards, scaled in their groups."""
    scaled = [group_relative_advantages(rewards, group_size, "group", eps) for rewards in rewards_by_function]
    total = [math.fsum(w * a for w, a in zip(weights, row, strict=True)) for row in zip(*scaled, strict=True)]
    return [a / (statistics.stdev(total) + eps) for a in total]


# ---------------------------------------------------------------- log-probs of a model


def vocabulary_logprobs(model, token_ids, i, temperature=1.0):
    """log pi of every token at row i's completion positions, (t, V) float64: one unpadded row, whole logits.

    ``token_ids`` is prompt ids and mask (B, P), completion ids and mask (B, T).
    """
    prompt_ids, prompt_mask, completion_ids, completion_mask = (part[i] for part in token_ids)
    prompt, completion = prompt_ids[prompt_mask], completion_ids[completion_mask]
    logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(dim=1)


def row_logprobs(model, token_ids, i, temperature=1.0):
    """log pi of row i's completion tokens, (t,) float64."""
    completion = token_ids[2][i][token_ids[3][i]]
    return vocabulary_logprobs(model, token_ids, i, temperature).gather(1, completion[:, None]).squeeze(1)


def batch_logprobs(model, token_ids, temperature=1.0):
    """The same of all rows, (B, T) in the model's dtype, 0 where masked."""
    mask = token_ids[3]
    rows = [row_logprobs(model, token_ids, i, temperature) for i in range(len(mask))]
    return torch.zeros(mask.shape, dtype=model.dtype).masked_scatter(mask, torch.cat(rows).to(model.dtype))


# ---------------------------------------------------------------- what is drawn


def nucleus(logits, top_p, top_k=0):
    """Probabilities (V,) float64 of the smallest set of likeliest tokens that holds top_p of the mass; 0 outside it."""
    logits = logits.detach().double()
    if top_k:
        logits = logits.where(logits >= logits.sort().values[-top_k], -torch.inf)
    probs, order = logits.softmax(dim=0).sort(descending=True)
    kept = probs.where(probs.cumsum(dim=0) - probs < top_p, 0.0)
    return torch.zeros_like(probs).scatter(0, order, kept / kept.sum())


def assert_drawn_from(exact, tokens, least=1e-6):
    """By chi-square, with what is expected fewer than 5 times in one bin; a false alarm is once in a million."""
    n = len(tokens)
    counts = torch.stack([torch.bincount(tokens, minlength=len(exact)).double(), n * exact])  # (2, V): seen, expected
    assert counts[0, exact == 0].sum() == 0
    rare = n * exact < 5
    bins = torch.cat([counts[:, ~rare], counts[:, rare].sum(dim=1, keepdim=True)], dim=1)
    bins = bins[:, bins[1] > 0]
    assert bins.shape[1] == 1 or chisquare(*bins).pvalue > least
