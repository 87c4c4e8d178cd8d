"""Sample completions with Hugging Face `generate`; every field that shapes the distribution is explicit."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.model import attends_fully, autocast, shares_prompts
from pspo.rollout.decode import decode
from pspo.rollout.types import Decoder, Rollout, to_device


@dataclass(frozen=True)
class Sampling:
    """Everything that shapes the sampled distribution, and where completions end.

    Attributes:
        temperature: 0 decodes greedily.
        stop_ids: tokens that end a completion; part of it.
        max_rows: rows decoded at a time.
        decoder: "pspo" (`pspo.rollout.decode`), "graphs" (the same with fixed shapes, on a GPU as a CUDA graph), or
            "hf" for the library's own loop, the reference; a repetition penalty always takes the latter.
        logprobs: keep the log-probs that the tokens were sampled with; not with the library's own loop.
        synced: all ranks decode until the last one's rows have ended, by the library's own loop.
    """

    stop_ids: Sequence[int]
    pad_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    max_completion_tokens: int = 128
    min_completion_tokens: int = 0
    max_rows: int = 256
    decoder: Decoder = "pspo"
    logprobs: bool = False
    synced: bool = False

    def __post_init__(self) -> None:
        if self.logprobs and self.library:
            raise ValueError("logprobs are unavailable with decoder=hf and with a repetition_penalty")

    @property
    def library(self) -> bool:
        """True if transformers' own loop is required: its repetition penalty needs every row to stay in the batch."""
        return self.decoder == "hf" or self.repetition_penalty != 1 or self.synced

    def greedy(self) -> "Sampling":
        """Greedy decoding of the plain model, with the same limit and stop tokens."""
        return replace(self, temperature=0.0, repetition_penalty=1.0, min_completion_tokens=0)

    def generation_config(self) -> GenerationConfig:
        greedy = self.temperature == 0
        return GenerationConfig(
            do_sample=not greedy,
            temperature=1.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=50 if greedy else self.top_k,  # 50 is the library's default: any other draws a warning when greedy
            repetition_penalty=self.repetition_penalty,
            num_beams=1,
            max_new_tokens=self.max_completion_tokens,
            min_new_tokens=self.min_completion_tokens,
            eos_token_id=list(self.stop_ids),
            pad_token_id=self.pad_id,
            use_cache=True,
        )


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token lists to prompt_ids (B, P) int64 and prompt_mask (B, P) bool."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(width) >= width - lengths[:, None]


def check_decoder(model: PreTrainedModel, decoder: Decoder) -> None:
    """Raise ValueError if the decoder does not support the model."""
    if decoder != "hf" and not shares_prompts(model):
        raise ValueError(f"--rollout.decoder {decoder} does not support {type(model).__name__}'s cache; choose hf")
    if decoder != "graphs":
        return
    if not attends_fully(model) or model.config._attn_implementation != "sdpa":
        raise ValueError(
            "--rollout.decoder graphs needs sdpa attention and full attention in every layer, "
            f"not {type(model).__name__}'s ({model.config._attn_implementation}); choose pspo"
        )


@contextlib.contextmanager
def sampling_context(model: PreTrainedModel, autocast_mode: str, weights: str = "gathered") -> Iterator[None]:
    """Sampling context: unsharded weights under autocast.

    Args:
        autocast_mode: --model.autocast.
        weights: --distributed.rollout.
    """
    with dist.unsharded(model, weights), autocast(autocast_mode, model.device):
        yield


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    group_size: int = 1,
) -> Rollout:
    """``group_size`` completions for each encoded prompt, drawn with torch's global generator.

    Masks come from lengths, never from token values: a pad token may equal a stop token.
    """
    check_decoder(model, sampling.decoder)
    prompt_ids, prompt_mask = (to_device(part, model.device) for part in left_pad(prompts, sampling.pad_id))
    at_a_time = max(1, sampling.max_rows // group_size)
    pieces = []
    with _inference(model):
        for ids, mask in zip(prompt_ids.split(at_a_time), prompt_mask.split(at_a_time), strict=True):
            unpadded = int(mask.any(dim=0).long().argmax())  # columns before it are padding in all these rows
            pieces.append(_complete(model, ids[:, unpadded:], mask[:, unpadded:].long(), sampling, group_size))

    prompt_ids, prompt_mask = (part.repeat_interleave(group_size, dim=0) for part in (prompt_ids, prompt_mask))
    width = max(ids.shape[1] for ids, _ in pieces)
    completion_ids = torch.cat([pad(ids, (0, width - ids.shape[1]), value=sampling.pad_id) for ids, _ in pieces])
    is_stop = torch.isin(completion_ids, torch.tensor(sampling.stop_ids, device=model.device))
    terminated = is_stop.any(dim=1)
    lengths = torch.where(terminated, is_stop.long().argmax(dim=1) + 1, width)
    completion_mask = torch.arange(width, device=model.device) < lengths[:, None]
    tokens = [row[:length] for row, length in zip(completion_ids.tolist(), lengths.tolist(), strict=True)]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    logprobs = None
    if sampling.logprobs:
        logprobs = torch.cat([pad(part, (0, width - part.shape[1])) for _, part in pieces]).where(completion_mask, 0.0)
    return Rollout(prompt_ids, prompt_mask, completion_ids, completion_mask, terminated, texts, logprobs)


def _complete(
    model: PreTrainedModel, prompt_ids: Tensor, attention_mask: Tensor, sampling: Sampling, group_size: int
) -> tuple[Tensor, Tensor | None]:
    """(N, P) prompts to (N * group_size, T) completions, padded after their stop token, and their log-probs."""
    config = sampling.generation_config()
    if not sampling.library:
        config.top_p = 1.0  # sample_nucleus does it; the rest is the library's processors'
        loop = partial(
            decode,
            group_size=group_size,
            top_p=sampling.top_p,
            temperature=sampling.temperature or 1.0,
            stop_ids=sampling.stop_ids,
            graphs=sampling.decoder == "graphs",
            with_logprobs=sampling.logprobs,
        )
        return model.generate(prompt_ids, attention_mask=attention_mask, generation_config=config, custom_generate=loop)
    prompt_ids, attention_mask = (part.repeat_interleave(group_size, dim=0) for part in (prompt_ids, attention_mask))
    rows = model.generate(
        prompt_ids, attention_mask=attention_mask, generation_config=config, synced_gpus=sampling.synced
    )
    return rows[:, prompt_ids.shape[1] :], None


@contextlib.contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's generation config, training mode and compiled body, and restore them.

    transformers fills unset fields from the model's generation config, and refuses a KV cache in training mode with
    gradient checkpointing. A body compiled for training would be compiled again for decoding.
    """
    config, training, body = model.generation_config, model.training, model.base_model
    compiled, body._compiled_call_impl = body._compiled_call_impl, None
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        yield
    finally:
        model.generation_config, body._compiled_call_impl = config, compiled
        model.train(training)
