"""Log-probs against the plain way to compute them, one unpadded row at a time; and what loading does and refuses."""

import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

import pspo.model.load
import pspo.model.logprobs
import pspo.model.shared_prompts
from pspo.config import ModelConfig
from pspo.model import (
    ASSETS,
    autocast,
    backward_in_one_pass,
    load_policy,
    load_tokenizer,
    locate,
    pad_token_id,
    stop_token_ids,
    token_logprobs,
)
from pspo.rollout import Sampling, generate

ARCHITECTURES = ["Qwen2", "Llama", "Qwen3", "Gemma2", "GPT2"]  # GPT2 for its absolute positions
FLOAT64 = [
    "Qwen2",
    "Llama",
    "Qwen3",
    "GPT2",
]  # Gemma2 pads with the least float64 and takes the softmax in float32: NaN


def make_rows(prompt_lengths=(9, 3, 1, 6), completion_lengths=(7, 1, 12, 4), vocab=64, seed=0):
    """(ids, mask) of left-padded prompts and right-padded completions; random ids under the masks, too."""
    generator = torch.Generator().manual_seed(seed)
    n, P, T = len(prompt_lengths), max(prompt_lengths), max(*completion_lengths, 1)
    prompt_ids = torch.randint(vocab, (n, P), generator=generator)
    completion_ids = torch.randint(vocab, (n, T), generator=generator)
    prompt_mask = torch.arange(P) >= P - torch.tensor(prompt_lengths)[:, None]
    completion_mask = torch.arange(T) < torch.tensor(completion_lengths)[:, None]
    return prompt_ids, prompt_mask, completion_ids, completion_mask


def plain_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature=1.0):
    """The same (B, T) from the model's own logits: batches of one row, nothing padded, a whole log_softmax."""
    rows = []
    for i in range(len(prompt_ids)):
        prompt, completion = prompt_ids[i][prompt_mask[i]], completion_ids[i][completion_mask[i]]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0]  # (p + t, V)
        everything = torch.log_softmax(logits / temperature, dim=-1)
        row = everything[len(prompt) - 1 : -1].gather(1, completion[:, None]).squeeze(1)
        rows.append(torch.nn.functional.pad(row, (0, completion_ids.shape[1] - len(completion))))
    return torch.stack(rows)


def gradients(model, logprobs, seed=3):
    """Gradient of a random linear function of the log-probs, for all parameters in one vector."""
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(seed)).to(logprobs.dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad((weights * logprobs).sum(), trained, materialize_grads=True)  # 0 for unused ones
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_unpadded_rows(tiny_model, name, temperature):
    model, rows = tiny_model(name), make_rows()
    expected = plain_logprobs(model, *rows, temperature)
    actual = token_logprobs(model, *rows, temperature)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert (actual[~rows[3]] == 0).all()
    assert actual[rows[3]].max() < 0
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", FLOAT64)
def test_equals_unpadded_rows_in_float64(tiny_model, name):
    model, rows = tiny_model(name, dtype=torch.float64), make_rows()
    expected, actual = plain_logprobs(model, *rows, 0.7), token_logprobs(model, *rows, 0.7)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=1e-5, atol=1e-5)


def make_groups(prompt_lengths, seed=0, vocab=64):
    """Rows of one prompt adjacent, in groups of 3, 1 and 4; completions of 1 to 9 tokens."""
    prompt_ids, prompt_mask, _, _ = make_rows(prompt_lengths, vocab=vocab, seed=seed)
    prompt_ids = prompt_ids.where(prompt_mask, 0)
    completions = make_rows((1,) * 8, (9, 2, 5, 1, 7, 3, 0, 4), vocab=vocab, seed=seed + 1)[2:]
    row = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    return prompt_ids[row], prompt_mask[row], *completions


