"""Episodes of several turns in a text environment: a loop around another sampler.

    prompt, turn of the model, observation, turn of the model, observation, ..., turn of the model

An episode is one row of a rollout. Everything after the prompt is its completion, and `Rollout.loss_mask` leaves the
observations out of the loss. Token ids go in and out: what the model drew is never encoded again.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from pspo.environments.tools import Call, parse_calls
from pspo.model.chat import completion_texts, encode, render_prompts
from pspo.rollout import Prompts, Rollout, RolloutSampler, Sampling
from pspo.tasks.environment import Environment, MakeEnvironment


@dataclass
class Episode:
    """One row: its environment, and what came after the prompt so far."""

    environment: Environment
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # by token: drawn by the model, not observed
    text: str = ""  # the model's last turn
    reward: float = 0.0
    terminated: bool = False  # by the environment, within the limits

    def extend(self, ids: list[int], sampled: bool) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)

    def take_turn(self, ids: list[int], text: str, ended: bool, *calls: list[Call]) -> str | None:
        """Append the model's turn; returns the observation, None if the episode is over."""
        self.extend(ids, sampled=True)
        observation, reward, done = self.environment.step(text, *calls)
        if not math.isfinite(reward):
            raise ValueError(f"{type(self.environment).__name__}.step returned {reward!r} as reward; it must be finite")
        self.text, self.reward, self.terminated = text, self.reward + float(reward), ended and done
        return observation if ended and not done else None


@dataclass(frozen=True)
class EnvironmentSampler:
    """Plays episodes of several turns in a text environment; another sampler draws the turns.

    ``sampling.max_completion_tokens`` limits an episode, observations included. One that reaches it, or
    ``sampling.max_turns``, before the environment ends it is truncated.
    """

    sampler: RolloutSampler
    make_environment: MakeEnvironment

    @property
    def sampling(self) -> Sampling:
        return self.sampler.sampling

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        """Play ``group_size`` episodes of each problem, turn by turn; `Environment.reset` gave the encoded prompts."""
        with self.sampler.holding_weights() as sampler:  # ranks play different numbers of turns
            return self._play(sampler, prompts, group_size)

    def _play(self, sampler: RolloutSampler, prompts: Prompts, group_size: int) -> Rollout:
        sampling, tokenizer = sampler.sampling, sampler.tokenizer
        limit = sampling.max_completion_tokens
        problems = [problem for problem in prompts.problems for _ in range(group_size)]
        episodes = [Episode(self.make_environment()) for _ in problems]
        for episode, problem in zip(episodes, problems, strict=True):
            episode.environment.reset(problem)
        live, first = list(range(len(episodes))), None
        for turns_left in reversed(range(sampling.max_turns)):
            room = max(limit - len(episodes[row].ids) for row in live)
            bounds = {"max_completion_tokens": room, "min_completion_tokens": min(sampling.min_completion_tokens, room)}
            turn_sampler = replace(sampler, sampling=replace(sampling, **bounds))
            if first is None:
                drawn = first = turn_sampler.draw(prompts, group_size)
            else:
                so_far = [[*prompts.ids[row // group_size], *episodes[row].ids] for row in live]
                drawn = turn_sampler.draw(Prompts([problems[row] for row in live], so_far), 1)
            ids, lengths = drawn.completion_ids.tolist(), drawn.completion_mask.sum(dim=1).tolist()
            turns = list(zip(live, ids, lengths, drawn.texts, drawn.terminated.tolist(), strict=True))
            live = []
            for row, ids, length, text, ended in turns:
                episode = episodes[row]
                room = limit - len(episode.ids)
                if length > room:  # another row had more
                    context = [*prompts.ids[row // group_size], *episode.ids]
                    length, ended, [text] = room, False, completion_texts(tokenizer, [context], [ids[:room]])
                calls = [parse_calls(tokenizer, text)] if hasattr(episode.environment, "tools") else []
                observation = episode.take_turn(ids[:length], text, ended, *calls)
                if observation is not None and turns_left:
                    role = getattr(episode.environment, "role", "user")
                    ids = observation_ids(tokenizer, observation, episode.ids[-1], role)
                    if len(episode.ids) + len(ids) < limit:
                        episode.extend(ids, sampled=False)
                        live.append(row)
            if not live:
                break
        return episodes_as_rollout(first, episodes, sampling.pad_id)


def observation_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    after: int,
    role: str = "user",
) -> list[int]:
    """Encode the text as the role's turn between two of the model; the stop token it follows is not repeated."""
    turns = (("user", "-"), ("assistant", "\0"), (role, text))
    chat = [{"role": role, "content": content} for role, content in turns]
    (rendered,) = render_prompts(tokenizer, [chat], system_prompt="")
    (ids,) = encode(tokenizer, [rendered.partition("\0")[2]])
    return ids[1:] if ids[:1] == [after] else ids


def episodes_as_rollout(first: Rollout, episodes: list[Episode], pad_id: int) -> Rollout:
    """A row for each episode; ``first``, the first turns, holds their prompts."""
    device = first.prompt_ids.device

    def padded(rows: list[list[int]], value: int) -> Tensor:
        rows = [torch.tensor(row, dtype=torch.int64) for row in rows]
        return pad_sequence(rows, batch_first=True, padding_value=value).to(device)

    sampled = padded([episode.sampled for episode in episodes], -1)  # (B, T), -1 after the end
    return replace(
        first,
        completion_ids=padded([episode.ids for episode in episodes], pad_id),
        completion_mask=sampled >= 0,
        terminated=torch.tensor([episode.terminated for episode in episodes], device=device),
        texts=[episode.text for episode in episodes],
        sampled_mask=sampled == 1,
        environment_rewards=[episode.reward for episode in episodes],
    )


def transcripts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """The completions as texts; episodes whole, with the tokens between the turns."""
    if rollout.sampled_mask is None:
        return rollout.texts
    pairs = zip(rollout.completion_ids, rollout.completion_mask, strict=True)
    return tokenizer.batch_decode([ids[mask] for ids, mask in pairs])
