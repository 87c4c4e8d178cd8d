"""What loading a model does and refuses, and its float32 products by oneDNN."""

import contextlib
import copy
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

import pspo.model.linear
from pspo.config import ModelConfig, RolloutConfig
from pspo.model import ASSETS, load_policy, load_tokenizer, locate, stop_token_ids
from pspo.model.find import check_token_ids
from pspo.model.linear import onednn_linear, use_fast_products
from pspo.rollout import make_sampling

CPU = torch.device("cpu")
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
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
        (GEMMA, "<eos>", "<end_of_turn>"),
        (CHATML.replace("<|im_end|>", ""), "<eos>", None),
        ("{{ raise_exception('one question only') }}", "<eos>", None),
        ("{{ messages[0].content }}<|im_end|>", "<eos>", None),  # it drops the answer
    ],
)
def test_completions_end_where_template_tokenizer_or_model_end_a_turn(tiny_model, tokenizer, template, eos, end):
    words = [eos, *re.findall(r"<[\w|]+>", template)]
    tokenizer.add_special_tokens({"eos_token": eos, "extra_special_tokens": sorted(set(words) - {eos})})
    tokenizer.chat_template, model = template, tiny_model()
    ids = {tokenizer.convert_tokens_to_ids(token) for token in (eos, end) if token}
    for theirs, others in ((None, []), (5, [5]), ([9, 7], [7, 9]), ([7, *ids], [7])):
        model.generation_config = GenerationConfig(eos_token_id=theirs)
        assert stop_token_ids(model, tokenizer) == sorted({*ids, *others})


def test_locate(tmp_path):
    assert locate("tiny-base") == str(ASSETS / "tiny-base")
    assert locate("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert locate(str(ASSETS / "tiny-math")) == str(ASSETS / "tiny-math")
    for folder in (tmp_path / "none", tmp_path):
        for load in (load_tokenizer, lambda config: load_policy(config, CPU)):
            with refused(rf"--model\.name_or_path: there is no {re.escape(str(folder / 'config.json'))}$"):
                load(ModelConfig(name_or_path=str(folder)))


@contextlib.contextmanager
def refused(match):
    with pytest.raises(ValueError, match=match) as error:
        yield
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


TINY_BASE = load_file(ASSETS / "tiny-base/model.safetensors")
NORM = "model.norm.weight"
ODD_WEIGHTS = {  # in place of tiny-base's, or beside them
    "missing": ({NORM: None}, NORM),
    "one too many": ({"model.layers.4.a": torch.ones(3)}, "model.layers.4.a"),
    "another shape": ({NORM: torch.ones(64)}, NORM),
    "not finite": ({NORM: torch.full((128,), math.nan)}, NORM),
    "the tied head": ({"lm_head.weight": TINY_BASE["model.embed_tokens.weight"].clone()}, None),
}


@pytest.mark.parametrize("case", ODD_WEIGHTS)
def test_weights_that_the_configuration_does_not_describe_are_refused_by_name(model_folder, case):
    change, name = ODD_WEIGHTS[case]
    folder = model_folder()
    weights = {name: weight for name, weight in (TINY_BASE | change).items() if weight is not None}
    save_file(weights, folder / "model.safetensors")
    message = rf"^--model.name_or_path {folder}: its weights are .*, or not finite: {name}; download"
    with contextlib.nullcontext() if name is None else refused(message):
        load_policy(ModelConfig(name_or_path=str(folder)), CPU)


def test_tokenizers_that_lack_something(model_folder):
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}  # transformers gives a Qwen2Tokenizer the tokens it lacks
    llama = {"config": {"model_type": "llama"}}
    no_template = model_folder(tokenizer_config={"chat_template": None})
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
    size = len(tokenizer)
    tokenizer.add_tokens(["<image>", "<pad>"])  # as Gemma 3 1B's, which no prompt holds
    check_token_ids(model.config, tokenizer, [[1], [size - 1, 2]])
    with refused(rf"^--model.name_or_path: the model's {size} tokens do not include '<image>' \(id {size}\): resize"):
        check_token_ids(model.config, tokenizer, [[1], [2, size, 3]])
    tokenizer.pad_token = "<pad>"
    with refused(rf"do not include '<pad>' \(id {size + 1}\): .* name another pad_token"):
        make_sampling(model, tokenizer, RolloutConfig())


needs_onednn = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available(),
    reason="oneDNN takes over only where the CPU has AVX-512",
)


@pytest.fixture
def layers(monkeypatch):
    """Makes a layer as PyTorch has it, and the same by oneDNN: layers(inputs, outputs, bias, dtype)."""
    monkeypatch.setattr(pspo.model.linear, "MIN_MULTIPLICATIONS", 1)

    def make(inputs, outputs, bias=True, dtype=torch.float32):
        torch.manual_seed(0)
        theirs = nn.Linear(inputs, outputs, bias=bias).to(dtype)
        ours = nn.Sequential(copy.deepcopy(theirs))
        use_fast_products(ours, has_adapters=False)
        assert ours[0].forward.func is onednn_linear
        return theirs, ours[0]

    return make


@needs_onednn
@pytest.mark.parametrize(("shape", "bias"), [((7, 48), True), ((3, 5, 48), False), ((2, 0, 48), True), ((48,), True)])
def test_values_and_gradients_are_those_of_float64(layers, shape, bias):
    theirs, ours = layers(48, 33, bias)
    exact = copy.deepcopy(theirs).double()
    x, weights = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], 33, dtype=torch.float64)
    results = []
    for layer, dtype in ((exact, torch.float64), (ours, torch.float32)):
        inputs = x.to(dtype, copy=True).requires_grad_()
        outputs = layer(inputs if len(shape) < 3 else inputs.mT.contiguous().mT)  # a view that is not contiguous
        (outputs * weights.to(dtype)).sum().backward()
        results.append([outputs, inputs.grad, *(parameter.grad for parameter in layer.parameters())])
    for expected, got in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_other_dtypes_and_autocast_are_pytorchs_to_the_bit(layers, dtype):
    theirs, ours = layers(16, 8, dtype=dtype)
    x = torch.randn(4, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        assert ours(x).dtype == (dtype if dtype == torch.float64 else torch.bfloat16)
        assert torch.equal(ours(x), theirs(x))


@needs_onednn
def test_a_loaded_policy_computes_by_onednn():
    policy = load_policy(ModelConfig("tiny-base"), CPU)
    products = [module for module in policy.modules() if isinstance(module, nn.Linear)]
    assert products
    assert all(module.forward.func is onednn_linear for module in products)
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight  # still tied
