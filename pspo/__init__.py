"""pspo: a from-scratch, pure-PyTorch RL trainer for language models (reference implementation of PSPO)."""

__version__ = "0.1.0"
