"""Log-probs against the plain way to compute them, one unpadded row at a time; and what loading does and refuses."""

import contextlib
import math
import re

import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

import pspo.distributed
import pspo.losses.entropy
import pspo.model.load
import pspo.model.logprobs
import pspo.model.shared_prompts
from pspo.config import DistributedConfig, ModelConfig
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

ARCHITECTURES = ["Qwen2", "Llama", "Qwen3", "Gemma2", "GPT2"]  # GPT2 for its absolute positions
COLUMNS_COUNT = ["Gemma2", "GPTNeo", "Mpt"]  # by a local window or ALiBi: no padding after a common beginning
PRECISIONS = [
    *((name, torch.float32) for name in [*ARCHITECTURES, "GPTNeo", "Mpt"]),
    # Gemma2 pads with the least float64 and takes the softmax in float32: NaN
    *((name, torch.float64) for name in ("Qwen2", "Llama", "Qwen3", "GPT2")),
]
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


def plain_entropies(model, token_ids, temperature):
    """(B, T) entropies in float64, row by row; 0 where masked."""
    rows = (reference.vocabulary_logprobs(model, token_ids, i, temperature) for i in range(len(token_ids[0])))
    entropies = torch.cat([-(logprobs.exp() * logprobs).sum(dim=1) for logprobs in rows])
    return torch.zeros(token_ids[3].shape, dtype=torch.float64).masked_scatter(token_ids[3], entropies)


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


def widened(prompt_ids, prompt_mask, completion_ids, completion_mask):
    """The rows with six more columns of padding on the left and five on the right."""
    pad = torch.nn.functional.pad
    prompts = pad(prompt_ids, (6, 0), value=11), pad(prompt_mask, (6, 0))
    return *prompts, pad(completion_ids, (0, 5), value=12), pad(completion_mask, (0, 5))


GROUPS = make_groups((9, 3, 6))
OTHER_MASK = [part[:2].clone() for part in GROUPS]
OTHER_MASK[1][1, :4] = False
CASES = {  # rows, and how many tokens each pass of the body sees
    "rows apart": (make_rows(), [4 * (9 + 11)]),
    "wide padding": (widened(*make_rows()), [4 * (15 + 16)]),
    "a row without completion": (make_rows((5, 2, 7), (4, 0, 6)), [3 * (7 + 5)]),
    "no completions": (make_rows((5, 2), (0, 0)), [2 * 5]),
    "groups": (GROUPS, [3 * 9, 8 * 8]),
    "groups, short prompts": (make_groups((1, 2, 2)), [3 * 2, 8 * 8]),
    "groups, prompts of one length": (make_groups((4, 4, 4)), [3 * 4, 8 * 8]),
    "groups, completions of one token": ((*GROUPS[:2], *(part[:, :1] for part in GROUPS[2:])), [8 * 9]),
    "groups, no two neighbours of one prompt": ([part[[0, 3, 1, 4, 2]] for part in GROUPS], [5 * (9 + 8)]),
    "the same ids under another mask": (OTHER_MASK, [2 * (9 + 8)]),
    # prompts that begin alike, for fewer tokens than, as many as, and more than the shortest has
    "beginning of 5, shortest 7": (begin_alike(make_groups((9, 7, 8)), 5), [5, 3 * 4, 8 * 8]),
    "beginning of 4, shortest 4": (begin_alike(make_groups((5, 4, 6)), 4), [3, 3 * 3, 8 * 8]),
    "beginning of 9, shortest 3": (begin_alike(GROUPS, 9), [2, 3 * 7, 8 * 8]),
    "beginning of 3, shortest 1": (begin_alike(make_groups((9, 1, 5)), 3), [3 * 9, 8 * 8]),
}


def count_tokens(model):
    """List that gets the number of tokens of each pass."""
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    return tokens


