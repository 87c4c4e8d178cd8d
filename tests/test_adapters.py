"""What PEFT's configurations of LoRA can say: every field is exact, against closed forms in float64, or refused."""

import dataclasses
import json

import pytest
import torch
import transformers
from architectures import OUTCOMES, tiny
from processes import TINY, run_command
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import pspo.evaluate.__main__
import pspo.run.export
from pspo.config import LoraConfig, ModelConfig
from pspo.model import ASSETS, load_policy, token_logprobs
from pspo.model.adapters import add_adapters, check_adapter_config, merged_weights, save_adapters
from pspo.model.lora import fuse_adapters
from pspo.train import main

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
IDS = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(0))
Q = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
ALL_Q = dict.fromkeys(Q, (4, 3.0))  # rank and scale of r 4, lora_alpha 12

NO_EFFECT = {
    "task_type": "FEATURE_EXTRACTION", "peft_type": "LORA", "peft_version": "0.99", "inference_mode": True,
    "auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}, "base_model_name_or_path": "tiny-base",
    "revision": "main", "lora_dropout": 0.5, "fan_in_fan_out": True, "bias": "none",
    "init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}, "megatron_core": "other",
    "qalora_group_size": 8,
}  # fmt: skip
EXACT = {  # settings by field, and rank and scale of every layer that has adapters under them
    "no effect": (NO_EFFECT, ALL_Q),
    "lora_bias": ({"lora_bias": True}, ALL_Q),
    "r": ({"r": 2}, dict.fromkeys(Q, (2, 6.0))),
    "lora_alpha": ({"lora_alpha": 8}, dict.fromkeys(Q, (4, 2.0))),
    "use_rslora": ({"use_rslora": True}, dict.fromkeys(Q, (4, 6.0))),  # 12 / sqrt(4)
    "rank_pattern": ({"rank_pattern": {"layers.1.self_attn.q_proj": 8}}, ALL_Q | {Q[1]: (8, 1.5)}),
    "alpha_pattern": ({"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}, ALL_Q | {Q[1]: (4, 0.5)}),
    "target_modules": ({"target_modules": r".*\.2\.mlp\.up_proj"}, {"model.layers.2.mlp.up_proj": (4, 3.0)}),
    "exclude_modules": ({"exclude_modules": ["layers.3.self_attn.q_proj"]}, dict.fromkeys(Q[:3], (4, 3.0))),
    "layers_to_transform": ({"layers_to_transform": [2]}, {Q[2]: (4, 3.0)}),
    "layers_pattern": ({"layers_to_transform": [1], "layers_pattern": "layers"}, {Q[1]: (4, 3.0)}),
}  # fmt: skip
REFUSED = {
    "peft_type": "ADALORA", "bias": "lora_only", "init_lora_weights": "pissa", "modules_to_save": ["lm_head"],
    "megatron_config": {"hidden_size": 128}, "trainable_token_indices": [1, 2], "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "ipm"}, "lora_ga_config": {"direction": "ArB2r"}, "use_dora": True,
    "velora_config": {"rank": 1}, "alora_invocation_tokens": [5, 6], "use_qalora": True, "ensure_weight_tying": True,
    "monteclora_config": {"num_samples": 8}, "layer_replication": [[0, 2], [1, 4]], "use_bdlora": {"nblocks": 2},
    "runtime_config": {"ephemeral_gpu_offload": True}, "target_parameters": ["mlp.up_proj.weight"],
    "arrow_config": {"top_k": 3}, "kasa_config": {"beta": 1e-4}, "added_by_a_later_peft": True,
}  # fmt: skip


EXPERTS = ("jamba", "mixtral", "phimoe", "qwen3_moe")  # of which some linear layers are refused


def write_adapters(folder, settings, layers, base) -> dict[str, torch.Tensor]:
    """Write a PEFT folder of random adapters of some layers of a model; return them, in float64 with a gradient."""
    config = {"peft_type": "LORA", "base_model_name_or_path": "tiny-base", "r": 4, "lora_alpha": 12}
    config = config | {"target_modules": ["q_proj"]} | settings
    generator, adapters = torch.Generator().manual_seed(1), {}
    for name, (rank, _) in layers.items():
        layer = base.get_submodule(name)
        shapes = {"lora_A.weight": (rank, layer.in_features), "lora_B.weight": (layer.out_features, rank)}
        if config.get("lora_bias"):
            shapes["lora_B.bias"] = (layer.out_features,)
        for part, shape in shapes.items():
            adapters[f"base_model.model.{name}.{part}"] = 0.1 * torch.randn(shape, generator=generator)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapters, folder / "adapter_model.safetensors")
    return {name: values.double().requires_grad_() for name, values in adapters.items()}


def closed_form(base, adapters, layers) -> dict[str, torch.Tensor]:
    """W + s B A and b + s l of the layers, other weights as they are, in float64."""
    weights = {name: weight.detach() for name, weight in base.named_parameters()}
    for name, (_, scale) in layers.items():
        a, b = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * b @ a
        bias = adapters.get(f"base_model.model.{name}.lora_B.bias")
        if bias is not None:
            weights[f"{name}.bias"] = weights[f"{name}.bias"] + scale * bias
    return weights


def exact_logprobs(base, weights) -> torch.Tensor:
    logits = functional_call(base, weights, (IDS,)).logits[:, 3:-1]
    return logits.log_softmax(dim=-1).gather(2, IDS[:, 4:, None])[..., 0]


def our_logprobs(policy) -> torch.Tensor:
    all_true = torch.ones_like(IDS, dtype=torch.bool)
    return token_logprobs(policy, IDS[:, :4], all_true[:, :4], IDS[:, 4:], all_true[:, 4:])


def assert_exact(folder, base, adapters, layers) -> None:
    """Log-probs, gradients, merged weights of a PEFT folder here are those of the closed form."""
    policy, weights = load_policy(ModelConfig(str(folder)), CPU), closed_form(base, adapters, layers)
    expected, ours = exact_logprobs(base, weights), our_logprobs(policy)
    plain = exact_logprobs(base, dict(base.named_parameters()))
    assert (expected - plain).abs().max() > 0.05  # the adapters do something
    assert (expected - ours).abs().max() < 1e-4
    expected.sum().backward()
    ours.sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert len(gradients) == len(adapters)
    for name, gradient in gradients.items():
        exact = adapters["base_model.model." + name.replace(".default.", ".")].grad
        assert (gradient - exact).norm() < 1e-4 * exact.norm(), name
    if not policy.config.to_dict().get("quantization_config"):
        merged = dict(merged_weights(policy))
        for name, weight in weights.items():
            torch.testing.assert_close(merged[name].double(), weight.detach(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", dtype=torch.float64)


def test_the_tables_have_every_field_of_pefts_configuration():
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert EXACT.keys() | NO_EFFECT.keys() | REFUSED.keys() == fields | {"added_by_a_later_peft", "no effect"}


@pytest.mark.filterwarnings("ignore")  # of PEFT, on settings of no effect
@pytest.mark.parametrize("field", EXACT)
def test_a_field_is_exact(field, base, tmp_path):
    settings, layers = EXACT[field]
    adapters = write_adapters(tmp_path / "adapters", settings, layers, base)
    assert_exact(tmp_path / "adapters", base, adapters, layers)


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_is_refused_before_the_model_is_loaded(field, base, tmp_path):
    settings = {field: REFUSED[field], "base_model_name_or_path": str(tmp_path / "nowhere")}
    write_adapters(tmp_path / "adapters", settings, ALL_Q, base)
    config = ModelConfig(str(tmp_path / "adapters"))
    said = rf"^--model\.name_or_path .*adapters: its adapter_config.json sets {field} to .*"
    with pytest.raises(ValueError, match=said):
        load_policy(config, CPU)


def test_adapters_in_a_bin_are_read(base, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", {}, ALL_Q, base)
    (tmp_path / "adapters/adapter_model.safetensors").unlink()
    weights = {name: values.detach().float() for name, values in adapters.items()}
    torch.save(weights, tmp_path / "adapters/adapter_model.bin")
    assert_exact(tmp_path / "adapters", base, adapters, ALL_Q)


def test_a_bias_beside_a_layer_without_one_is_refused(base, tmp_path):
    """Its merged model was 2.6 nats off."""
    layers = {name.replace("q_proj", "o_proj"): (4, 3.0) for name in Q}
    write_adapters(tmp_path / "adapters", {"lora_bias": True, "target_modules": ["o_proj"]}, layers, base)
    with pytest.raises(ValueError, match=r"name_or_path .*o_proj has no bias that lora_bias could be merged into"):
        load_policy(ModelConfig(str(tmp_path / "adapters")), CPU)


def test_the_head_is_exact_untied_and_refused_tied(base, tmp_path):
    layers = {"lm_head": (4, 3.0)}
    write_adapters(tmp_path / "tied", {"target_modules": ["lm_head"]}, layers, base)
    with pytest.raises(ValueError, match=r"name_or_path .*tied: lm_head has the weight of another layer"):
        load_policy(ModelConfig(str(tmp_path / "tied")), CPU)
    with pytest.raises(ValueError, match=r"^--model.lora.target_modules: lm_head has the weight of another layer"):
        load_policy(ModelConfig(lora=LoraConfig(rank=4, target_modules=["lm_head"])), CPU)
    untied = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", tie_word_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.copy_(base.lm_head.weight.flip(0))
    untied.save_pretrained(tmp_path / "model")
    settings = {"target_modules": ["lm_head"], "base_model_name_or_path": str(tmp_path / "model")}
    adapters = write_adapters(tmp_path / "untied", settings, layers, base)
    assert_exact(tmp_path / "untied", untied.double(), adapters, layers)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in (*EXPERTS, "deepseek_v3", "falcon", "gpt2") else pytest.mark.nightly)
        for name in OUTCOMES["pspo"] + OUTCOMES["hf"]
    ],
)
def test_adapters_of_all_linear_layers_are_exact_or_refused(name, tmp_path):
    """Experts, routers, and layers whose weight is read without their forward pass have no adapters of LoRA."""
    model = tiny(name)
    refusal = ""
    try:
        add_adapters(model, ModelConfig(name, lora=LoraConfig(rank=4)))
    except ValueError as error:
        refusal = str(error)
    assert refusal or name not in EXPERTS
    if refusal:
        assert refusal.startswith("--model.lora.target_modules: ")
        if name not in EXPERTS:
            return
        model = tiny(name)
        add_adapters(model, ModelConfig(name, lora=LoraConfig(rank=4, target_modules=["q_proj", "v_proj", "o_proj"])))
    save_adapters(model, tmp_path)
    check_adapter_config(str(tmp_path))
    fuse_adapters(model)
    generator = torch.Generator().manual_seed(0)
    weights = {name: weight.double() for name, weight in tiny(name).named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05, generator=generator)
        for layer, module in model.named_modules():
            if hasattr(module, "lora_A"):
                change = 8.0 * module.lora_B["default"].weight.double() @ module.lora_A["default"].weight.double()
                weights[f"{layer}.weight"] += change.t() if module.fan_in_fan_out else change
    expected = functional_call(tiny(name), {name: weight.float() for name, weight in weights.items()}, (IDS,)).logits
    ours = model(IDS).logits
    assert (ours - expected).abs().max() < 1e-3 * expected.std()
    ours.logsumexp(dim=-1).sum().backward()  # which fails where a layer changes the output of another in place
    merged = dict(merged_weights(model))
    for weight, values in weights.items():
        torch.testing.assert_close(merged[weight].double(), values, rtol=0, atol=1e-5)


# --- quantised models -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["4 bits", "8 bits"])
def quantised(request, tmp_path_factory):
    """Folder of the embedded model with weights of few bits, and the model of those weights in float64."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("models") / request.param
    options = {
        "4 bits": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
        "8 bits": {"load_in_8bit": True},
    }
    config = BitsAndBytesConfig(**options[request.param])
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", quantization_config=config, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "tiny-base").save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", dtype=torch.float64)
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, bitsandbytes.nn.Linear4bit):
                values = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                base.get_submodule(name).weight.copy_(values)
            elif isinstance(layer, bitsandbytes.nn.Linear8bitLt):
                values = weights[f"{name}.weight"].double() * weights[f"{name}.SCB"].double()[:, None] / 127
                base.get_submodule(name).weight.copy_(values)
    return folder, base


def test_adapters_beside_quantised_weights_are_exact(quantised, tmp_path):
    folder, base = quantised
    adapters = write_adapters(tmp_path / "adapters", {"base_model_name_or_path": str(folder)}, ALL_Q, base)
    config = ModelConfig(str(tmp_path / "adapters"))
    with torch.no_grad():  # bitsandbytes packs weights in a pass without gradient, if it may
        policy = load_policy(config, CPU)
        first = our_logprobs(policy)
    assert torch.equal(our_logprobs(policy), first)
    assert_exact(tmp_path / "adapters", base, adapters, ALL_Q)


def test_quantised_weights_are_trained_beside_and_not_themselves(quantised, tmp_path, capsys):
    folder, _ = quantised
    run = f"--run.output_dir={tmp_path / 'run'}"
    args = [*TINY, f"--model.name_or_path={folder}", run, "--run.max_steps=2", "--run.test_limit=2"]
    assert run_command(main, *args) == 2
    said = "its weights cannot be trained: set --model.lora.rank"
    assert f"{folder} is quantised by bitsandbytes: {said}" in capsys.readouterr().err
    assert run_command(main, *args, "--model.lora.rank=4") == 0
    final = tmp_path / "run/final"
    assert all("lora_" in name for name in load_file(final / "adapter_model.safetensors"))
    our_logprobs(load_policy(ModelConfig(str(final)), CPU))
    merged = tmp_path / "merged"
    assert run_command(pspo.run.export.main, f"--model.name_or_path={final}", f"--output_dir={merged}") == 2
    assert "adapters cannot be merged into quantised weights: use the PEFT folder" in capsys.readouterr().err
    assert not merged.exists()


def test_bitsandbytes_that_is_missing_is_named(quantised, monkeypatch):
    monkeypatch.setattr(transformers.quantizers.quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(transformers.quantizers.quantizer_bnb_8bit, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ValueError, match=r"^--model\.name_or_path .*bits does not load: .*bitsandbytes"):
        load_policy(ModelConfig(str(quantised[0]), lora=LoraConfig(rank=4)), CPU)


NAN = b"\x00\x00\xc0\x7f"  # in float32
DAMAGED = {
    "half a download": ("adapter_model.safetensors", lambda content: content[: len(content) // 2]),
    "an LFS pointer": ("adapter_model.safetensors", lambda _: b"version https://git-lfs.github.com/spec/v1\n"),
    "no mapping": ("adapter_config.json", lambda _: b"[]"),
    "half a configuration": ("adapter_config.json", lambda content: content[: len(content) // 2]),
    "another rank": ("adapter_config.json", lambda content: content.replace(b'"r": 4', b'"r": 5')),
    "a number that is not finite": ("adapter_model.safetensors", lambda content: content[:-4] + NAN),
    "a .bin": ("adapter_model.bin", lambda _: b"version https://git-lfs.github.com/spec/v1\n"),
}


@pytest.mark.parametrize("command", [pspo.evaluate.__main__.main, pspo.run.export.main])
@pytest.mark.parametrize(("name", "damage"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_adapters_are_named(command, name, damage, base, here, capsys):
    write_adapters(here / "adapters", {}, ALL_Q, base)
    file = here / "adapters" / name
    if file.suffix == ".bin":
        (here / "adapters/adapter_model.safetensors").rename(file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SystemExit, match=r"^2$"):
        command(["--model.name_or_path=adapters"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--model.name_or_path" in line
    assert name in line
