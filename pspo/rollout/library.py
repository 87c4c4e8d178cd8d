"""Decoder "hf": transformers' own `generate`, the reference."""

from __future__ import annotations

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from pspo.rollout.types import Completions, Sampling


def generate_by_library(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    stop_strings: StopStringCriteria | None,
    group_size: int,
) -> Completions:
    """Complete each of the left-padded prompts (N, P) ``group_size`` times.

    The model is in evaluation mode meanwhile, as a KV cache needs it, and its generation config is hidden: unset
    fields would be filled from it.
    """
    prompt_ids = prompt_ids.to(model.device).repeat_interleave(group_size, dim=0)
    prompt_mask = prompt_mask.long().to(model.device).repeat_interleave(group_size, dim=0)
    width = prompt_ids.shape[1]
    criteria = StoppingCriteriaList()
    if stop_strings is not None:
        criteria.append(lambda ids, scores: stop_strings(ids[:, width:], scores))
    hidden_config = model.generation_config
    training = model.training
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        rows = model.generate(
            prompt_ids,
            attention_mask=prompt_mask,
            generation_config=generation_config(sampling),
            stopping_criteria=criteria,
        )
    finally:
        model.train(training)
        model.generation_config = hidden_config
    return Completions(rows[:, width:])


def generation_config(sampling: Sampling) -> GenerationConfig:
    """`Sampling` in transformers' terms."""
    greedy = sampling.temperature == 0
    return GenerationConfig(
        do_sample=not greedy,
        temperature=1.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=50 if greedy else sampling.top_k,  # 50 is the library's default: any other draws a warning when greedy
        repetition_penalty=1.0,
        num_beams=1,
        max_new_tokens=sampling.max_completion_tokens,
        min_new_tokens=0,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=sampling.pad_id,
        use_cache=True,
    )