@pytest.mark.parametrize(("rows", "passes"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("name", "dtype"), PRECISIONS, ids=str)
def test_equals_unpadded_rows(tiny_model, monkeypatch, name, dtype, rows, passes):
    """Values and gradients; rows have random ids under their masks. Gemma2's window of 4 is shorter than they are."""
    monkeypatch.setattr(pspo.model.shared_prompts, "MIN_PREFIX", 1)
    model = tiny_model(name, dtype=dtype)
    tokens = count_tokens(model)
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


def test_a_short_common_beginning_is_not_worth_a_pass(tiny_model):
    model = tiny_model()
    passes = count_tokens(model)
    token_logprobs(model, *begin_alike(make_groups((9, 7, 8)), 5))
    assert len(passes) == 2


@pytest.mark.parametrize(
    ("chunk_bytes", "sizes"),
    [(10**9, [24]), (5 * 4 * 64, [5, 5, 5, 5, 4]), (1, [1] * 24)],  # the last less than a token's: one at a time
)
def test_chunks_change_nothing_and_are_recomputed(tiny_model, monkeypatch, chunk_bytes, sizes):
    """Logits of 7 + 1 + 12 + 4 unmasked tokens."""
    model, rows, chunks, original = tiny_model(), make_rows(), [], pspo.model.logprobs.head_logits
    monkeypatch.setattr(
        pspo.model.logprobs, "head_logits", lambda model, h, T: (chunks.append(len(h)), original(model, h, T))[1]
    )
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", 1)
    actual, expected = token_logprobs(model, *rows), reference.batch_logprobs(model, rows)
    assert chunks == sizes
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected), rtol=2e-4, atol=2e-4)
    assert sorted(chunks) == sorted(sizes * 2)


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
        with LargestTensor() as of_entropies:
            sum(token_logprobs(model, *rows, with_entropies=True, entropy_gradient=True)).sum().backward()
        with LargestTensor() as one_pass:
            backward_in_one_pass(model, *rows, 1.0, lambda a, b, _: a + b, (None,), torch.ones(B, 1))
        largest[tokens] = (forward.numel, backward.numel, of_entropies.numel, one_pass.numel)
    assert largest[B * T] == (B * T * V,) * 4  # the meter sees them where they exist
    assert largest[10] == (V * H,) * 4  # no more than the embedding and its gradient, a third of B T V


@pytest.mark.parametrize("way", ["plain", "one pass"])
@pytest.mark.parametrize(("spread", "nucleus"), [(1.0, 0), (30.0, 0), (30.0, 7)])
def test_the_gradient_of_entropies_by_finite_differences(tiny_model, monkeypatch, way, spread, nucleus):
    """In chunks, over the whole vocabulary or a nucleus, where tokens are certain too; beside log-probs' own."""
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", 1)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", 5)
    model, mask = tiny_model("Qwen2", dtype=torch.float64, tie_word_embeddings=False), GROUPS[3]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(spread)
    ids = None
    if nucleus:
        drawn = GROUPS[2][mask][:, None]
        ids = (drawn + torch.arange(nucleus)).remainder(model.config.vocab_size).flatten()
        ids = ids, torch.full(drawn.shape[:1], nucleus)
    a, b = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)

    def value(gradient=False):
        logprobs, entropies = token_logprobs(model, *GROUPS, 0.7, ids, with_entropies=True, entropy_gradient=gradient)
        return (a * logprobs + b * entropies).sum()

    if way == "plain":
        value(gradient=True).backward()
    else:
        loss, ones = lambda logprobs, entropies, a, b: a * logprobs + b * entropies, torch.ones(len(mask), 1)
        total, *_ = backward_in_one_pass(model, *GROUPS, 0.7, loss, (a, b), ones, ids)
        assert total.item() == pytest.approx(value().item(), rel=1e-9)
    weight, step = model.get_output_embeddings().weight, 1e-6  # below it the library's norms compute in float32
    for _ in range(3):
        direction, ends = torch.randn(weight.shape, generator=generator, dtype=weight.dtype), []
        for sign in (1, -2, 1):
            with torch.no_grad():
                weight.add_(sign * step * direction)
                ends.append(value().item())
        slope = (weight.grad * direction).sum().item()
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("cached", [1, 2**16])
def test_entropies_are_over_the_whole_vocabulary(tiny_model, monkeypatch, spread, cached):
    monkeypatch.setattr(pspo.losses.entropy, "CACHED", cached)
    model = tiny_model("Qwen2")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(spread)  # 30: some tokens are certain
    ones, loss = torch.ones(len(GROUPS[0]), 1), lambda logprobs, *_: logprobs
    with torch.no_grad():
        exact = plain_entropies(model, GROUPS, 0.7)
    _, of_plain = token_logprobs(model, *GROUPS, 0.7, with_entropies=True)
    _, _, of_one_pass = backward_in_one_pass(model, *GROUPS, 0.7, loss, (None,), ones)
    for entropies in (of_plain, of_one_pass):
        assert not entropies.requires_grad
        torch.testing.assert_close(entropies.double(), exact, rtol=1e-4, atol=2e-5)
    assert (exact[GROUPS[3]].min() < 1e-3) == (spread > 1)


