"""Chats: rendered with the model's template, and encoded so that special tokens in what users bring are text.

`render_prompts` puts `TEXT` into each special token of a user's text; the template writes its own, which have none,
around it. `encode` puts `TOKEN` before those, takes `TEXT` out again, and encodes with a tokenizer whose special tokens
are the ones that begin with `TOKEN`.
"""

import copy
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from pspo.tasks.problem import SYSTEM_PROMPT, Messages, check_chat, check_unicode, content_text

TEXT = "\ufdd0"  # two of Unicode's noncharacters
TOKEN = "\ufdd1"
PARTS = re.compile(r"""\.text\b|\[['"]text['"]\]""")  # in templates that write the parts of a content
DATE = datetime(2024, 7, 26)  # Llama's templates print it if there is no clock


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    system_prompt: str = SYSTEM_PROMPT,
    tools: list[Any] | None = None,
) -> list[str]:
    """Render prompts, and tools, with the tokenizer's chat template, up to where the assistant begins.

    A text is the user turn after the system prompt, if that is not ""; a chat that has a system turn keeps it, and one
    that ends in the assistant's turn stays open. Raises ValueError for a chat that `check_chat` refuses, or if the
    template fails, as some do on a system turn.
    """
    check_unicode(system_prompt, "--data.system_prompt")
    special = special_pattern(tokenizer)
    chats = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        check_chat(turns)
        if system_prompt and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system_prompt}, *turns]
        chats.append(mark_special_tokens(special, turns))
    try:
        template = tokenizer.get_chat_template(tools=tools)
        if "strftime_now" in template:
            template = f"{clock_macro()}\n{template}"
        takes_parts = PARTS.search(template) is not None
        texts = []
        for chat in chats:
            chat = [join_parts(turn, takes_parts) for turn in chat]
            is_begun = chat[-1]["role"] == "assistant"
            text = tokenizer.apply_chat_template(
                chat,
                chat_template=template,
                tools=tools,
                tokenize=False,
                add_generation_prompt=not is_begun,
                continue_final_message=is_begun,
            )
            texts.append(text)
        return texts
    except Exception as error:  # a template is a program that comes with the model
        fix = "if it knows no system turn, set --data.system_prompt ''; --data.chat_template brings another template"
        raise ValueError(f"the chat template of {tokenizer.name_or_path} failed ({error}); {fix}") from error


def join_parts(turn: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    """A turn whose content is one text, or one part: some templates write the first part alone."""
    if not isinstance(turn.get("content"), list):
        return turn
    text = content_text(turn)
    return turn | {"content": [{"type": "text", "text": text}] if takes_parts else text}


@lru_cache
def clock_macro() -> str:
    """A template's `strftime_now` that stands at `DATE`: a resumed run has the same prompts, whatever the date is."""
    written = [f"%{flag}{directive}" for directive in "aAbBcCdDeFfGhHIjmMpRSTuUVwWxXyYzZ" for flag in ("", "-")]
    replacements = "".join(f".replace({form!r}, {DATE.strftime(form)!r})" for form in written)
    part = "{{ '' if loop.first else '%' }}{{ part" + replacements + " }}"
    loop = "{% for part in format.split('%%') %}" + part + "{% endfor %}"
    return "{% macro strftime_now(format) %}" + loop + "{% endmacro %}"


def mark_special_tokens(special: re.Pattern, value: Any) -> Any:
    """Put `TEXT` after the first character of each special token, in a text or in all texts of a chat."""
    if isinstance(value, str):
        plain = value.replace(TEXT, "").replace(TOKEN, "")
        return special.sub(lambda match: match[0][0] + TEXT + match[0][1:], plain)
    if isinstance(value, list):
        return [mark_special_tokens(special, part) for part in value]
    if isinstance(value, dict):
        return {mark_special_tokens(special, key): mark_special_tokens(special, part) for key, part in value.items()}
    return value


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern:
    """Pattern of the special tokens' texts, of several at one place the longest, where they are not marked as text.

    A token that is `single_word` is one between words alone.
    """
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    tokens.sort(key=lambda token: len(str(token)), reverse=True)
    words = (rf"(?<!\w){re.escape(str(t))}(?!\w)" if t.single_word else re.escape(str(t)) for t in tokens)
    return re.compile(f"(?:{'|'.join(words)})(?!{TEXT})" if tokens else r"(?!)")


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered prompts. Raises ValueError for special tokens that the tokenizer cannot encode as text."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [encode_marked(tokenizer, text) if TEXT in text else encoded[i] for i, text in enumerate(texts)]


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered prompt in which special tokens of a user's text are marked.

    The text is encoded whole, because some tokenizers put a space before the first word of each piece.
    """
    twin, special_ids = marked_twin(tokenizer)
    text = special_pattern(tokenizer).sub(lambda match: TOKEN + match[0], text).replace(TEXT, "")
    ids = twin(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    still_special = {*ids}.intersection(special_ids.values()) - {tokenizer.unk_token_id}
    if still_special or not tokenizer.is_fast:
        name = tokenizer.name_or_path
        raise ValueError(f"the tokenizer of {name} cannot encode special tokens as text: remove them from the problems")
    return [special_ids.get(i, i) for i in ids]


@lru_cache(maxsize=1)
def marked_twin(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, dict[int, int]]:
    """A copy of the tokenizer with tokens TOKEN + special token; and the special tokens' ids by those of the copies."""
    twin = copy.deepcopy(tokenizer)
    special_ids = {}
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            marked = copy.copy(token)
            marked.content = TOKEN + token.content
            marked.special = False
            twin.add_tokens(marked)
            special_ids[twin.convert_tokens_to_ids(marked.content)] = i
    return twin, special_ids


def completion_texts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    completions: list[list[int]],
    stop_ids: Collection[int] = (),
) -> list[str]:
    """Completions as text, with the `<think>` that ends a template's prompt.

    Of special tokens only those that stop, pad and begin are left out: rewards see tags, special or not.
    """
    ends = tokenizer.batch_decode([ids[-10:] for ids in prompts])  # ten tokens hold it in any vocabulary
    added = tokenizer.added_tokens_decoder
    dropped = {i for i in stop_ids if i in added and added[i].special}
    dropped |= {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
    texts = tokenizer.batch_decode([[i for i in ids if i not in dropped] for ids in completions])
    opened = ["<think>" if end.rstrip().endswith("<think>") else "" for end in ends]
    return [start + text for start, text in zip(opened, texts, strict=True)]
