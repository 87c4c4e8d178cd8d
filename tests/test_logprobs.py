"""Log-probs against the plain way to compute them, one unpadded row at a time."""

import math

import pytest
import reference
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

import pspo.model.logprobs
import pspo.model.shared_prompts
from pspo.model import autocast, token_logprobs
from pspo.model.logprobs import TokenLogprobs

ARCHITECTURES = ["Qwen2", "Llama", "Qwen3", "Gemma2", "GPT2"]  # GPT2 for its absolute positions
COLUMNS_COUNT = ["Gemma2", "GPTNeo", "Mpt"]  # by a local window or ALiBi: no padding after a common beginning
PRECISIONS = [
    *((name, torch.float32) for name in [*ARCHITECTURES, "GPTNeo", "Mpt"]),
    # Gemma2 pads with the least float64 and takes the softmax in float32: NaN
    *((name, torch.float64) for name in ("Qwen2", "Llama", "Qwen3", "GPT2")),
]
EVERY_CASE = [("Qwen2", torch.float64), ("Gemma2", torch.float32)]
CPU = torch.device("cpu")


def make_rows(prompt_lengths=(9, 3, 1, 6), completion_lengths=(7, 1, 12, 4), vocab=64, seed=0):
    """(ids, mask) of left-padded prompts and right-padded completions; random ids under the masks, too."""
    generator = torch.Generator().manual_seed(seed)
    n, P, T = len(prompt_lengths), max(prompt_lengths), max(*completion_lengths, 1)
    prompt_ids = torch.randint(vocab, (n, P), generator=generator)
    completion_ids = torch.randint(vocab, (n, T), generator=generator)
    prompt_mask = torch.arange(P) >= P - torch.tensor(prompt_lengths)[:, None]
    completion_mask = torch.arange(T) < torch.tensor(completion_lengths)[:, None]
    return prompt_ids, prompt_mask, completion_ids, completion_mask


def gradients(model, logprobs, seed=3):
    """Gradient of a random linear function of the log-probs, for all parameters in one vector."""
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(seed)).to(logprobs.dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad((weights * logprobs).sum(), trained, materialize_grads=True)  # 0 for unused ones
    return torch.cat([grad.flatten() for grad in grads])


def make_groups(prompt_lengths, seed=0, vocab=64):
    """Rows of one prompt adjacent, in groups of 3, 1 and 4; completions of 1 to 9 tokens."""
    prompt_ids, prompt_mask, _, _ = make_rows(prompt_lengths, vocab=vocab, seed=seed)
    prompt_ids = prompt_ids.where(prompt_mask, 0)
    completions = make_rows((1,) * 8, (9, 2, 5, 1, 7, 3, 0, 4), vocab=vocab, seed=seed + 1)[2:]
    row = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    return prompt_ids[row], prompt_mask[row], *completions


def begin_alike(rows, length):
    """The rows with prompts that have their first tokens in common: as many of ``length`` as each has."""
    prompt_ids, prompt_mask, *completions = rows
    beginning = torch.randint(64, (length,), generator=torch.Generator().manual_seed(11))
    place = prompt_mask.long().cumsum(dim=1) - 1  # of each token in its prompt
    alike = prompt_mask & (place < length)
    return prompt_ids.where(~alike, beginning[place.clamp(0, length - 1)]), prompt_mask, *completions


GROUPS = make_groups((9, 3, 6))
OTHER_MASK = [part[:2].clone() for part in GROUPS]
OTHER_MASK[1][1, :4] = False
CASES = {  # rows, and how many tokens each pass of the body sees
    "rows apart": (make_rows(), [4 * (9 + 11)]),
    "a row without completion": (make_rows((5, 2, 7), (4, 0, 6)), [3 * (7 + 5)]),
    "no completions": (make_rows((5, 2), (0, 0)), [2 * 5]),
    "groups": (GROUPS, [3 * 9, 8 * 8]),
    "groups, short prompts": (make_groups((1, 2, 2)), [3 * 2, 8 * 8]),
    "groups, completions of one token": ((*GROUPS[:2], *(part[:, :1] for part in GROUPS[2:])), [8 * 9]),
    "groups, no two neighbours of one prompt": ([part[[0, 3, 1, 4, 2]] for part in GROUPS], [5 * (9 + 8)]),
    "the same ids under another mask": (OTHER_MASK, [2 * (9 + 8)]),
    # prompts that begin alike, for fewer tokens than, as many as, and more than the shortest has
    "beginning of 5, shortest 7": (begin_alike(make_groups((9, 7, 8)), 5), [5, 3 * 4, 8 * 8]),
    "beginning of 4, shortest 4": (begin_alike(make_groups((5, 4, 6)), 4), [3, 3 * 3, 8 * 8]),
    "beginning of 9, shortest 3": (begin_alike(GROUPS, 9), [2, 3 * 7, 8 * 8]),
    "beginning of 3, shortest 1": (begin_alike(make_groups((9, 1, 5)), 3), [3 * 9, 8 * 8]),
}


@pytest.mark.parametrize(
    ("name", "dtype", "case"),
    [
        (name, dtype, case)
        for i, (name, dtype) in enumerate(PRECISIONS)
        for j, case in enumerate(CASES)
        if (name, dtype) in EVERY_CASE or (i + j) % 4 == 0
    ],
    ids=str,
)
def test_equals_unpadded_rows(tiny_model, monkeypatch, name, dtype, case):
    """Values and gradients; rows have random ids under their masks. Gemma2's window of 4 is shorter than they are."""
    monkeypatch.setattr(pspo.model.shared_prompts, "MIN_PREFIX", 1)
    rows, passes = CASES[case]
    model = tiny_model(name, dtype=dtype)
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    actual = token_logprobs(model, *rows, 0.7)
    if name in COLUMNS_COUNT and len(passes) == 3:
        passes = [passes[1] + 3 * passes[0], passes[2]]
    assert tokens == passes
    expected = reference.batch_logprobs(model, rows, 0.7)
    assert actual.dtype == dtype
    assert (actual[~rows[3]] == 0).all()
    assert (actual[rows[3]] < 0).all()
    value, slope = (1e-5, 2e-4) if dtype == torch.float32 else (1e-10, 1e-5)  # the norms are float32 all the same
    torch.testing.assert_close(actual, expected, rtol=0, atol=value)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=slope, atol=slope)