@pytest.mark.parametrize("chunk", [1, 5, 10**6])
@pytest.mark.parametrize("mode", ["none", "bf16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_pass_gives_the_log_probs_and_the_gradient_of_the_plain_way(tiny_model, monkeypatch, name, mode, chunk):
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", 1)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", chunk)
    model, mask = tiny_model(name), GROUPS[3]
    coefficients = torch.randn(mask.shape, generator=torch.Generator().manual_seed(5))
    divisors = torch.arange(1.0, len(mask) + 1)[:, None]

    def token_loss(logprobs, entropies, coefficients):  # not linear: its slope depends on the log-prob
        return (0.3 * logprobs).exp() * coefficients

    def loss(logprobs):
        return (token_loss(logprobs, None, coefficients).where(mask, 0.0) / divisors).sum()

    with autocast(mode, CPU):
        total, actual, entropies = backward_in_one_pass(model, *GROUPS, 0.7, token_loss, (coefficients,), divisors)
        expected = token_logprobs(model, *GROUPS, 0.7)
        again, plain_entropies = token_logprobs(model, *GROUPS, 0.7, with_entropies=True)
    assert torch.equal(actual, expected)
    assert torch.equal(again, expected)
    torch.testing.assert_close(entropies, plain_entropies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, loss(expected.detach()), rtol=1e-5, atol=1e-5)
    assert not actual.requires_grad
    assert not total.requires_grad
    parameters = list(model.parameters())
    got = torch.cat([parameter.grad.flatten() for parameter in parameters])
    for logprobs in [expected] if mode == "bf16" else [expected, reference.batch_logprobs(model, GROUPS, 0.7)]:
        want = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss(logprobs), parameters)])
        tolerance = 1e-5 if mode == "none" else 2e-2  # bf16 rounds the chunks' gradients apart
        assert (got - want).norm() <= tolerance * want.norm()


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
    folder, rows, results = model_folder(tiny_model(name)), begin_alike(make_groups((9, 7, 8)), 4), []
    for checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=checkpointing, attn_implementation="eager")
        layers = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
        part, visits = next(layers[0].children()), []
        part.register_forward_pre_hook(lambda *_, visits=visits: visits.append(1))
        logprobs = token_logprobs(policy, *rows)
        results.append((logprobs, gradients(policy, logprobs)))
        shared = pspo.model.attends_fully(policy) and min_prefix == 1
        assert len(visits) == (3 if shared else 2) * (1 + checkpointing)  # passes, each of them recomputed
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


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


