"""Shapes of models with random weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Qwen2 or Llama: grouped-query attention, SwiGLU, RMSNorm. Counts elements, and bytes in bf16."""

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
    def layer(self) -> int:
        """Elements of a layer's matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def matrices(self) -> int:
        """Elements that a token is multiplied by; those of an untied input embedding are looked up."""
        return self.layers * self.layer + self.head

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


QWEN = {  # Qwen2.5's technical report and config.json; Qwen2, -Math and -Coder of a size have its layers
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True, 64),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3B": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "14B": Shape(5120, 13824, 48, 40, 8, 152064, False),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064, False),
    "72B": Shape(8192, 29568, 80, 64, 8, 152064, False),
}
