"""What a run or an evaluation loads before the weights: tokenizer, environment, prompts."""

from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo.config import EvalConfig, EvaluateConfig, RolloutConfig, TrainConfig
from pspo.environments import CallReader, EnvironmentSampler, check_calls
from pspo.model import load_tokenizer
from pspo.model.find import check_token_ids, load_model_config, room_for_prompts, token_ids
from pspo.rollout import Prompts, Sampler, load_prompts
from pspo.rollout.prompts import completion_columns
from pspo.tasks import check_rewards
from pspo.tasks.problem import MakeEnvironment, load_class


class Inputs(NamedTuple):
    tokenizer: PreTrainedTokenizerBase
    make_environment: MakeEnvironment | None
    prompts: dict[str, Prompts]  # by split
    calls: CallReader | None

    def in_episodes(self, sampler: Sampler, policy: PreTrainedModel) -> Sampler:
        """The sampler, or with an environment a sampler that plays its episodes by the given one."""
        if self.make_environment is None:
            return sampler
        return EnvironmentSampler(sampler, self.make_environment, self.tokenizer, policy.config, self.calls)


def load_inputs(
    config: TrainConfig | EvaluateConfig, section: RolloutConfig | EvalConfig, limits: dict[str, int | None]
) -> Inputs:
    """Load tokenizer, environment and the prompts of splits, ``limits`` of each; ValueError for unfit inputs."""
    tokenizer = load_tokenizer(config.model, config.data)
    token_ids(tokenizer, section.stop_tokens or (), f"{section.section}stop_tokens")
    make_environment = load_class(section.environment, f"{section.section}environment")
    most = completion_columns(section.max_completion_tokens, make_environment is not None)
    room = room_for_prompts(config.model, most, f"{section.section}max_completion_tokens")
    model_config = load_model_config(config.model)
    prompts = {}
    for split, limit in limits.items():
        prompts[split] = load_prompts(config.data, tokenizer, split, limit, room, make_environment)
        check_token_ids(model_config, tokenizer, prompts[split].ids)
        check_rewards(config.reward, prompts[split].problems)
    calls = None if make_environment is None else check_calls(tokenizer, make_environment)
    return Inputs(tokenizer, make_environment, prompts, calls)
