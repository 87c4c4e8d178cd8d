"""The float32 products by oneDNN, against float64, and everything that is not float32 left to PyTorch."""

import copy

import pytest
import torch
from torch import nn

import pspo.model.linear
from pspo.config import ModelConfig
from pspo.model import load_policy
from pspo.model.linear import onednn_linear, use_onednn

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
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
        use_onednn(ours)
        assert ours[0].forward.func is onednn_linear
        return theirs, ours[0]

    return make


@pytest.mark.parametrize(
    ("shape", "bias"), [((7, 48), True), ((3, 5, 48), False), ((2, 0, 48), True), ((0, 48), False), ((48,), True)]
)
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


def test_a_frozen_layer_gets_no_gradient_and_passes_one_on(layers):
    theirs, ours = layers(16, 8)
    ours.requires_grad_(False)
    x = torch.randn(4, 16, requires_grad=True)
    ours(x).sum().backward()
    assert ours.weight.grad is None
    assert ours.bias.grad is None
    torch.testing.assert_close(x.grad, theirs.weight.sum(dim=0).expand(4, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float64, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_other_dtypes_and_autocast_are_pytorchs_to_the_bit(layers, dtype, autocast):
    theirs, ours = layers(16, 8, dtype=dtype)
    x = torch.randn(4, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert ours(x).dtype == (torch.bfloat16 if autocast else dtype)
        assert torch.equal(ours(x), theirs(x))


def test_a_loaded_policy_computes_by_onednn_and_is_saved_as_ever(tmp_path):
    policy = load_policy(ModelConfig("tiny-base"), CPU)
    products = [module for module in policy.modules() if isinstance(module, nn.Linear)]
    assert products
    assert all(module.forward.func is onednn_linear for module in products)
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight  # still tied
    policy.save_pretrained(tmp_path)
    again = load_policy(ModelConfig(str(tmp_path)), CPU)
    for (name, old), (_, new) in zip(policy.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(old, new), name
