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
    """Complete each of the left-padded prompts (N, P) ``group_size`` times, without the model's generation config."""
    prompt_ids = prompt_ids.to(model.device).repeat_interleave(group_size, dim=0)
    prompt_mask = prompt_mask.long().to(model.device).repeat_interleave(group_size, dim=0)
    width = prompt_ids.shape[1]
    criteria = StoppingCriteriaList()
    if stop_strings is not None:
        criteria.append(lambda ids, scores: stop_strings(ids[:, width:], scores))
    greedy = sampling.temperature == 0
    config = GenerationConfig(
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
    hidden_config = model.generation_config
    training = model.training
    model.generation_config = GenerationConfig()  # unset fields would be filled from its own
    model.eval()  # as a KV cache needs it
    try:
        rows = model.generate(
            prompt_ids, attention_mask=prompt_mask, generation_config=config, stopping_criteria=criteria
        )
    finally:
        model.train(training)
        model.generation_config = hidden_config
    return Completions(rows[:, width:])
