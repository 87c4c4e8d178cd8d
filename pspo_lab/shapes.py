"""Shapes of models: the elements and bytes that `pspo_lab.plan_command` adds up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Qwen2 or Llama: grouped-query attention, SwiGLU, RMSNorm. Counts elements, and bytes in bf16 autocast."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    head_dim: int = 128
    qkv_bias: bool = True

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's matrices, by name."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer(self) -> int:
        """Elements of a layer's matrices."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    def adapters(self, rank: int, targets: str | list[str]) -> int:
        """Elements of LoRA adapters at the named matrices, or at all of them ("all-linear")."""
        names = self.linears if targets == "all-linear" else targets
        return self.layers * sum(rank * sum(self.linears.get(name, (0, 0))) for name in names)

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """Elements of input and output embedding."""
        return self.head * (1 if self.tied else 2)

    @property
    def matrices(self) -> int:
        """Elements that a token is multiplied by; those of an untied input embedding are looked up."""
        return self.layers * self.layer + self.head

    @property
    def parameters(self) -> int:
        bias = self.qkv_bias * self.head_dim * (self.heads + 2 * self.kv_heads)
        return self.layers * (self.layer + bias + 2 * self.hidden) + self.hidden + self.root

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def activations(self, tokens: float, keys: float, pairs: float, checkpointing: bool) -> float:
        """Bytes that autograd keeps of a forward pass through the layers, with attention through sdpa and a mask.

        Per token and layer: residual and its normalised form twice in float32, bf16 copies of the latter for q, k, v,
        gate and up, query and attention's output, four times the intermediate. Per key of each row, cached ones
        included: key and value, repeated to all heads. With checkpointing: each layer's input, and one layer's all.
        """
        width = self.heads * self.head_dim
        per_token = 26 * self.hidden + 4 * width + 8 * self.intermediate + 4 * self.heads + 8
        layer = tokens * per_token + keys * 4 * width + 2 * pairs
        layers = layer + self.layers * tokens * 4 * self.hidden if checkpointing else self.layers * layer
        return layers + tokens * (8 * self.hidden + 4)  # the last norm


QWEN = {  # Qwen2.5's technical report and config.json; Qwen2, -Math and -Coder of a size have its layers
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True, 64),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3B": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "14B": Shape(5120, 13824, 48, 40, 8, 152064, False),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064, False),
    "72B": Shape(8192, 29568, 80, 64, 8, 152064, False),
}
