"""Load a policy and its tokenizer, ready to train, and check that both are what the trainer needs."""

import contextlib
import difflib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import jinja2
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from pspo import distributed as dist
from pspo.model.device import casts_to_bf16
from pspo.model.linear import use_onednn
from pspo.model.logprobs import head_logits
from pspo.model.lora import add_adapters, fill_adapters, resolve_adapters, uses_adapters
from pspo.tasks.hub import is_offline

transformers.utils.logging.disable_progress_bar()  # its bar for loading weights would stand above ours

if TYPE_CHECKING:
    from pspo.config import ModelConfig

ASSETS = Path(__file__).parents[1] / "assets"


def locate(name_or_path: str) -> str:
    """The folder of an embedded model or of a local one, or else the name as a hub id.

    Raises ValueError for a path that is no model folder.
    """
    if (ASSETS / name_or_path / "config.json").is_file():
        return str(ASSETS / name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir() or path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1:
        if not (path / "config.json").is_file():
            what = "holds no config.json" if path.is_dir() else "does not exist"
            raise ValueError(f"--model.name_or_path: model folder {path} {what}")
        return str(path)
    return name_or_path


def load_tokenizer(config: "ModelConfig") -> PreTrainedTokenizerBase:
    """The tokenizer; raises ValueError if the model cannot be found, or lacks what prompts and stopping need."""
    tokenizer = _from_pretrained(AutoTokenizer, resolve_adapters(config))
    for there, fix in (
        (tokenizer("0")["input_ids"], "no tokenizer: add its files to the folder"),  # transformers makes an empty one
        (tokenizer.chat_template, "no chat template: add a chat_template.jinja, or use an instruct model"),
        (tokenizer.eos_token_id is not None, "no eos token to end completions with: use another model"),
    ):
        if not there:
            raise ValueError(f"--model.name_or_path {config.name_or_path} has {fix}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from lengths, so pad may equal eos
    return tokenizer


def load_model_config(config: "ModelConfig") -> transformers.PretrainedConfig:
    """The model's own configuration, without its weights; raises ValueError for a model that cannot be found."""
    return _from_pretrained(AutoConfig, resolve_adapters(config))


def load_policy(config: "ModelConfig", device: torch.device | None = None, sharded: bool = False) -> PreTrainedModel:
    """The model, ready to train, by default on this process's GPU if it has one; with LoRA all but adapters is frozen.

    If ``sharded``, it is spread over the ranks, and each reads its own rows.

    Dropout is off (in what is saved, too), because old and new log-probs must come from one function. The weights are
    of --model.dtype, whatever the checkpoint's: by default float32, because a step of 1e-6 vanishes in bfloat16.

    Raises ValueError for a model that cannot be found, or that makes its logits in a way `head_logits` does not know.
    """
    device, config = device or dist.local_device(), resolve_adapters(config)
    policy = _sharded_policy(config, device) if sharded else _whole_policy(config, device)
    if uses_adapters(config):
        fill_adapters(policy, config.lora.name_or_path)
    check_head(policy)
    if config.compile:
        policy.base_model.compile(dynamic=True)
    return policy


def _whole_policy(config: "ModelConfig", device: torch.device) -> PreTrainedModel:
    options = {"attn_implementation": config.attn_implementation, "output_loading_info": True}
    options |= {"dtype": weights_dtype(config, device), "config": _without_dropout(config)}
    policy, loading = _from_pretrained(AutoModelForCausalLM, config, **options)
    if missing := sorted(loading["missing_keys"]):  # they would be random
        raise ValueError(f"--model.name_or_path {config.name_or_path}: its weights lack {', '.join(missing[:3])} ...")
    return _ready(policy.to(device), config)


def weights_dtype(config: "ModelConfig", device: torch.device) -> torch.dtype:
    """The dtype of the weights; of the frozen ones under LoRA."""
    auto = "bfloat16" if uses_adapters(config) and casts_to_bf16(config.autocast, device) else "float32"
    return getattr(torch, auto if config.dtype == "auto" else config.dtype)


def _sharded_policy(config: "ModelConfig", device: torch.device) -> PreTrainedModel:
    """Shard a model that has no memory yet, then read each rank's rows of the weights from its safetensors files."""
    dist.run_on_main(lambda: _weight_files(config))  # downloads once, before the other ranks look
    files, model_config = _weight_files(config), _without_dropout(config)
    with _load_errors(config):
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(
                model_config,
                dtype=weights_dtype(config, device),
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
            )
        if (files[0].parent / "generation_config.json").exists():
            policy.generation_config = transformers.GenerationConfig.from_pretrained(files[0].parent)
    policy = _ready(policy, config)
    dist.shard(policy, torch.bfloat16 if casts_to_bf16(config.autocast, device) else None)
    missing = dist.fill(policy, files, device)
    if missing := [name for name in missing if "lora_" not in name]:
        lacking = f"its files lack {', '.join(missing[:3])} ..."
        fix = "load it in one process and save it with save_pretrained"
        raise ValueError(f"--model.name_or_path {config.name_or_path}: {lacking}; {fix}")
    return policy


def _weight_files(config: "ModelConfig") -> list[Path]:
    """The safetensors files of a local model, or of one of the hub, downloaded if need be."""
    with _load_errors(config):
        source = locate(config.name_or_path)
        if not Path(source).is_dir():
            patterns = ["*.safetensors", "*.json"]
            source = huggingface_hub.snapshot_download(source, revision=config.revision, allow_patterns=patterns)
        files = sorted(Path(source).glob("*.safetensors"))
        if not files:
            raise ValueError("it has no safetensors files")
        return files


def _without_dropout(config: "ModelConfig") -> transformers.PretrainedConfig:
    model_config = load_model_config(config)
    for part in (model_config, model_config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(part, name, 0.0)
    return model_config


def _ready(policy: PreTrainedModel, config: "ModelConfig") -> PreTrainedModel:
    if uses_adapters(config):
        add_adapters(policy, config)
    policy.eval()
    use_onednn(policy)
    if config.gradient_checkpointing:
        checkpoint_activations(policy)
    return policy


def checkpoint_activations(policy: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass, also of layers that fill a cache (`PassCache`).

    By transformers' own switch layers would lose their cache, and so the prompts that rows share.
    """
    layers = [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"--model.gradient_checkpointing does not support {type(policy).__name__}: leave it off")
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _from_pretrained(auto_class: Any, model: "ModelConfig", /, **options: Any) -> Any:
    source = locate(model.name_or_path)
    if not Path(source).is_dir():
        is_offline()
    with _load_errors(model):
        return auto_class.from_pretrained(
            source, revision=model.revision, trust_remote_code=model.trust_remote_code, **options
        )


@contextlib.contextmanager
def _load_errors(config: "ModelConfig") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises anything on a broken model folder
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        if "custom code" in reason or "remote code" in reason:
            raise ValueError(
                f"--model.trust_remote_code is off, and {config.name_or_path} needs the Python code in it: "
                "read that code and set --model.trust_remote_code true if you trust it, or use another model"
            ) from error
        if isinstance(error, ImportError) or "attention implementation" in reason or "attn_implementation" in reason:
            raise ValueError(f"--model.attn_implementation {config.attn_implementation}: {reason}") from error
        embedded = sorted(path.parent.name for path in ASSETS.glob("*/config.json"))
        close = difflib.get_close_matches(config.name_or_path, embedded, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        if isinstance(error, OSError) and not Path(locate(config.name_or_path)).is_dir() and is_offline():
            reason = "is no folder here and not in the hub's cache, and the hub cannot be reached"
        else:
            reason = f"is neither an embedded model ({', '.join(embedded)}) nor one that loads: {reason}"
        raise ValueError(f"--model.name_or_path {config.name_or_path} {reason}{meant}") from error


@dist.gathers_weights
@torch.no_grad()
def check_head(policy: PreTrainedModel) -> None:
    """Raise ValueError if the logits are made in a way that `token_logprobs` does not know."""
    ids = torch.arange(4, device=policy.device)[None]
    hidden = policy.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = head_logits(policy, hidden)  # first: the model's own forward leaves a sharded head resharded
    if not torch.allclose(logits, policy(input_ids=ids, use_cache=False).logits, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(policy).__name__} does more to its logits than its output embedding and softcapping; "
            "pspo.model.logprobs.head_logits must learn it before this architecture can be trained"
        )


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion: the model's and the tokenizer's eos, and the chat template's end of a turn.

    They differ for a base model such as Qwen2.5's: its eos ends a document, its template ends a turn by <|im_end|>.
    """
    stops = model.generation_config.eos_token_id
    stops = {*(stops if isinstance(stops, list) else [stops]), tokenizer.eos_token_id, end_of_turn_id(tokenizer)}
    return sorted(stops - {None})


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after the assistant's words; None if it writes none."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\0"}]
    try:
        _, words, after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("\0")
    except jinja2.TemplateError:  # a template for single questions
        return None
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"] if words else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def pad_token_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that prompts are padded with; raises ValueError if it is none of the model's."""
    size, pad = model.config.get_text_config().vocab_size, tokenizer.pad_token_id
    if pad >= size:
        what = f"the tokenizer's pad token {tokenizer.pad_token!r} ({pad}) is none of the model's {size:,}"
        raise ValueError(f"--model.name_or_path: {what}; name another in its tokenizer_config.json")
    return pad
