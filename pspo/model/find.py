"""Find models: embedded, in local folders, or on the hub; what the library raises becomes one sentence."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
import transformers
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from pspo.config import DataConfig, ModelConfig, require

ASSETS = Path(__file__).parents[1] / "assets"


def locate(name_or_path: str) -> str:
    """The folder of an embedded or a local model, or the name as a hub id; ValueError for a wrong path or near miss."""
    if (ASSETS / name_or_path / "config.json").is_file():
        return str(ASSETS / name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir() or path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1:
        if not (path / "config.json").is_file():
            what = "holds no config.json" if path.is_dir() else "does not exist"
            raise ValueError(f"--model.name_or_path: model folder {path} {what}")
        return str(path)
    if close := difflib.get_close_matches(name_or_path, embedded_models(), 1, 0.8):
        raise ValueError(f"--model.name_or_path {name_or_path} does not exist; did you mean {close[0]}?")
    return name_or_path


def embedded_models() -> list[str]:
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def load_pretrained(auto_class: Any, model: ModelConfig, **options: Any) -> Any:
    """Load with one of transformers' Auto classes; raises ValueError naming the switch to mend."""
    source = locate(model.name_or_path)
    with load_errors(model):
        return auto_class.from_pretrained(
            source, revision=model.revision, trust_remote_code=model.trust_remote_code, **options
        )


def load_tokenizer(config: ModelConfig, data: DataConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template that --data.chat_template or a PEFT folder brings.

    Raises ValueError if the model cannot be found, or lacks what prompts and stopping need.
    """
    model = config.resolved()
    wanted = None if data is None else data.chat_template
    tokenizer = load_pretrained(AutoTokenizer, model)
    adapter_template = Path(model.lora.name_or_path or "", "chat_template.jinja")
    if isinstance(wanted, str):
        file = Path(wanted).expanduser()
        require(file.is_file(), "data.chat_template", "must be a mapping of arguments, or a Jinja file", wanted)
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    elif model.lora.name_or_path is not None and adapter_template.is_file():
        tokenizer.chat_template = adapter_template.read_text(encoding="utf-8")
    missing = None
    if not tokenizer("0")["input_ids"]:  # transformers makes an empty one
        missing = "tokenizer: add its files to the folder"
    elif not tokenizer.chat_template:
        missing = "chat template: add a chat_template.jinja, or use an instruct model"
    elif tokenizer.eos_token_id is None:
        missing = "eos token to end completions with: use another model"
    if missing:
        raise ValueError(f"--model.name_or_path {config.name_or_path} has no {missing}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from lengths, so pad may equal eos
    if isinstance(wanted, dict):
        tokenizer.chat_template = set_template_defaults(tokenizer.get_chat_template(), wanted)
    return tokenizer


def set_template_defaults(template: str, arguments: dict[str, Any]) -> str:
    """The chat template with defaults for its arguments, so that the saved model has them; ValueError for unknown ones.

    An argument of `apply_chat_template` still overrides its default.
    """
    for name, value in arguments.items():
        is_known = re.search(rf"\b{re.escape(str(name))}\b", template)
        require(is_known, "data.chat_template", f"sets {name}, which the chat template does not ask for", value)
        template = f"{{%- set {name} = {name} | default({value!r}) %}}{template}"
    return template


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The model's own configuration, without its weights; raises ValueError for a model that cannot be found."""
    return load_pretrained(AutoConfig, config.resolved())


def room_for_prompts(config: ModelConfig, max_completion_tokens: int, switch: str) -> float:
    """Prompt tokens that fit the model's positions before a completion; infinite without such a limit.

    LongRoPE's positions end where it would switch to other frequencies, for all rows of a batch at once. Raises
    ValueError, naming the switch, if none fit.
    """
    text_config = load_model_config(config).get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        positions = rope["original_max_position_embeddings"]
    if positions is not None and positions <= max_completion_tokens:
        raise ValueError(f"--{switch} must be below the model's {positions} positions, got {max_completion_tokens}")
    return math.inf if positions is None else positions - max_completion_tokens


def config_without_dropout(config: ModelConfig) -> PretrainedConfig:
    """The model's own configuration, with every dropout at 0."""
    model_config = load_model_config(config)
    for part in (model_config, model_config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(part, name, 0.0)
    return model_config


def token_ids(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], switch: str = "rollout.stop_tokens"
) -> list[int]:
    """Ids of tokens by their texts; raises ValueError naming the switch for one that the tokenizer does not have."""
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            raise ValueError(f"--{switch}: the tokenizer has no {token!r}; stop_strings takes any text")
    return sorted(vocabulary[token] for token in tokens)


def stop_token_ids(model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion: the model's and the tokenizer's eos, and the chat template's end of a turn.

    They differ for a base model such as Qwen2.5's: its eos ends a document, its template ends a turn by <|im_end|>.
    """
    eos = model.generation_config.eos_token_id
    stops = [*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id, end_of_turn_id(tokenizer)]
    for stop in stops:
        if stop is not None and not isinstance(stop, int):
            raise ValueError(f"--model.name_or_path {model.name_or_path}: its eos_token_id {stop!r} is no integer")
    return sorted({*stops} - {None})


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after the assistant's words; None if it writes none."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\0"}]
    try:
        _, words, ending = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("\0")
    except jinja2.TemplateError:  # a template for single questions
        return None
    ids = tokenizer(ending.lstrip(), add_special_tokens=False)["input_ids"] if words else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def pad_token_id(model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that prompts are padded with; raises ValueError if the tokenizer has a token that the model has not."""
    size = model.config.get_text_config().vocab_size
    token, token_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if token_id >= size:
        raise ValueError(
            f"--model.name_or_path: the tokenizer's token {token!r} ({token_id}) is none of the model's {size:,}; "
            "take it out of the tokenizer's files, or use the model's own"
        )
    return tokenizer.pad_token_id


def weight_folder(config: ModelConfig) -> Path:
    """The folder with the safetensors files of a local model, or of one of the hub, downloaded if need be."""
    with load_errors(config):
        source = locate(config.name_or_path)
        if not Path(source).is_dir():
            patterns = ["*.safetensors", "*.json"]
            source = huggingface_hub.snapshot_download(source, revision=config.revision, allow_patterns=patterns)
        if not any(Path(source).glob("*.safetensors")):
            raise ValueError("it has no safetensors files")
        return Path(source)


@contextlib.contextmanager
def load_errors(config: ModelConfig) -> Iterator[None]:
    """Turn whatever the library raises on a model folder into a ValueError of one sentence."""
    try:
        yield
    except Exception as error:  # the library raises anything on a broken model folder
        text = str(error).strip() or type(error).__name__
        reason = re.sub(r":\s*\n\s*", ": ", text).partition("\n")[0]
        if "custom code" in reason or "remote code" in reason:
            raise ValueError(
                f"--model.trust_remote_code is off, and {config.name_or_path} needs the Python code in it: "
                "read that code and set --model.trust_remote_code true if you trust it, or use another model"
            ) from error
        if isinstance(error, ImportError) or "attention implementation" in reason or "attn_implementation" in reason:
            raise ValueError(f"--model.attn_implementation {config.attn_implementation}: {reason}") from error
        what = f"is neither an embedded model ({', '.join(embedded_models())}) nor one that loads: {reason}"
        raise ValueError(f"--model.name_or_path {config.name_or_path} {what}") from error
