"""`make_sampling`: every field of `Sampling` explicit, and a decoder that can draw from the model."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.config import AlgorithmConfig, Decoder, RolloutConfig
from pspo.model import default_max_rows, pad_token_id, stop_token_ids, takes_visible_columns
from pspo.model.find import token_ids
from pspo.model.shared_prompts import has_plain_cache
from pspo.rollout.types import Sampling


def make_sampling(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    algorithm: AlgorithmConfig | None = None,
    logprobs: bool = False,
) -> Sampling:
    """Sampling as --rollout says, with the model's own padding, and its stop tokens unless they are named.

    Log-probs are recorded on request or where ``algorithm`` corrects by them, nuclei where it replays them. Raises
    ValueError if the decoder does not support the model.
    """
    algorithm = algorithm or AlgorithmConfig()
    nucleus = algorithm.nucleus == "replay"
    logprobs = logprobs or algorithm.effective_correction != "none"
    records_logprobs = logprobs and config.engine is None  # an engine brings its own
    decoder = find_decoder(model, config.decoder, records_logprobs, nucleus)
    if config.stop_tokens is None:
        stop_ids = stop_token_ids(model, tokenizer)
    else:
        stop_ids = token_ids(tokenizer, config.stop_tokens)
    return Sampling(
        stop_ids=stop_ids,
        pad_id=pad_token_id(model, tokenizer),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_completion_tokens=config.max_completion_tokens,
        stop_strings=config.stop_strings,
        max_rows=config.max_rows or default_max_rows(model.device),
        decoder=decoder,
        logprobs=logprobs,
        nucleus=nucleus,
    )


def find_decoder(model: PreTrainedModel, decoder: Decoder, logprobs: bool, nucleus: bool) -> Decoder:
    """The decoder that --rollout.decoder asks for; "auto": the first of graphs (on a GPU), pspo and hf that can draw.

    Says in one line why auto takes a slower one. Raises ValueError if the decoder cannot draw from the model.
    """
    no_plain_cache = None if has_plain_cache(model) else f"it does not support {type(model).__name__}'s cache"
    faults = {
        "graphs": no_plain_cache or fault_for_graphs(model, nucleus),
        "pspo": no_plain_cache,
        "hf": "it records no log-probs (--algorithm.correction) and no nucleus" if logprobs or nucleus else None,
    }
    wanted = [decoder]
    if decoder == "auto":
        wanted = ["graphs", "pspo", "hf"] if model.device.type == "cuda" else ["pspo", "hf"]
    fault = faults[wanted[0]]
    for name in wanted:
        if faults[name] is None:
            if fault:
                print(f"decoder  {name}: {fault}")
            return name
    fix = "choose auto" if decoder != "auto" else f"nor does hf do: {faults['hf']}"
    raise ValueError(f"--rollout.decoder {decoder}: {fault}; {fix}")


def fault_for_graphs(model: PreTrainedModel, nucleus: bool) -> str | None:
    """The reason why CUDA graphs cannot draw from the model; None if they can."""
    if not takes_visible_columns(model):
        return "graphs need sdpa attention, and full attention in every layer"
    if dist.is_sharded(model):
        return "graphs need weights that stay where they are, not fsdp2's"
    return "graphs record no nucleus (--algorithm.nucleus replay)" if nucleus else None