@pytest.mark.parametrize(("name", "dtype"), EVERY_CASE)
@pytest.mark.parametrize(("padding", "passes"), [(1, [8, 7, 5, 4, 3, 2, 1]), (10, [16, 30]), (10**9, [64])])
def test_a_pass_takes_completions_of_like_lengths(tiny_model, monkeypatch, name, dtype, padding, passes):
    """The next pass begins where ``padding`` tokens are saved; rows without a token but the last have none."""
    monkeypatch.setattr(pspo.model.shared_prompts, "MIN_PADDING", padding)
    model, rows, tokens = tiny_model(name, dtype=dtype), make_groups((9, 7, 8)), []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    actual = token_logprobs(model, *rows)
    assert tokens == [27, *passes]
    expected = reference.batch_logprobs(model, rows)
    value, slope = (1e-5, 2e-4) if dtype == torch.float32 else (1e-10, 1e-5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=value)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=slope, atol=slope)


@pytest.mark.parametrize(("limit", "sizes"), [(10**9, [24]), (5 * 4 * 64, [5, 2, 5, 5, 5, 2, 0]), (1, [*[1] * 24, 0])])
def test_chunks_change_nothing_and_are_recomputed(tiny_model, monkeypatch, limit, sizes):
    """Whole rows of 1 and 4 tokens, pieces of rows of 7 and 12 that are too long, and a last row without a token."""
    model, chunks = tiny_model(), []
    rows = make_rows((9, 3, 1, 6, 2), (7, 1, 4, 12, 0))
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", limit)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", 1)
    expected = reference.batch_logprobs(model, rows)
    model.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: chunks.append(len(logits)))
    actual = token_logprobs(model, *rows)
    assert chunks == sizes
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=2e-4, atol=2e-4)
    assert sorted(chunks) == sorted(sizes if len(sizes) == 1 else 2 * sizes)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any floating-point tensor had."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_of_all_logits_ever_exists(tiny_model, monkeypatch):
    B, P, T, V, H = 8, 4, 12, 2000, 32
    model, rows = tiny_model(vocab_size=V), make_rows((P,) * B, (T,) * B, vocab=V)
    largest = {}
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", 1)
    for tokens in (10, B * T):  # pieces of a row; all rows at once
        monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", tokens * 4 * V)
        with LargestTensor() as forward:
            total = token_logprobs(model, *rows).sum()
        with LargestTensor() as backward:
            total.backward()
        with LargestTensor() as of_entropies:
            sum(token_logprobs(model, *rows, with_entropies=True)).sum().backward()
        largest[tokens] = (forward.numel, backward.numel, of_entropies.numel)
    assert largest[B * T] == (B * T * V,) * 3  # the meter sees them where they exist
    assert largest[10] == (V * H,) * 3  # no more than the embedding and its gradient, a third of B T V


