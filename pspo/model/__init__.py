"""Load the model, and compute its log-probs, by fast ways to the same numbers."""

from pspo.model.adapters import StartingAdapters, fill_adapters, has_adapters
from pspo.model.device import autocast, default_max_rows, default_microbatch_tokens, is_out_of_memory, to_device
from pspo.model.find import ASSETS, load_model_config, load_tokenizer, locate, stop_token_ids
from pspo.model.load import load_policy
from pspo.model.logprobs import (
    Targets,
    head_logprobs,
    hidden_states,
    row_chunks,
    token_index,
    token_logprobs,
    unflatten,
)
from pspo.model.shared_prompts import CACHE_ARGUMENT, share_prefix, shares_prompts, takes_visible_columns, to_model
