"""Load a policy and its tokenizer, and compute the log-probs that everything else is made of."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pspo.model.linear import use_onednn

transformers.utils.logging.disable_progress_bar()  # a bar for loading weights, on top of our own

if TYPE_CHECKING:
    from pspo.config import ModelConfig

ASSETS = Path(__file__).parents[1] / "assets"
HEAD_CHUNK_BYTES = 2**24  # of float32 logits held at a time,
HEAD_CHUNK_TOKENS = 256  # but those of so many tokens: each chunk costs a pass over the output embedding's gradient
MIN_PREFIX = 16  # shorter common beginnings of prompts are not worth a pass of their own


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
    """The tokenizer, checked to have what prompts and stopping need.

    Raises ValueError for a model that cannot be found, or a tokenizer without chat template or end token.
    """
    source = locate(config.name_or_path)
    with _load_errors(config):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    if not tokenizer("0")["input_ids"]:  # what transformers makes of a folder without one
        raise ValueError(f"--model.name_or_path {config.name_or_path} has no tokenizer: add its files to the folder")
    if not tokenizer.chat_template:
        raise ValueError(
            f"--model.name_or_path: the tokenizer of {config.name_or_path} has no chat template: "
            "add a chat_template.jinja to the model folder, or use an instruct model"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--model.name_or_path: the tokenizer of {config.name_or_path} has no eos token to end with")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from lengths, so pad may equal eos
    return tokenizer


def load_model_config(config: "ModelConfig") -> PretrainedConfig:
    """The model's own configuration, without its weights; raises ValueError for a model that cannot be found."""
    source = locate(config.name_or_path)
    with _load_errors(config):
        return AutoConfig.from_pretrained(source, revision=config.revision, trust_remote_code=config.trust_remote_code)


