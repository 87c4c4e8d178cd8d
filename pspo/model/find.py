"""Find models: embedded, in local folders, or on the hub."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import transformers
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from pspo.config import DataConfig, LoraConfig, ModelConfig, require
from pspo.files import read_json
from pspo.tasks.files import read_text

ASSETS = Path(__file__).parents[1] / "assets"
TINY_BYTES = 80e6  # 20M float32 weights, the geometric mean of the embedded 0.9M and the paper's 0.5B


def locate(name_or_path: str) -> str:
    """The folder of an embedded or a local model, or the name as a hub id; ValueError for a folder without a model."""
    if (ASSETS / name_or_path / "config.json").is_file():
        return str(ASSETS / name_or_path)
    path = Path(name_or_path)
    if path.is_dir() or path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1:
        if not (path / "config.json").is_file():
            raise ValueError(f"--model.name_or_path: there is no {path / 'config.json'}")
        return str(path)
    return name_or_path


def resolve_adapters(config: ModelConfig) -> ModelConfig:
    """The configuration; if --model.name_or_path is a PEFT folder, that of its base model with these adapters."""
    folder = Path(config.name_or_path)
    if (folder / "adapter_config.json").is_file():
        rule = "must be unset with a PEFT folder, which brings its own"
        require(config.lora == LoraConfig(), "model.lora", rule, config.lora)
        require(config.revision is None, "model.revision", rule, config.revision)
        peft_config = read_json(folder / "adapter_config.json")
        base = peft_config.get("base_model_name_or_path")
        require(base, "model.name_or_path", "must be a PEFT folder that names its base model", str(folder))
        adapters = LoraConfig(name_or_path=str(folder))
        config = replace(config, name_or_path=base, revision=peft_config.get("revision"), lora=adapters)
    if config.has_adapters and importlib.util.find_spec("peft") is None:
        raise ValueError("--model.lora needs peft: pip install 'pspo[lora]'")
    return config


def find_default_lr(config: ModelConfig) -> float:
    """The default learning rate, by the bytes of the model's weights; a model of the hub counts as large.

    The paper uses 1e-6 for Qwen2.5-0.5B and -1.5B. LoRA is best at ten times the rate (Schulman et al. 2025).
    """
    config = resolve_adapters(config)
    folder = Path(locate(config.name_or_path))
    is_tiny = 0 < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < TINY_BYTES
    if config.has_adapters:
        return 3e-4 if is_tiny else 1e-5
    return 3e-5 if is_tiny else 1e-6


def load_pretrained(auto_class: Any, model: ModelConfig, **options: Any) -> Any:
    """Load with one of transformers' Auto classes; raises ValueError if loading fails."""
    source = locate(model.name_or_path)
    try:
        return auto_class.from_pretrained(
            source, revision=model.revision, trust_remote_code=model.trust_remote_code, **options
        )
    except Exception as error:  # the library raises anything on a broken model folder
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        if "custom code" in reason or "remote code" in reason:
            reason += "; read it, and set --model.trust_remote_code true if you trust it"
        raise ValueError(f"--model.name_or_path {model.name_or_path} does not load: {reason}") from error


def load_tokenizer(config: ModelConfig, data: DataConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template that --data.chat_template or a PEFT folder brings.

    Raises ValueError if the model cannot be found, or lacks what prompts and stopping need.
    """
    model = resolve_adapters(config)
    tokenizer = load_pretrained(AutoTokenizer, model)
    template = None if data is None else data.chat_template
    if isinstance(template, str):
        is_file = Path(template).is_file()
        require(is_file, "data.chat_template", "must be a mapping of arguments, or a Jinja file", template)
        tokenizer.chat_template = read_text(Path(template))
    elif model.lora.name_or_path is not None:
        file = Path(model.lora.name_or_path, "chat_template.jinja")
        if file.is_file():
            tokenizer.chat_template = read_text(file)
    source = f"--model.name_or_path {config.name_or_path}"
    if not tokenizer("0")["input_ids"]:  # without files transformers makes an empty tokenizer
        raise ValueError(f"{source} has no tokenizer: add its files to the folder")
    if not tokenizer.chat_template:
        raise ValueError(f"{source} has no chat template: add a chat_template.jinja, or use an instruct model")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{source} has no eos token to end completions with: use another model")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from lengths, so pad may equal eos
    if isinstance(template, dict):
        tokenizer.chat_template = set_template_defaults(tokenizer.get_chat_template(), template)
    return tokenizer


def set_template_defaults(template: str, arguments: dict[str, Any]) -> str:
    """The chat template with defaults for its arguments written into it; ValueError for unknown arguments."""
    for name, value in arguments.items():
        is_known = re.search(rf"\b{re.escape(str(name))}\b", template)
        require(is_known, "data.chat_template", f"sets {name}, which the chat template does not ask for", value)
        template = f"{{%- set {name} = {name} | default({value!r}) %}}{template}"
    return template


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The model's own configuration, without its weights."""
    return load_pretrained(AutoConfig, resolve_adapters(config))


def room_for_prompts(config: ModelConfig, max_completion_tokens: int, switch: str) -> float:
    """Prompt tokens that fit the model's positions before a completion; ValueError, naming the switch, if none fit."""
    text_config = load_model_config(config).get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or math.inf
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond the original positions a batch gets other frequencies
        positions = rope["original_max_position_embeddings"]
    require(positions > max_completion_tokens, switch, f"must be below {positions} positions", max_completion_tokens)
    return positions - max_completion_tokens


def token_ids(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], switch: str = "rollout.stop_tokens"
) -> list[int]:
    """Ids of tokens by their texts; raises ValueError for a text that is no token of the tokenizer."""
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            raise ValueError(f"--{switch}: the tokenizer has no {token!r}; stop_strings takes any text")
    return sorted(vocabulary[token] for token in tokens)


def stop_token_ids(model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion: the model's and the tokenizer's eos, and the chat template's end of a turn.

    These differ for a base model such as Qwen2.5: its eos ends a document, its template ends a turn by <|im_end|>.
    """
    eos = model.generation_config.eos_token_id
    stops = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id, end_of_turn_id(tokenizer)}
    return sorted(stops - {None})


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after the assistant's words; None if it writes none."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\0"}]
    try:
        _, words, ending = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("\0")
    except jinja2.TemplateError:  # a template for single questions
        return None
    ids = tokenizer(ending.lstrip(), add_special_tokens=False)["input_ids"] if words else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def check_token_ids(
    model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]
) -> None:
    """Raise ValueError if prompts hold a token that the model does not have, such as one for images."""
    size = model_config.get_text_config().vocab_size
    largest = max(chain.from_iterable(prompts), default=0)
    if largest >= size:
        token = f"{tokenizer.convert_ids_to_tokens(largest)!r} (id {largest:,})"
        fix = "resize the model's embeddings to the tokenizer, name another pad_token, or take it out of the texts"
        raise ValueError(f"--model.name_or_path: the model's {size:,} tokens do not include {token}: {fix}")