@pytest.mark.parametrize("prompt_lengths", [(9, 3, 6), (1, 2, 2), (4, 4, 4)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_groups_that_share_a_prompt_equal_unpadded_rows(tiny_model, name, prompt_lengths):
    """Gemma2's window of 4 is shorter than prompts and completions here."""
    dtype = torch.float64 if name in FLOAT64 else torch.float32
    value, slope = (1e-10, 1e-5) if name in FLOAT64 else (1e-5, 2e-4)  # the models' norms are float32 all the same
    model, rows = tiny_model(name, dtype=dtype), make_groups(prompt_lengths)
    actual, expected = token_logprobs(model, *rows, 0.7), plain_logprobs(model, *rows, 0.7)
    torch.testing.assert_close(actual, expected, rtol=0, atol=value)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=slope, atol=slope)


def test_a_shared_prompt_is_computed_once(tiny_model):
    model, rows = tiny_model(), make_groups((9, 3, 6))
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    shared = token_logprobs(model, *rows)
    assert sum(tokens) <= 3 * 9 + 8 * 9  # three prompts and eight completions
    tokens.clear()
    token_logprobs(model, *(part[[0, 3, 1, 4, 2]] for part in rows))  # no two neighbours of one prompt
    assert tokens == [5 * (9 + 8)]

    same_ids = (rows[0][:2].clone(), rows[1][:2].clone(), *(part[:2] for part in rows[2:]))
    same_ids[1][1, :4] = False  # the same ids under another mask are another prompt
    apart = token_logprobs(model, *same_ids)
    torch.testing.assert_close(apart[0], shared[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(apart, plain_logprobs(model, *same_ids), rtol=0, atol=1e-5)
    assert (apart[1, :2] - shared[1, :2]).abs().max() > 0.01


def begin_alike(rows, length):
    """The rows with prompts that have their first tokens in common: as many of ``length`` as each has."""
    prompt_ids, prompt_mask, *completions = rows
    beginning = torch.randint(64, (length,), generator=torch.Generator().manual_seed(11))
    place = prompt_mask.long().cumsum(dim=1) - 1  # of each token in its prompt
    alike = prompt_mask & (place < length)
    return prompt_ids.where(~alike, beginning[place.clamp(0, length - 1)]), prompt_mask, *completions


@pytest.mark.parametrize(("prompt_lengths", "length"), [((9, 7, 8), 5), ((9, 3, 6), 9), ((5, 4, 6), 4), ((9, 1, 5), 3)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompts_that_begin_alike_equal_unpadded_rows(tiny_model, monkeypatch, name, prompt_lengths, length):
    """A beginning shorter than, as long as, and longer than the shortest prompt."""
    monkeypatch.setattr(pspo.model.shared_prompts, "MIN_PREFIX", 1)
    dtype = torch.float64 if name in FLOAT64 else torch.float32
    value, slope = (1e-10, 1e-5) if name in FLOAT64 else (1e-5, 2e-4)
    model, rows = tiny_model(name, dtype=dtype), begin_alike(make_groups(prompt_lengths), length)
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    actual = token_logprobs(model, *rows, 0.7)
    L = 0 if name == "Gemma2" else min(length, min(prompt_lengths) - 1)  # its windows would count the padding
    width = max(prompt_lengths)
    assert tokens == [L] * (L > 0) + [3 * (width - L), 8 * 8]
    expected = plain_logprobs(model, *rows, 0.7)
    torch.testing.assert_close(actual, expected, rtol=0, atol=value)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=slope, atol=slope)


@pytest.mark.parametrize("name", ["GPTNeo", "Mpt"])
def test_prompts_that_begin_alike_where_columns_count(tiny_model, monkeypatch, name):
    """By a local window and by ALiBi: no padding may come between a common beginning and the rest."""
    monkeypatch.setattr(pspo.model.shared_prompts, "MIN_PREFIX", 1)
    model, rows = tiny_model(name), begin_alike(make_groups((9, 3, 6)), 5)
    expected = plain_logprobs(model, *rows)
    torch.testing.assert_close(token_logprobs(model, *rows), expected, rtol=0, atol=1e-5)


def test_a_short_common_beginning_is_not_worth_a_pass(tiny_model):
    model, rows = tiny_model(), begin_alike(make_groups((9, 7, 8)), 5)
    passes = []
    model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    token_logprobs(model, *rows)
    assert len(passes) == 2


def test_groups_with_completions_of_one_token(tiny_model):
    model, rows = tiny_model(dtype=torch.float64), make_groups((9, 3, 6))
    rows = (rows[0], rows[1], rows[2][:, :1], rows[3][:, :1])
    torch.testing.assert_close(token_logprobs(model, *rows), plain_logprobs(model, *rows), rtol=0, atol=1e-10)


def test_is_a_distribution(tiny_model):
    """The probabilities of all 64 continuations by one token add up to 1, at any temperature."""
    model = tiny_model()
    prompt = torch.arange(5, 10).expand(64, 5)
    one = torch.ones(64, 1, dtype=torch.bool)
    for temperature in (0.3, 1.0, 2.0):
        logprobs = token_logprobs(model, prompt, one.expand(64, 5), torch.arange(64)[:, None], one, temperature)
        assert logprobs.double().exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_chunks_change_nothing_and_are_recomputed(tiny_model, monkeypatch):
    model, rows = tiny_model(dtype=torch.float64), make_rows()
    chunks, original = [], pspo.model.logprobs.head_logits
    monkeypatch.setattr(
        pspo.model.logprobs, "head_logits", lambda model, h, T: (chunks.append(len(h)), original(model, h, T))[1]
    )
    whole = token_logprobs(model, *rows)
    whole_gradient = gradients(model, whole)
    assert chunks == [24, 24]  # 7 + 1 + 12 + 4 unmasked tokens at once, and again in the backward pass

    chunks.clear()
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", 5 * 4 * 64)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", 1)
    chunked = token_logprobs(model, *rows)
    assert chunks == [5, 5, 5, 5, 4]
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(model, chunked), whole_gradient, rtol=1e-5, atol=1e-5)
    assert sorted(chunks) == [4, 4, *[5] * 8]

    chunks.clear()
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", 1)  # less than one token's: one at a time
    torch.testing.assert_close(token_logprobs(model, *rows), whole, rtol=0, atol=1e-12)
    assert chunks == [1] * 24


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
    for tokens in (10, B * T):
        monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", tokens * 4 * V)
        with LargestTensor() as forward:
            total = token_logprobs(model, *rows).sum()
        with LargestTensor() as backward:
            total.backward()
        with LargestTensor() as one_pass:
            backward_in_one_pass(model, *rows, 1.0, lambda logprobs, _: logprobs, (None,), torch.ones(B, 1))
        largest[tokens] = (forward.numel, backward.numel, one_pass.numel)
    assert largest[B * T] == (B * T * V,) * 3  # the meter sees them where they exist
    assert largest[10] == (V * H,) * 3  # no more than the embedding and its gradient, a third of B T V


@pytest.mark.parametrize("chunk", [1, 5, 10**6])
@pytest.mark.parametrize("mode", ["none", "bf16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_pass_gives_the_log_probs_and_the_gradient_of_the_recomputing_way(
    tiny_model, monkeypatch, name, mode, chunk
):
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", 1)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", chunk)
    model, rows = tiny_model(name), make_groups((9, 3, 6))
    mask = rows[3]
    coefficients = torch.randn(mask.shape, generator=torch.Generator().manual_seed(5))

    divisors = torch.arange(1.0, len(mask) + 1)[:, None]

    def token_loss(logprobs, coefficients):  # not linear: its slope depends on the log-prob
        return (0.3 * logprobs).exp() * coefficients

    def loss(logprobs):
        return (token_loss(logprobs, coefficients).where(mask, 0.0) / divisors).sum()

    context = autocast(mode, torch.device("cpu"))
    with context:
        expected = token_logprobs(model, *rows, 0.7)
    loss(expected).backward()
    want = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    with context:
        total, actual = backward_in_one_pass(model, *rows, 0.7, token_loss, (coefficients,), divisors)
    got = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.equal(actual, expected)
    torch.testing.assert_close(total, loss(expected.detach()), rtol=1e-5, atol=1e-5)
    assert not actual.requires_grad
    assert not total.requires_grad
    tolerance = 1e-5 if mode == "none" else 2e-2  # bf16 rounds the chunks' gradients apart
    assert (got - want).norm() <= tolerance * want.norm()
    if mode == "none":
        plain = plain_logprobs(model, *rows, 0.7)
        model.zero_grad()
        loss(plain).backward()
        want = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ids_under_the_mask_do_not_matter(tiny_model, name):
    model, (prompt_ids, prompt_mask, completion_ids, completion_mask) = tiny_model(name), make_rows()
    results = []
    for garbage in (0, 63):
        ids = prompt_ids.where(prompt_mask, garbage), completion_ids.where(completion_mask, garbage)
        logprobs = token_logprobs(model, ids[0], prompt_mask, ids[1], completion_mask)
        results.append((logprobs, gradients(model, logprobs)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_columns_do_not_matter(tiny_model, name):
    model, (prompt_ids, prompt_mask, completion_ids, completion_mask) = tiny_model(name), make_rows()
    expected = token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    left = (6, 0)
    wide = token_logprobs(
        model,
        torch.nn.functional.pad(prompt_ids, left, value=11),
        torch.nn.functional.pad(prompt_mask, left),
        torch.nn.functional.pad(completion_ids, (0, 5), value=12),
        torch.nn.functional.pad(completion_mask, (0, 5)),
    )
    torch.testing.assert_close(wide[:, :12], expected, rtol=0, atol=1e-5)
    assert (wide[:, 12:] == 0).all()


def test_rows_without_an_unmasked_token(tiny_model):
    model = tiny_model(dtype=torch.float64)
    rows = make_rows((5, 2, 7), (4, 0, 6))
    logprobs = token_logprobs(model, *rows)
    assert torch.equal(logprobs[1], torch.zeros(6, dtype=torch.float64))
    others = token_logprobs(model, *(part[[0, 2]] for part in rows))
    torch.testing.assert_close(logprobs[[0, 2]], others, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients(model, logprobs[[0, 2]]), gradients(model, others), rtol=1e-5, atol=1e-5)

    nothing = token_logprobs(model, *make_rows((5, 2), (0, 0)))
    assert torch.equal(nothing, torch.zeros(2, 1, dtype=torch.float64))
    nothing.sum().backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_softcapping_is_the_models_own(tiny_model):
    model, rows = tiny_model("Gemma2"), make_rows()
    ids = rows[2][:1]
    hidden = model.model(input_ids=ids).last_hidden_state
    own = model(input_ids=ids).logits
    torch.testing.assert_close(pspo.model.logprobs.head_logits(model, hidden), own, rtol=0, atol=1e-6)
    assert model.lm_head(hidden).abs().max() > 3  # far beyond the cap of 2: without it the numbers would differ
    assert own.abs().max() <= 2


def test_bf16_autocast_still_takes_the_softmax_in_float32(tiny_model):
    model, rows = tiny_model(), make_rows()
    exact = token_logprobs(model, *rows, 0.6)
    with autocast("bf16", torch.device("cpu")):
        rounded = token_logprobs(model, *rows, 0.6)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.5)
    # One token in a uniform vocabulary of 64: bfloat16 would give -4.15625 instead of -log 64 = -4.15888.
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    with autocast("bf16", torch.device("cpu")):
        uniform = token_logprobs(model, *rows)
    torch.testing.assert_close(uniform[rows[3]], torch.full((24,), -math.log(64)), rtol=0, atol=1e-6)


def test_autocast_modes():
    cpu = torch.device("cpu")
    for mode, enabled in {"bf16": True, "auto": False, "none": False}.items():
        with autocast(mode, cpu):
            assert torch.is_autocast_enabled("cpu") == enabled


# ---------------------------------------------------------------- loading


def test_weights_are_float32_from_a_bf16_checkpoint(tiny_model, model_folder, load):
    model = tiny_model().to(torch.bfloat16)
    policy = load(model_folder(model))
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    for parameter, stored in zip(policy.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, stored.float())
    assert not policy.training


@pytest.mark.parametrize(
    ("name", "dropouts"),
    [("Qwen2", {"attention_dropout": 0.5}), ("GPT2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5})],
)
def test_dropout_is_switched_off(tiny_model, model_folder, load, name, dropouts):
    folder, rows = model_folder(tiny_model(name, **dropouts)), make_rows()
    policy = load(folder, gradient_checkpointing=True).train()  # the mode in which dropout would act
    assert torch.equal(token_logprobs(policy, *rows), token_logprobs(policy, *rows))
    torch.testing.assert_close(token_logprobs(policy, *rows), token_logprobs(load(folder), *rows), rtol=0, atol=1e-6)
    dropping = AutoModelForCausalLM.from_pretrained(folder).train()
    assert (token_logprobs(dropping, *rows) - token_logprobs(dropping, *rows)).abs().max() > 0.01


@pytest.mark.parametrize("min_prefix", [1, 10**9], ids=["beginnings shared", "prompts shared"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradient_checkpointing_with_shared_prompts_changes_no_bit(
    tiny_model, model_folder, load, monkeypatch, name, min_prefix
):
    monkeypatch.setattr(pspo.model.shared_prompts, "MIN_PREFIX", min_prefix)
    prompt_ids, *rest = make_groups((9, 7, 8))
    prompt_ids[rest[0].cumsum(dim=1).bool() & (rest[0].cumsum(dim=1) < 5)] = 7  # every prompt begins with four of them
    folder, results = model_folder(tiny_model(name)), []
    for checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=checkpointing, attn_implementation="eager")
        layers = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
        part, visits = next(layers[0].children()), []
        part.register_forward_pre_hook(lambda *_, visits=visits: visits.append(1))
        logprobs = token_logprobs(policy, prompt_ids, *rest)
        results.append((logprobs, gradients(policy, logprobs)))
        shared = pspo.model.attends_fully(policy) and min_prefix == 1
        assert len(visits) == (3 if shared else 2) * (1 + checkpointing)  # passes, each of them recomputed
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_a_compiled_body_gives_the_same_gradients_and_decodes_uncompiled(tiny_model, model_folder, load, monkeypatch):
    """By the backend that traces and differentiates but writes no machine code: no C++ compiler needed."""
    compiling, graphs = torch.nn.Module.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch.nn.Module, "compile", lambda body, **options: compiling(body, backend=backend, **options))
    folder = model_folder(tiny_model())
    plain, compiled = load(folder), load(folder, compile=True)
    assert not graphs
    for rows in (make_rows(), make_groups((9, 7, 8))):
        results = []
        for model in (plain, compiled):
            ones = torch.ones(len(rows[0]), 1)
            _, logprobs = backward_in_one_pass(model, *rows, 0.7, lambda logprobs, _: logprobs.square(), (None,), ones)
            results.append((logprobs, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
            model.zero_grad()
        torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-5)
        assert (results[1][1] - results[0][1]).norm() <= 1e-5 * results[0][1].norm()
    assert graphs
    assert compiled.state_dict().keys() == plain.state_dict().keys()

    before = len(graphs)
    sampling = Sampling(stop_ids=[60], pad_id=0, temperature=0.0, max_completion_tokens=9)
    texts = [generate(model, load_tokenizer(ModelConfig()), [[5, 6, 7]], sampling) for model in (plain, compiled)]
    assert texts[0].completion_ids.tolist() == texts[1].completion_ids.tolist()
    assert len(graphs) == before
    token_logprobs(compiled, *make_rows())
    assert compiled.base_model._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("theirs", "tokenizers", "expected"),
    [(5, 5, [5]), (7, 5, [5, 7]), ([9, 7], 8, [7, 8, 9]), ([7, 5], 5, [5, 7]), (None, 0, [0])],
)
def test_stop_tokens_are_the_union(tiny_model, tokenizer, theirs, tokenizers, expected):
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=theirs)
    tokenizer.chat_template = "{{ messages[-1].content }}"  # which ends no turn
    tokenizer.eos_token_id = tokenizers
    assert stop_token_ids(model, tokenizer) == expected


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (CHATML, "<|endoftext|>", "<|im_end|>"),  # Qwen2.5's base models
        (CHATML, "<|im_end|>", "<|im_end|>"),  # its instruct models, SmolLM2
        ("{% if messages[0].role != 'system' %}{{ 'You help.' }}{% endif %}" + CHATML, "<|endoftext|>", "<|im_end|>"),
        (LLAMA3, "<|end_of_text|>", "<|eot_id|>"),
        (GEMMA, "<eos>", "<end_of_turn>"),
        (CHATML.replace("<|im_end|>", ""), "<eos>", None),
        ("{{ raise_exception('one question only') }}", "<eos>", None),
        ("{{ messages[0].content }}<|im_end|>", "<eos>", None),  # it drops the answer
    ],
)
def test_completions_end_where_the_template_ends_the_assistants_turn(tiny_model, tokenizer, template, eos, end):
    words = [eos, *re.findall(r"<[\w|]+>", template)]
    tokenizer.add_special_tokens({"eos_token": eos, "extra_special_tokens": sorted(set(words) - {eos})})
    tokenizer.chat_template, model = template, tiny_model()
    model.generation_config = GenerationConfig()
    expected = {tokenizer.convert_tokens_to_ids(token) for token in (eos, end) if token}
    assert stop_token_ids(model, tokenizer) == sorted(expected)


def test_stop_tokens_of_a_loaded_model(model_folder, load, tokenizer):
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(load(model_folder()), tokenizer) == [im_end]
    assert stop_token_ids(load(model_folder(generation_config={"eos_token_id": [3, 552]})), tokenizer) == sorted(
        [3, 552, im_end]
    )
    assert stop_token_ids(load(model_folder(without=["generation_config.json"])), tokenizer) == [im_end]


def test_locate(tmp_path):
    assert locate("tiny-base") == str(ASSETS / "tiny-base")
    assert locate("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert locate(str(ASSETS / "tiny-math")) == str(ASSETS / "tiny-math")
    for bad, what in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no config.json")):
        with pytest.raises(ValueError, match=r"--model\.name_or_path") as error:
            locate(str(bad))
        assert str(error.value).endswith(what)
        assert str(bad) in str(error.value)
    with pytest.raises(ValueError, match=r"--model.name_or_path: model folder no/such/folder does not exist"):
        locate("./no/such/folder")


def one_line(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 500


def test_attention_that_the_model_lacks(tiny_model, model_folder, load):
    folder = model_folder(tiny_model("Gemma2"))
    load(folder, attn_implementation="eager")
    with pytest.raises(ValueError, match=r"^--model\.attn_implementation sdpa") as error:
        load(folder, attn_implementation="sdpa")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("loader", [load_tokenizer, lambda config: load_policy(config, torch.device("cpu"))])
def test_what_is_no_model_folder(tmp_path, loader):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"--model\.name_or_path") as error:
            loader(ModelConfig(name_or_path=str(path)))
        assert one_line(error)


def test_a_folder_without_weights_or_with_a_broken_config(model_folder, load):
    with pytest.raises(ValueError, match=r"--model\.name_or_path") as error:
        load(model_folder(without=["model.safetensors"]))
    assert one_line(error)
    folder = model_folder()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"--model\.name_or_path") as error:
        load(folder)
    assert one_line(error)
    with pytest.raises(ValueError, match=r"--model\.name_or_path") as error:
        load(model_folder(config={"model_type": "no-such-model"}))
    assert one_line(error)


def test_a_tokenizer_without_chat_template(model_folder):
    folder = model_folder(without=["chat_template.jinja"])
    with pytest.raises(ValueError, match=r"has no chat template.*chat_template\.jinja") as error:
        load_tokenizer(ModelConfig(name_or_path=str(folder)))
    assert one_line(error)
    assert str(folder) in str(error.value)


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}  # transformers gives a Qwen2Tokenizer the tokens it lacks


def test_a_tokenizer_without_eos(model_folder):
    folder = model_folder(tokenizer_config={"eos_token": None, **PLAIN}, config={"model_type": "llama"})
    with pytest.raises(ValueError, match="has no eos token") as error:
        load_tokenizer(ModelConfig(name_or_path=str(folder)))
    assert one_line(error)
    assert str(folder) in str(error.value)


def test_a_pad_token_that_the_model_does_not_know_is_refused(tokenizer, tiny_model):
    model = tiny_model(vocab_size=len(tokenizer))
    pad_token_id(model, tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(ValueError, match=f"pad token '<pad>' .{model.config.vocab_size}. is none of the model's"):
        pad_token_id(model, tokenizer)


def test_a_missing_pad_token_becomes_eos(model_folder):
    folder = model_folder(tokenizer_config={"pad_token": None, **PLAIN}, config={"model_type": "llama"})
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert load_tokenizer(ModelConfig()).pad_token == "<|endoftext|>"  # one that is there is kept
