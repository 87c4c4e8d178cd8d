"""Play episodes of several turns in a text environment; another sampler draws the model's turns.

    prompt, turn of the model, observation, turn of the model, observation, ..., turn of the model

An episode is one row of a rollout. Everything after the prompt is its completion, and `Rollout.loss_mask` leaves the
observations out of the loss. Turns are kept as token ids: what the model drew is never encoded again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from pspo.environments.tools import CALL_ID, WORDS, CallReader, tool_call
from pspo.model.chat import encode, render_prompts, special_pattern
from pspo.model.find import check_token_ids
from pspo.rollout import How, Prompts, Rollout, Sampler, left_pad
from pspo.rollout.sampler import completion_texts
from pspo.tasks import Problem
from pspo.tasks.problem import Environment, MakeEnvironment, open_environment, reset_environment
from pspo.tasks.scoring import finite_number

MAX_TURNS = 4  # turns of the model, unless the environment has an attribute max_turns


@dataclass
class Episode:
    """One row: its environment, its prompt, and what came after the prompt so far."""

    environment: Environment
    problem: Problem
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # by token: True if the model drew it, False in observations
    n_turns: int = 0  # turns of the model
    text: str = ""  # the model's last turn
    reward: float = 0.0
    terminated: bool = False  # True if the environment ended it within the limits

    def extend(self, ids: list[int], sampled: bool) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)


@dataclass(frozen=True)
class EnvironmentSampler:
    """Plays episodes, cut at ``max_completion_tokens`` (observations count) or at the environment's ``max_turns``."""

    turns: Sampler
    make_environment: MakeEnvironment
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    calls: CallReader | None = None  # reads calls of the environment's tools, if it has any

    def draw(self, prompts: Prompts, group_size: int, how: How) -> Rollout:
        """Play ``group_size`` episodes of each problem, turn by turn; ``prompts`` come from `Environment.reset`."""
        limit = how.sampling.max_completion_tokens
        with contextlib.ExitStack() as stack:
            episodes = []
            for i, problem in enumerate(prompts.problems):
                for _ in range(group_size):
                    environment = open_environment(self.make_environment, stack)
                    reset_environment(environment, problem, prompts.texts[i] if prompts.texts else None)
                    episodes.append(Episode(environment, problem, prompts.ids[i]))
            live = episodes
            turns = self.turns.draw(prompts, group_size, how)
            while live := [each for row, each in enumerate(live) if self.play_turn(each, turns, row, limit)]:
                contexts = [episode.prompt_ids + episode.ids for episode in live]
                check_token_ids(self.model_config, self.tokenizer, contexts)  # an observation may hold any token
                room = limit - min(len(episode.ids) for episode in live)
                shorter = replace(how, sampling=replace(how.sampling, max_completion_tokens=room))
                turns = self.turns.draw(Prompts([episode.problem for episode in live], contexts), 1, shorter)
        return episodes_to_rollout(episodes, how.sampling.pad_id)

    def play_turn(self, episode: Episode, turns: Rollout, row: int, limit: int) -> bool:
        """Append a row of the turns drawn, step, append the observation; True if the model has another turn."""
        environment = episode.environment
        after = self.append_turn(episode, turns, row, limit)
        calls = [] if self.calls is None else [self.calls.read(episode.text)]
        observation, reward, is_done = environment.step(episode.text, *calls)
        episode.reward += finite_number(reward, f"{type(environment).__name__}.step, as its reward,")
        episode.terminated = bool(is_done) and after is not None
        if is_done or after is None or episode.n_turns >= getattr(environment, "max_turns", MAX_TURNS):
            return False
        role = getattr(environment, "role", "user")
        ids = observation_ids(self.tokenizer, observation, after, role, getattr(environment, "tools", None))
        if len(episode.ids) + len(ids) >= limit:
            return False
        episode.extend(ids, sampled=False)
        return True

    def append_turn(self, episode: Episode, turns: Rollout, row: int, limit: int) -> int | None:
        """Append a row of the turns, cut at the limit; returns the token that ended the turn, None if none did."""
        ids = turns.completion_ids[row][turns.completion_mask[row]].tolist()
        room = limit - len(episode.ids)
        episode.text = turns.texts[row]
        if len(ids) > room:  # the turns were drawn with another row's larger room
            context = [episode.prompt_ids + episode.ids]
            (episode.text,) = completion_texts(self.tokenizer, context, [ids[:room]], stop_ids=())
        episode.extend(ids[:room], sampled=True)
        episode.n_turns += 1
        return ids[-1] if turns.terminated[row] and len(ids) <= room else None


def text_after_turn(tokenizer: PreTrainedTokenizerBase, text: str, role: str, tools: list[Any] | None) -> str:
    """What the template writes behind a model's turn if ``role`` says ``text``, where half a surrogate pair is "?"."""
    asked = {"role": "user", "content": "-"}
    turn = {"role": role, "content": text.encode(errors="replace").decode() if isinstance(text, str) else text}
    try:
        (rendered,) = render_prompts(tokenizer, [[asked, {"role": "assistant", "content": WORDS}, turn]], "", tools)
        return rendered.partition(WORDS)[2]
    except ValueError:
        if role != "tool":
            raise
    call = tool_call("a_tool", {"an_argument": WORDS})  # some templates demand a call before a tool's turn
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    turn |= {"name": "a_tool", "tool_call_id": CALL_ID}
    (rendered,) = render_prompts(tokenizer, [[asked, calling, turn]], "", tools)
    return rendered[special_pattern(tokenizer).search(rendered, rendered.index(WORDS)).start() :]


def observation_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, after: int, role: str = "user", tools: list[Any] | None = None
) -> list[int]:
    """Encode the text as a turn of ``role`` between two turns of the model.

    If ``after``, the model's last token, is its turn's end token, the template's copy of that token is dropped.
    """
    start = text_after_turn(tokenizer, "@@", role, tools).partition("@@")[0]  # JSON leaves @@ as it is
    before, ids = encode(tokenizer, [start, text_after_turn(tokenizer, text, role, tools)])
    is_end_token = after in before and after in tokenizer.added_tokens_decoder
    return ids[ids.index(after) + 1 :] if is_end_token else ids


def episodes_to_rollout(episodes: list[Episode], pad_id: int) -> Rollout:
    """A rollout with a row for each episode."""
    prompt_ids, prompt_mask = left_pad([episode.prompt_ids for episode in episodes], pad_id)
    ids = [torch.tensor(episode.ids) for episode in episodes]
    sampled = [torch.tensor(episode.sampled, dtype=torch.int64) for episode in episodes]
    sampled = pad_sequence(sampled, batch_first=True, padding_value=-1)  # (B, T), -1 after the end
    return Rollout(
        prompt_ids,
        prompt_mask,
        completion_ids=pad_sequence(ids, batch_first=True, padding_value=pad_id),
        completion_mask=sampled >= 0,
        terminated=torch.tensor([episode.terminated for episode in episodes]),
        texts=[episode.text for episode in episodes],
        sampled_mask=sampled == 1,
        environment_rewards=[episode.reward for episode in episodes],
    )


def transcripts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """The completions as texts; those of episodes hold all turns and the tokens between them."""
    if rollout.sampled_mask is None:
        return rollout.texts
    pairs = zip(rollout.completion_ids, rollout.completion_mask, strict=True)
    return tokenizer.batch_decode([ids[mask] for ids, mask in pairs])