@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
def test_log_probs_entropies_and_their_slopes_are_those_of_float64(monkeypatch, spread):
    """From logits of any size, impossible tokens among them, against the library's softmax and autograd."""
    monkeypatch.setattr(pspo.model.logprobs, "CACHED_LOGITS", 2 * 50)  # of 9 rows two at a time
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(9, 50, generator=generator)
    logits[3, :25] = -math.inf
    targets = torch.randint(25, 50, (9,), generator=generator)
    a, b = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    exact = logits.double().requires_grad_()
    log_p = exact.log_softmax(dim=1)
    expected = log_p.gather(1, targets[:, None]).squeeze(1)
    expected_entropies = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(dim=1)
    (a * expected + b * expected_entropies).sum().backward()
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = TokenLogprobs.apply(leaf * 1.0, targets)
    (a * logprobs + b * entropies).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected_entropies.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad.nan_to_num(), rtol=1e-4, atol=1e-5)


def test_bf16_autocast_still_takes_the_softmax_in_float32(tiny_model):
    model, rows = tiny_model(), make_rows()
    exact = token_logprobs(model, *rows, 0.6)
    with autocast("bf16", CPU):
        rounded = token_logprobs(model, *rows, 0.6)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.5)
    # One token in a uniform vocabulary of 64: bfloat16 would give -4.15625 instead of -log 64 = -4.15888.
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    with autocast("bf16", CPU):
        uniform = token_logprobs(model, *rows)
    torch.testing.assert_close(uniform[rows[3]], torch.full((24,), -math.log(64)), rtol=0, atol=1e-6)


# ---------------------------------------------------------------- loading


def test_weights_are_float32_from_a_bf16_checkpoint(tiny_model, model_folder, load):
    model = tiny_model().to(torch.bfloat16)
    policy = load(model_folder(model))
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    for parameter, stored in zip(policy.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, stored.float())
    assert not policy.training


def test_dropout_is_off(tiny_model, model_folder, load):
    policy = load(model_folder(tiny_model("GPT2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)))
    assert torch.equal(token_logprobs(policy, *make_rows()), token_logprobs(policy, *make_rows()))


@pytest.mark.parametrize(("name", "min_prefix"), [("Qwen2", 1), ("Qwen2", 10**9), ("Gemma2", 1), ("GPT2", 1)])
def test_gradient_checkpointing_changes_no_bit(tiny_model, model_folder, load, monkeypatch, name, min_prefix):
    """With prompts shared, and their common beginning where it has at least ``min_prefix`` tokens."""
    monkeypatch.setattr(pspo.model.shared_prompts, "MIN_PREFIX", min_prefix)
    folder, rows, results = model_folder(tiny_model(name)), begin_alike(make_groups((9, 7, 8)), 4), []
    for checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=checkpointing, attn_implementation="eager")
        layers = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
        part, visits = next(layers[0].children()), []
        part.register_forward_pre_hook(lambda *_, visits=visits: visits.append(1))
        logprobs = token_logprobs(policy, *rows)
        results.append((logprobs, gradients(policy, logprobs)))
        shared = pspo.model.shared_prompts.attends_fully(policy) and min_prefix == 1
        assert len(visits) == (3 if shared else 2) * (1 + checkpointing)  # passes, each of them recomputed
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
