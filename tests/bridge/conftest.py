"""TRL is imported while there is no module vllm: it would take the folder tests/vllm for the library."""

import contextlib
import sys

sys.modules["vllm"] = None
with contextlib.suppress(ImportError):
    import trl.trainer.grpo_trainer  # noqa: F401
del sys.modules["vllm"]
