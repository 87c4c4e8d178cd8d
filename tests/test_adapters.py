"""What PEFT's configurations of LoRA can say: every field is exact, against closed forms in float64, or refused."""

import json

import pytest
import torch
from architectures import each, tiny
from processes import run_command
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

import pspo.run.export
from pspo.config import LoraConfig, ModelConfig
from pspo.model import ASSETS, load_policy, token_logprobs
from pspo.model.adapters import adapter_config, add_adapters, merged_weights, save_adapters
from pspo.model.linear import use_fast_products

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
IDS = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(0))
Q = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
ALL_Q = dict.fromkeys(Q, (4, 3.0))  # rank and scale of r 4, lora_alpha 12

EXACT = {  # settings, and rank and scale of every layer that has adapters under them
    "no effect": (
        {"peft_version": "0.99", "inference_mode": True, "lora_dropout": 0.5, "fan_in_fan_out": True, "bias": "none"},
        ALL_Q,
    ),
    "init_lora_weights": ({"init_lora_weights": "gaussian"}, ALL_Q),
    "use_rslora": ({"use_rslora": True}, dict.fromkeys(Q, (4, 6.0))),  # 12 / sqrt(4)
    "patterns": (
        {"rank_pattern": {"layers.1.self_attn.q_proj": 8}, "alpha_pattern": {"layers.2.self_attn.q_proj": 2}},
        ALL_Q | {Q[1]: (8, 1.5), Q[2]: (4, 0.5)},
    ),
    "target_modules": ({"target_modules": r".*\.2\.mlp\.up_proj"}, {"model.layers.2.mlp.up_proj": (4, 3.0)}),
}
REFUSED = {
    "peft_type": "ADALORA", "bias": "lora_only", "init_lora_weights": "pissa", "modules_to_save": ["lm_head"],
    "use_dora": True, "lora_bias": True, "target_parameters": ["mlp.up_proj.weight"], "added_by_a_later_peft": True,
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
        for part, shape in shapes.items():
            adapters[f"base_model.model.{name}.{part}"] = 0.1 * torch.randn(shape, generator=generator)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapters, folder / "adapter_model.safetensors")
    return {name: values.double().requires_grad_() for name, values in adapters.items()}


def closed_form(base, adapters, layers) -> dict[str, torch.Tensor]:
    """W + s B A of the layers, other weights as they are, in float64."""
    weights = {name: weight.detach() for name, weight in base.named_parameters()}
    for name, (_, scale) in layers.items():
        a, b = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * b @ a
    return weights


def exact_logprobs(base, weights) -> torch.Tensor:
    logits = functional_call(base, weights, (IDS,)).logits[:, 3:-1]
    return logits.log_softmax(dim=-1).gather(2, IDS[:, 4:, None])[..., 0]


def assert_exact(folder, base, adapters, layers) -> None:
    """Log-probs, gradients, merged weights of a PEFT folder here are those of the closed form."""
    policy, weights = load_policy(ModelConfig(str(folder)), CPU), closed_form(base, adapters, layers)
    is_token, expected = torch.ones_like(IDS, dtype=torch.bool), exact_logprobs(base, weights)
    ours = token_logprobs(policy, IDS[:, :4], is_token[:, :4], IDS[:, 4:], is_token[:, 4:])
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
    merged = dict(merged_weights(policy))
    for name, weight in weights.items():
        torch.testing.assert_close(merged[name].double(), weight.detach(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", dtype=torch.float64)


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
    said = rf"^--model\.name_or_path .*adapters: its adapter_config.json sets {field} to .*"
    with pytest.raises(ValueError, match=said):
        load_policy(ModelConfig(str(tmp_path / "adapters")), CPU)


def test_the_head_is_exact_untied_and_refused_tied(base, tmp_path):
    layers = {"lm_head": (4, 3.0)}
    write_adapters(tmp_path / "tied", {"target_modules": ["lm_head"]}, layers, base)
    for config in (ModelConfig(f"{tmp_path}/tied"), ModelConfig(lora=LoraConfig(rank=4, target_modules=["lm_head"]))):
        with pytest.raises(ValueError, match=r"^--model.lora.target_modules: lm_head has the weight of another layer"):
            load_policy(config, CPU)
    untied = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", tie_word_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.copy_(base.lm_head.weight.flip(0))
    untied.save_pretrained(tmp_path / "model")
    settings = {"target_modules": ["lm_head"], "base_model_name_or_path": str(tmp_path / "model")}
    adapters = write_adapters(tmp_path / "untied", settings, layers, base)
    assert_exact(tmp_path / "untied", untied.double(), adapters, layers)


@each("pspo", "hf", in_ci=(*EXPERTS, "deepseek_v3", "falcon", "gpt2"))
def test_adapters_of_all_linear_layers_are_exact_or_refused(name, tmp_path):
    """Experts, routers, and layers whose weight is read without their forward pass have no adapters of LoRA."""
    model = tiny(name)
    refusal = ""
    try:
        add_adapters(model, adapter_config(ModelConfig(name, lora=LoraConfig(rank=4))))
    except ValueError as error:
        refusal = str(error)
    assert refusal or name not in EXPERTS
    if refusal:
        assert refusal.startswith("--model.lora.target_modules: ")
        if name not in EXPERTS:
            return
        model = tiny(name)
        lora = LoraConfig(rank=4, target_modules=["q_proj", "v_proj", "o_proj"])
        add_adapters(model, adapter_config(ModelConfig(name, lora=lora)))
    save_adapters(model, tmp_path)
    adapter_config(ModelConfig(lora=LoraConfig(name_or_path=str(tmp_path))))
    use_fast_products(model, has_adapters=True)
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


DAMAGED = {
    "an LFS pointer": ("adapter_model.safetensors", lambda _: b"version https://git-lfs.github.com/spec/v1\n"),
    "half a configuration": ("adapter_config.json", lambda content: content[: len(content) // 2]),
    "another rank": ("adapter_config.json", lambda content: content.replace(b'"r": 4', b'"r": 5')),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_adapters_are_named(name, damage, base, here, capsys):
    write_adapters(here / "adapters", {}, ALL_Q, base)
    file = here / "adapters" / name
    file.write_bytes(damage(file.read_bytes()))
    assert run_command(pspo.run.export.main, "--model.name_or_path=adapters") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