def load_policy(config: "ModelConfig", device: torch.device) -> PreTrainedModel:
    """The model with float32 weights, ready to train.

    Dropout is switched off (in what is saved, too), for old and new log-probs must come from one function. The weights
    are float32 whatever the checkpoint's dtype: a step of 1e-6 vanishes in bfloat16 weights.

    Raises:
        ValueError: for a model that cannot be found, or whose logits are more than its output embedding applied
            to its last hidden state (softcapping excepted, which `token_logprobs` knows).
    """
    model_config = _without_dropout(config)
    with _load_errors(config):
        policy, loading = AutoModelForCausalLM.from_pretrained(
            locate(config.name_or_path),
            config=model_config,
            dtype=torch.float32,
            attn_implementation=config.attn_implementation,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
        if loading["missing_keys"]:  # they would be random
            raise ValueError(f"its weights lack {', '.join(sorted(loading['missing_keys'])[:3])} ...")
    policy = _ready(policy.to(device), config)
    check_head(policy)
    if config.compile:
        policy.base_model.compile(dynamic=True)
    return policy


def weight_files(config: "ModelConfig") -> list[Path]:
    """The safetensors files of a local model, or of one of the hub, which are downloaded if need be."""
    with _load_errors(config):
        source = locate(config.name_or_path)
        if not Path(source).is_dir():
            patterns = ["*.safetensors", "*.json"]
            source = huggingface_hub.snapshot_download(source, revision=config.revision, allow_patterns=patterns)
        files = sorted(Path(source).glob("*.safetensors"))
        if not files:
            raise ValueError("it has no safetensors files")
        return files


def empty_policy(config: "ModelConfig", folder: Path) -> PreTrainedModel:
    """The model as `load_policy` makes it, but on the meta device: without the weights that lie in ``folder``."""
    model_config = _without_dropout(config)
    with _load_errors(config):
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(
                model_config,
                dtype=torch.float32,
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
            )
        if (folder / "generation_config.json").exists():
            policy.generation_config = GenerationConfig.from_pretrained(folder)
    return _ready(policy, config)


def _without_dropout(config: "ModelConfig") -> PretrainedConfig:
    model_config = load_model_config(config)
    for part in (model_config, model_config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(part, name, 0.0)
    return model_config


def _ready(policy: PreTrainedModel, config: "ModelConfig") -> PreTrainedModel:
    policy.eval()
    use_onednn(policy)
    if config.gradient_checkpointing:
        policy.activation_checkpointing_enable({"use_reentrant": False})
        policy.train()  # transformers checkpoints in training mode only; there is no dropout that it could switch on
    return policy


@contextlib.contextmanager
def _load_errors(config: "ModelConfig") -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # of what is refused in the next line
            yield
    except Exception as error:  # a model folder is somebody else's data, of which the library raises what it likes
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        if "custom code" in reason or "remote code" in reason:
            raise ValueError(
                f"--model.trust_remote_code is off, and {config.name_or_path} needs the Python code in it: "
                "read that code and set --model.trust_remote_code true if you trust it, or use another model"
            ) from error
        if isinstance(error, ImportError) or "attention implementation" in reason or "attn_implementation" in reason:
            raise ValueError(f"--model.attn_implementation {config.attn_implementation}: {reason}") from error
        raise ValueError(
            f"--model.name_or_path {config.name_or_path} is neither an embedded model (tiny-base, tiny-math) "
            f"nor a folder or hub model that loads: {reason}"
        ) from error


@torch.no_grad()
def check_head(policy: PreTrainedModel) -> None:
    """Raise ValueError where the logits are made in a way that `token_logprobs` does not know."""
    ids = torch.arange(4, device=policy.device)[None]
    hidden = policy.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(_logits(policy, hidden), policy(input_ids=ids, use_cache=False).logits, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(policy).__name__} does more to its logits than its output embedding and softcapping; "
            "pspo.model._logits must learn it before this architecture can be trained"
        )


def _logits(model: PreTrainedModel, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """(..., H) hidden states to (..., V) logits, as the model's own forward does, divided by the temperature."""
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is None and getattr(head, "bias", None) is None:
        return head(hidden / temperature)  # a pass over (..., H) in place of one over (..., V)
    logits = head(hidden)
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def _head_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log pi(target) from hidden states (n, H) and targets (n,): (n,), float32 or wider."""
    logits = _logits(model, hidden, temperature)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)


def _head_chunk(model: PreTrainedModel) -> int:
    """Tokens whose logits are held at a time."""
    return max(HEAD_CHUNK_TOKENS, HEAD_CHUNK_BYTES // (4 * model.config.get_text_config().vocab_size))


def token_logprobs(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """log pi(completion token | what precedes it): the one source of old, new and reference log-probs.

    Logits are computed at unmasked completion positions only, in chunks of tokens that are recomputed in the
    backward pass, so that no (B, T, V) tensor ever exists.

    Args:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; masked positions get 0.
        temperature: divides the logits, as in the sampling. The nucleus is not renormalised.

    Returns:
        (B, T) float32 (float64 for a float64 model), in nats.
    """
    hidden = _hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)[completion_mask]  # (N, H)
    chunks = (x.split(_head_chunk(model)) for x in (hidden, completion_ids[completion_mask]))
    pieces = [
        checkpoint(_head_logprobs, model, h, targets, temperature, use_reentrant=False)
        for h, targets in zip(*chunks, strict=True)
    ]
    return _spread(torch.cat(pieces), completion_mask)


def backward_in_one_pass(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float,
    loss: Callable[[Tensor, slice], Tensor],
) -> Tensor:
    """Accumulate the gradient of a loss that is a sum over tokens of functions of their own log-probs.

    Each chunk of logits is turned into its own gradient, in place, while it is there: nothing is computed twice or held
    longer. Then one backward pass goes through the body. Same log-probs as `token_logprobs`, to the bit, and the same
    gradient as through it, to rounding.

    Args:
        prompt_ids ... temperature: as for `token_logprobs`.
        loss: maps log-probs (n, 1) of some unmasked tokens, and their place among all N in row-major order, to the
            sum of their losses.

    Returns:
        The log-probs as `token_logprobs` gives them, without gradient.
    """
    hidden = _hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)[completion_mask]  # (N, H)
    chunk, pieces, gradients = _head_chunk(model), [], []
    targets = completion_ids[completion_mask].split(chunk)
    for i, h in enumerate(hidden.detach().split(chunk)):
        logits = _logits(model, h.requires_grad_(), temperature)  # (n, V)
        probs, target = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)), targets[i][:, None]
        logprobs = probs.gather(1, target)  # (n, 1)
        peak = probs.amax(dim=1, keepdim=True)
        total = probs.sub_(peak).exp_().sum(dim=1, keepdim=True)
        logprobs = (logprobs - (total.log() + peak)).requires_grad_()
        (slopes,) = torch.autograd.grad(loss(logprobs, slice(i * chunk, i * chunk + len(h))), logprobs)
        # dlogprob / dlogits = one-hot of the target - probs
        d_logits = probs.mul_(-slopes / total).scatter_add_(1, target, slopes.to(probs.dtype))
        with torch.autocast(h.device.type, enabled=False):
            logits.backward(d_logits.to(logits.dtype))
        pieces.append(logprobs.detach())
        gradients.append(h.grad)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden.backward(torch.cat(gradients))
    return _spread(torch.cat(pieces).squeeze(1), completion_mask)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the unmasked tokens to (B, T), 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _hidden_states(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> Tensor:
    """(B, T, H): the last hidden states from which the model predicts each completion token.

    What rows have in common is computed once: the beginning of all prompts (the system prompt), then the rest of each
    prompt for its adjacent rows, then the completions, each on top of the keys and values of what precedes it, through
    which gradients flow. Same numbers to rounding, several times less work where prompts are long.
    """
    ids = torch.cat([prompt_ids, completion_ids], dim=1)[:, :-1]  # the last token predicts nothing
    mask = torch.cat([prompt_mask, completion_mask], dim=1)[:, :-1].long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    width = prompt_ids.shape[1]
    is_first = torch.ones_like(ids[:, 0], dtype=torch.bool)  # of the rows with its prompt
    is_first[1:] = (prompt_ids[1:] != prompt_ids[:-1]).any(dim=1) | (prompt_mask[1:] != prompt_mask[:-1]).any(dim=1)
    prompts = is_first.nonzero().squeeze(1)  # (n,), the row that stands for each prompt
    prefix = prompt_ids[0, :0]  # (L,)
    if len(prompts) > 1 and attends_fully(model):
        prefix = _common_prefix(prompt_ids[prompts], prompt_mask[prompts])
    alone = len(prefix) == 0 and len(prompts) == len(ids)
    cached = shares_prompts(model) and not model.training  # training mode means checkpointing: no cache then
    if alone or not cached or ids.shape[1] == width:
        body = model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        return body.last_hidden_state[:, width - 1 :]

    cache = DynamicCache(config=model.config)

    def body(ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return model.base_model(**inputs, past_key_values=cache, use_cache=True).last_hidden_state

    L = len(prefix)
    if L > 0:
        body(prefix[None], torch.ones_like(prefix)[None], torch.arange(L, device=ids.device)[None])
        cache.batch_select_indices(torch.zeros_like(prompts))
        mask[:, L:width] *= positions[:, L:width] >= L  # the prefix takes the first L columns of every row,
        mask[:, :L] = 1  # whatever padding was there
    last = body(ids[prompts, L:width], mask[prompts, :width], positions[prompts, L:width])[:, -1:]
    prompt_of_row = is_first.cumsum(dim=0) - 1  # (B,)
    cache.batch_select_indices(prompt_of_row)
    return torch.cat([last[prompt_of_row], body(ids[:, width:], mask, positions[:, width:])], dim=1)


def _common_prefix(prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
    """The tokens (L,) with which all prompts begin, less than the shortest of them; none where too few to matter."""
    lengths = prompt_mask.sum(dim=1)
    columns = torch.arange(int(lengths.min()) - 1, device=prompt_ids.device)
    aligned = prompt_ids.gather(1, (prompt_ids.shape[1] - lengths)[:, None] + columns)  # (B, shortest - 1)
    L = int((aligned == aligned[0]).all(dim=0).cumprod(dim=0).sum())
    return aligned[0, : L if L >= MIN_PREFIX else 0]


def attends_fully(model: PreTrainedModel) -> bool:
    """Whether every layer attends to everything before, wherever padding lies: windows and ALiBi count columns."""
    config = model.config.get_text_config()
    windows = "local" in getattr(config, "attention_layers", ())  # GPT-Neo's, which its cache does not show
    alibi = getattr(config, "alibi", config.model_type in ("bloom", "mpt"))
    layers = DynamicCache(config=model.config).layers
    return not windows and not alibi and all(type(layer) is DynamicLayer for layer in layers)


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether every layer's cache is keys and values, which rows can share: no linear attention, no state spaces."""
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion: those of the model's generation config and the tokenizer's eos.

    Raises ValueError where one is no token of the model.
    """
    stops = model.generation_config.eos_token_id
    stops = [*(stops if isinstance(stops, list) else [stops]), tokenizer.eos_token_id]
    for stop in stops:
        if stop is not None and not (isinstance(stop, int) and 0 <= stop < model.config.get_text_config().vocab_size):
            raise ValueError(f"--model.name_or_path: eos_token_id {stop!r} of its generation_config.json is no token")
    return sorted({*stops} - {None})


def pad_token_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that prompts are padded with; raises ValueError where it is none of the model's."""
    size, pad = model.config.get_text_config().vocab_size, tokenizer.pad_token_id
    if pad >= size:
        raise ValueError(
            f"--model.name_or_path: the tokenizer's pad token {tokenizer.pad_token!r} ({pad}) is none of the model's "
            f"{size:,}; name another in its tokenizer_config.json"
        )
    return pad


def autocast(mode: str, device: torch.device) -> torch.autocast:
    """The context of every forward pass for --model.autocast auto, bf16 or none."""
    return torch.autocast(device.type, torch.bfloat16, enabled=autocasts(mode, device))


def autocasts(mode: str, device: torch.device) -> bool:
    """Whether that context casts anything."""
    return mode == "bf16" or (
        mode == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )


def out_of_memory(error: RuntimeError) -> bool:
    """Whether this is a GPU's allocator that found no memory, or the CPU's, or oneDNN's or C++'s."""
    cpu = ("can't allocate memory", "could not create a primitive", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in cpu)


@contextlib.contextmanager
def memory_errors(prog: str, advice: str) -> Iterator[None]:
    """Where memory runs out in here it becomes two lines, the second of them advice, and exit code 1."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        print(f"\n{prog}: out of memory: {reason}\n{advice}", file=sys.stderr)
        raise SystemExit(1) from None