def test_locate(tmp_path):
    assert locate("tiny-base") == str(ASSETS / "tiny-base")
    assert locate("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert locate(str(ASSETS / "tiny-math")) == str(ASSETS / "tiny-math")
    for folder, what in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no config.json")):
        for load in (lambda config: locate(config.name_or_path), load_tokenizer, lambda c: load_policy(c, CPU)):
            with refused(rf"--model\.name_or_path.*{re.escape(str(folder))} {what}$"):
                load(ModelConfig(name_or_path=str(folder)))
    with refused(r"--model.name_or_path: model folder no/such/folder does not exist"):
        locate("./no/such/folder")


@contextlib.contextmanager
def refused(match):
    with pytest.raises(ValueError, match=match) as error:
        yield
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_attention_that_the_model_lacks(tiny_model, model_folder, load):
    folder = model_folder(tiny_model("Gemma2"))
    load(folder, attn_implementation="eager")
    with refused(r"^--model\.attn_implementation sdpa"):
        load(folder, attn_implementation="sdpa")


def test_a_folder_without_weights_or_with_a_broken_config(model_folder, load):
    broken = model_folder()
    (broken / "config.json").write_text("{")
    unknown = model_folder(config={"model_type": "no-such-model"})
    for folder in (model_folder(without=["model.safetensors"]), broken, unknown):
        with refused(r"--model\.name_or_path"):
            load(folder)


TINY_BASE = load_file(ASSETS / "tiny-base/model.safetensors")
NORM, BIAS = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
ODD_WEIGHTS = {  # in place of tiny-base's, or beside them
    "missing": ({NORM: None}, f"its (weights|files) lack {NORM}(; load it in one process .*)?"),
    "a layer too many": (
        {f"model.layers.4.{name}": torch.ones(3) for name in "dcba"},
        "its config.json describes a model without its weights "
        + ", ".join(f"model.layers.4.{name}" for name in "abc") + " ...",
    ),
    "not finite": (
        {NORM: torch.full((128,), math.nan), BIAS: torch.tensor([math.inf] + [0.0] * 127)},
        f"not all numbers are finite in its weights {BIAS}, {NORM}",
    ),
    "old buffers": ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}, None),
    "the tied head": ({"lm_head.weight": TINY_BASE["model.embed_tokens.weight"].clone()}, None),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["none", "fsdp2"])
@pytest.mark.parametrize("case", ODD_WEIGHTS)
def test_weights_that_the_configuration_does_not_describe_are_refused_by_name(
    model_folder, monkeypatch, case, strategy
):
    monkeypatch.setattr(pspo.distributed, "shard", lambda *_: None)  # one rank's rows are all
    change, message = ODD_WEIGHTS[case]
    folder = model_folder()
    save_file(
        {name: weight for name, weight in (TINY_BASE | change).items() if weight is not None},
        folder / "model.safetensors",
    )
    expected = contextlib.nullcontext() if message is None else refused(rf"^--model.name_or_path {folder}: {message}$")
    with expected:
        load_policy(ModelConfig(name_or_path=str(folder)), CPU, DistributedConfig(strategy))


def test_weights_of_other_shapes_are_refused_by_name(tiny_model, model_folder, load):
    folder = model_folder(tiny_model(vocab_size=70), config={"vocab_size": 64})
    with refused(
        f"^--model.name_or_path {folder}: its config.json describes other shapes of model.embed_tokens.weight"
    ):
        load(folder)


def test_tokenizers_that_lack_something(model_folder):
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}  # transformers gives a Qwen2Tokenizer the tokens it lacks
    llama = {"config": {"model_type": "llama"}}
    no_template = model_folder(without=["chat_template.jinja"])
    no_eos = model_folder(tokenizer_config={"eos_token": None, **plain}, **llama)
    for folder, what in ((no_template, r"has no chat template.*chat_template\.jinja"), (no_eos, "has no eos token")):
        with refused(f"(?=.*{re.escape(str(folder))}).*{what}"):
            load_tokenizer(ModelConfig(name_or_path=str(folder)))
    no_pad = model_folder(tokenizer_config={"pad_token": None, **plain}, **llama)
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(no_pad)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert load_tokenizer(ModelConfig()).pad_token == "<|endoftext|>"  # one that is there is kept


def test_a_token_that_the_model_does_not_know_is_refused(tokenizer, tiny_model):
    model = tiny_model(vocab_size=len(tokenizer))
    pad_token_id(model, tokenizer)
    tokenizer.add_tokens("zz")  # which some prompt may hold; pad is one that the model has
    with refused(f"token 'zz' .{model.config.vocab_size}. is none of the model's"):
        pad_token_id(model, tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with refused(f"token '<pad>' .{model.config.vocab_size + 1}. is none of the model's"):
        pad_token_id(model, tokenizer)
