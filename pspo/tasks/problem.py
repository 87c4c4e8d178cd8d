"""Problem: the record that every data source is converted to."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

Messages = list[dict[str, str]]  # a chat: [{"role": "user", "content": "..."}, ...]
AnswerKind = Literal["number", "text", "none"]
SYSTEM_PROMPT = (  # the paper's
    "You are a careful math solver. Think through the solution and show the steps. Use English only. "
    "End the response with the final answer only in the format: '#### <final numeric answer only>'"
)


@dataclass(frozen=True)
class Problem:
    """A task for the model, and what its completions are scored against.

    Attributes:
        prompt: text, the user turn of the chat; or a whole chat up to where the assistant begins.
        answer: the gold answer, as --data.answer_kind says: an exact number, text, or None for a task without one.
        fields: the other columns of the data, by name; rewards may ask for them.
        source: data set: gsm8k, math, ...
        category, level, solution: kind of problem, difficulty and worked solution in the source's own form, or "".
    """

    prompt: str | Messages
    answer: Fraction | str | None = None
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    source: str = ""
    category: str = ""
    level: str = ""
    solution: str = ""

    def record(self) -> dict[str, Any]:
        """Return prompt, gold answer and fields, if any, for the record of a completion."""
        gold = None if self.answer is None else str(self.answer)
        return {"prompt": self.prompt, "gold": gold} | ({"fields": self.fields} if self.fields else {})


def check_chat(chat: Messages) -> None:
    """Raise ValueError unless the chat is a list of turns, the last of which the assistant can answer."""
    if not isinstance(chat, list):
        raise ValueError(f"a prompt, also an environment's, must be a text or a list of turns, not {chat!r:.80}")
    for number, turn in enumerate(chat, 1):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise ValueError(f'turn {number} of the list must be {{"role": "...", "content": "..."}}, not {turn!r:.80}')
    if not chat or chat[-1]["role"] not in ("user", "tool"):
        raise ValueError("a chat must end with a turn of role user or tool, for the assistant to answer")
