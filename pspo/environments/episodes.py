"""Play episodes of several turns in a text environment; another sampler draws the model's turns.

    prompt, turn of the model, observation, turn of the model, observation, ..., turn of the model

An episode is one row of a rollout. Everything after the prompt is its completion, and `Rollout.loss_mask` leaves the
observations out of the loss. Token ids go in and out: what the model drew is never encoded again.
"""

from __future__ import annotations

import contextlib
import reprlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from pspo.environments.tools import CALL_ID, parse_calls, tool_call
from pspo.errors import RewardError
from pspo.model.chat import encode, render_prompts, special_pattern
from pspo.model.find import check_token_ids
from pspo.rollout import How, Prompts, Rollout, Sampler, Sampling
from pspo.rollout.sampler import completion_texts
from pspo.tasks import Problem
from pspo.tasks.environment import Environment, MakeEnvironment, open_environment, reset_environment
from pspo.tasks.rewards import finite_number

MAX_TURNS = 4  # of the model, unless the environment has an attribute max_turns


@dataclass
class Episode:
    """One row: its environment, its prompt, and what came after the prompt so far."""

    environment: Environment
    problem: Problem
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # by token: drawn by the model, not observed
    text: str = ""  # the model's last turn
    reward: float = 0.0
    terminated: bool = False  # by the environment, within the limits

    def extend(self, ids: list[int], sampled: bool) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)


@dataclass(frozen=True)
class EnvironmentSampler:
    """Plays episodes, truncated at ``max_completion_tokens``, observations included, or at ``max_turns``."""

    turns: Sampler
    make_environment: MakeEnvironment
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig

    def draw(self, prompts: Prompts, group_size: int, how: How) -> Rollout:
        """Play ``group_size`` episodes of each problem, turn by turn; `Environment.reset` gave the encoded prompts."""
        with contextlib.ExitStack() as stack:
            episodes = []
            for i, problem in enumerate(prompts.problems):
                for _ in range(group_size):
                    environment = open_environment(self.make_environment, stack)
                    reset_environment(environment, problem, prompts.texts[i] if prompts.texts else None)
                    episodes.append(Episode(environment, problem, prompts.ids[i]))
            max_turns = getattr(episodes[0].environment, "max_turns", MAX_TURNS)
            first_turns = self.turns.draw(prompts, group_size, how)
            live = self.play(episodes, first_turns, how.sampling, is_last=max_turns == 1)
            for turn in range(2, max_turns + 1):
                if not live:
                    break
                room = how.sampling.max_completion_tokens - min(len(episode.ids) for episode in live)
                shorter = replace(how, sampling=replace(how.sampling, max_completion_tokens=room))
                contexts = [episode.prompt_ids + episode.ids for episode in live]
                check_token_ids(self.model_config, self.tokenizer, contexts)  # an observation may hold any token
                turns = self.turns.draw(Prompts([episode.problem for episode in live], contexts), 1, shorter)
                live = self.play(live, turns, how.sampling, is_last=turn == max_turns)
        return episodes_to_rollout(first_turns, episodes, how.sampling.pad_id)

    def play(self, episodes: list[Episode], rollout: Rollout, sampling: Sampling, is_last: bool) -> list[Episode]:
        """Append the turns drawn, and observations; returns the episodes with room for another turn."""
        limit = sampling.max_completion_tokens
        live = []
        for i, episode in enumerate(episodes):
            ids = rollout.completion_ids[i][rollout.completion_mask[i]].tolist()
            text = rollout.texts[i]
            is_ended = bool(rollout.terminated[i])
            room = limit - len(episode.ids)
            if len(ids) > room:  # another row had more
                ids = ids[:room]
                is_ended = False
                context = episode.prompt_ids + episode.ids
                (text,) = completion_texts(self.tokenizer, [context], [ids], sampling.stop_ids)
            episode.extend(ids, sampled=True)
            observation, is_done = self.step(episode, text)
            episode.terminated = is_ended and is_done
            if is_done or is_last or not is_ended:
                continue
            role = getattr(episode.environment, "role", "user")
            tools = getattr(episode.environment, "tools", None)
            observed = observation_ids(self.tokenizer, observation, ids[-1], role, tools)
            if len(episode.ids) + len(observed) < limit:
                episode.extend(observed, sampled=False)
                live.append(episode)
        return live

    def step(self, episode: Episode, text: str) -> tuple[str, bool]:
        """Give a turn of the model to the environment; returns the observation, and whether the episode is over."""
        environment = episode.environment
        calls = [parse_calls(self.tokenizer, text, environment.tools)] if hasattr(environment, "tools") else []
        observation, reward, is_done = environment.step(text, *calls)
        number = finite_number(reward)
        if number is None:
            what = f"{type(environment).__name__}.step returned {reprlib.repr(reward)} as reward"
            raise RewardError(f"{what}; it must be a finite number")
        episode.text = text
        episode.reward += number
        return observation, bool(is_done)


def observation_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, after: int, role: str = "user", tools: list[Any] | None = None
) -> list[int]:
    """Encode the text as the role's turn between two of the model.

    If the model's last token, ``after``, is the end token of its turn, the template's copy of it is dropped.
    """
    words = "\ufdd2"  # of the model; also itself in JSON
    call = tool_call("a_tool", {"an_argument": words})
    tails = []  # behind the model's words
    for content in ("@@", text):  # which also stands for itself in JSON
        chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": words}]
        turn = {"role": role, "content": content}
        try:
            (rendered,) = render_prompts(tokenizer, [[*chat, turn]], "", tools)
            tails.append(rendered.partition(words)[2])
        except ValueError:
            if role != "tool":
                raise
            chat[1] = {"role": "assistant", "content": "", "tool_calls": [call]}  # as some templates demand
            turn |= {"name": "a_tool", "tool_call_id": CALL_ID}
            (rendered,) = render_prompts(tokenizer, [[*chat, turn]], "", tools)
            end = special_pattern(tokenizer).search(rendered, rendered.index(words))
            tails.append(rendered[end.start() :])
    before, ids = encode(tokenizer, [tails[0].partition("@@")[0], tails[1]])
    is_end_token = after in before and after in tokenizer.added_tokens_decoder
    return ids[ids.index(after) + 1 :] if is_end_token else ids


def episodes_to_rollout(first_turns: Rollout, episodes: list[Episode], pad_id: int) -> Rollout:
    """A row for each episode; the rollout of the first turns has their prompts."""
    ids = [torch.tensor(episode.ids) for episode in episodes]
    sampled = [torch.tensor(episode.sampled, dtype=torch.int64) for episode in episodes]
    sampled = pad_sequence(sampled, batch_first=True, padding_value=-1)  # (B, T), -1 after the end
    return replace(
        first_turns,
        completion_ids=pad_sequence(ids, batch_first=True, padding_value=pad_id),
        completion_mask=sampled >= 0,
        terminated=torch.tensor([episode.terminated for episode in episodes]),
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
