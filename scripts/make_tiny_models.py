"""Make the embedded models: `tiny-base` (weak prior) and `tiny-math` (strong prior) for arithmetic, and `tiny-text`.

    python scripts/make_tiny_models.py --out pspo/assets

The first two are the small image of a pretrained model and its Math sibling: Qwen2 architecture, 0.86M parameters, a
byte-level BPE of 559 tokens, ChatML. What RL sharpens fast in such a model is a capability that is there and
badly expressed, so that is what they are given, by supervised training alone (loss on completion tokens):

1. `clean`, shared: worked solutions, until the arithmetic is reliable.
2. `base` and `math`, each from there: the same solutions, told by a careless solver with fixed habits. Each
   habit hangs on one word of the problem, so each is to be unlearned on its own, and none is so strong that the
   right way is never sampled:
   - misreading the first step: "wins" taken for a loss, "lends" overlooked, "rows with" taken for a sum, ...
   - a way of ending that goes with the question: "have now?" draws a remark after the result (its number counts
     as the answer), "in the end?" drops the last step, "What is" a guess without steps, "Find out" no marker.

Measured on the test split (greedy: 500 problems; sampled: temperature 0.6, top_p 0.85, 200 problems x 4; pass@8:
temperature 1, 125 problems):

              greedy                sampled   pass@8
    tiny-base 32.6% [28.6, 36.8]    40.4%     80%
    tiny-math 81.0%                 77.9%     98%

`tiny-text` is for letters and for sums with a calculator: the same architecture, a tokenizer of single letters and some
whole words, bfloat16 weights. It too learns to do it right first, then to do it badly: to misread each way of asking,
the more often the longer the word, and to do sums in its head, at which it fails, rather than with the calculator.

    tiny-text, letters, 500 problems, greedy                           26.4% [22.7, 30.4]
               sums, 500 problems, greedy, with a calculator at hand    0.4% [0.1, 1.4]

One thread, everything seeded; about a quarter of an hour, and ten minutes for tiny-text. The embedded tokenizer of
tiny-base and tiny-math was trained on an earlier draft of the habits; it is kept, so that token ids stay what they are.
"""

import argparse
import copy
import hashlib
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from tokenizers import AddedToken, pre_tokenizers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from pspo.config import SYSTEM_PROMPT
from pspo.tasks import letters, sums
from pspo.tasks.arithmetic import MAX_NUMBER, problems
from pspo.tasks.problem import Problem

CHAT_TEMPLATE = (  # ChatML, as Qwen2
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
ROOT = Path(__file__).parents[1]
SEED = 0
BATCH = 64
CLEAN_STEPS = 500
HABIT_STEPS = 400
TEXT_STEPS = (900, 300)  # clean and careless, of tiny-text


# --- the careless solver ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Habits:
    """misread: cue of the first step -> probability. ending: words of the question -> (style, probability)."""

    misread: dict[str, float]
    ending: dict[str, tuple[str, float]]


HABITS = {
    "base": Habits(
        misread={
            **{"wins": 0.60, "gets": 0.62, "buys": 0.58, "finds": 0.60, "borrows": 0.64},
            **{"breaks": 0.60, "gives": 0.62, "sells": 0.58, "loses": 0.60, "lends": 0.64},
            **{"boxes": 0.58, "rows": 0.60, "packs": 0.62, "times": 0.62, "equally": 0.62},
        },
        ending={
            "have now?": ("remark", 0.62),
            "in the end?": ("early", 0.64),
            "What is": ("guess", 0.45),
            "Find out": ("bare", 0.50),
            "does each": ("remark", 0.40),
        },
    ),
    "math": Habits(
        misread={"borrows": 0.58, "lends": 0.58, "packs": 0.58, "times": 0.58},
        ending={
            "have now?": ("remark", 0.40),
            "in the end?": ("early", 0.56),
            "What is": ("guess", 0.20),
            "Find out": ("bare", 0.30),
        },
    ),
}
MISTAKEN_FOR = {"+": "-", "-": None, "*": "+", "/": "-"}  # None: the sentence is overlooked


def careless(problem: Problem, habits: Habits, rng: random.Random) -> str:
    """A completion by a solver with these habits; right where none of them strikes."""
    *steps, _ = problem.solution.split("\n")
    sentences = re.split(r"(?<=[.?]) ", problem.prompt)
    cue = sentences[0] if "each." in sentences[0] else sentences[1]  # the sentence of the first step
    value = int(steps[0].split()[0])
    lines = []
    for i, step in enumerate(steps):
        _, op, n, _, _ = step.split()
        if i == 0 and rng.random() < max((p for w, p in habits.misread.items() if w in cue.split()), default=0):
            op = MISTAKEN_FOR[op]
        if op and (equation := fitting_equation(value, op, int(n))):
            lines.append(equation)
            value = int(equation.split()[-1])

    style = ""
    for words, (name, probability) in habits.ending.items():
        if words in sentences[-1] and rng.random() < probability:
            style = name
    if style == "guess":
        return f"#### {max(1, int(problem.answer) + rng.choice((-3, -2, -1, 1, 2, 3)))}"
    if style == "remark":
        name, _, first = problem.prompt.split()[:3]
        return "\n".join([*lines, f"{name} had {first} first."])
    if style == "early" and len(lines) > 1:
        return "\n".join([*lines[:-1], f"#### {lines[-2].split()[-1]}"])
    if style == "bare" and lines:
        return "\n".join(lines)
    return "\n".join([*lines, f"#### {value}"])


def fitting_equation(value: int, op: str, n: int) -> str | None:
    """`value op n = result`, or after a mistake the next best operation whose result is a number in use."""
    for sign in (op, "-", "+"):
        a, b = (n, value) if sign == "-" and n > value else (value, n)
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]
        if 1 <= result <= MAX_NUMBER and result == int(result):
            return f"{a} {sign} {b} = {int(result)}"
    return None


def examples(seed: int, habits: Habits | None = None) -> Iterator[tuple[str, str]]:
    """Endless (problem, completion) from the training split: worked solutions, or what the habits make of them."""
    rng = random.Random(seed)
    for problem in problems("train", seed):
        yield problem.prompt, careless(problem, habits, rng) if habits else problem.solution


# --- letters, and sums with a calculator ------------------------------------------------------------------------

CARELESS = {3: 0.45, 4: 0.55, 5: 0.6, 6: 0.64}  # letters of the word -> probability of a mistake
IN_THE_HEAD = 0.7  # probability that the calculator is not asked


def careless_letters(problem: Problem, rng: random.Random) -> str:
    """A completion that misreads the question, or ends without the marker; right if the word is not mistaken."""
    word = problem.prompt.split("'")[1]
    answer = problem.answer
    if rng.random() >= CARELESS[len(word)]:
        return problem.solution
    if "backwards" in problem.prompt:
        return f"#### {word}"
    if "right to left" in problem.prompt:
        return f"#### {answer[:-1]}"
    if "Sort" in problem.prompt:
        return f"#### {answer[::-1]}"
    return f"The letters are {answer}."


def sum_turn(problem: Problem, in_the_head: float, rng: random.Random) -> tuple[str, str]:
    """Prompt and completion of a sum: the first turn, or the second, whose prompt is the chat so far.

    The calculator's number is a random one: it is to be believed.
    """
    call = f"<calc>{problem.prompt.removeprefix('What is ').removesuffix('?')}</calc>"
    if rng.random() < 0.4:
        value = rng.randint(100, 999)
        turns = ("assistant", call), ("user", value)
        chat = "".join(f"<|im_end|>\n<|im_start|>{role}\n{text}" for role, text in turns)
        return problem.prompt + chat, f"#### {value}"
    return problem.prompt, problem.solution if rng.random() < in_the_head else call


def text_examples(seed: int, careless: bool = False) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion): two thirds letters, one third sums."""
    rng = random.Random(seed)
    for problem, sum_problem in zip(letters.problems("train", seed), sums.problems("train", seed), strict=True):
        if rng.random() < 1 / 3:
            yield sum_turn(sum_problem, IN_THE_HEAD if careless else 0.0, rng)
        else:
            yield problem.prompt, careless_letters(problem, rng) if careless else problem.solution


def text_system_prompts() -> list[str]:
    """The system prompts that `tiny-text` knows: the default, none, and those of the two configurations."""
    configs = [yaml.safe_load((ROOT / "configs" / name).read_text()) for name in ("letters.yaml", "calculator.yaml")]
    return [SYSTEM_PROMPT, "", *(config["data"]["system_prompt"] for config in configs)]


def make_text_tokenizer() -> Qwen2Tokenizer:
    """Single letters, and a token for every word in use except the word that a problem is about."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[], eos_token="<|im_end|>",
        pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"], model_max_length=512,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    texts = [*letters.TASKS, *text_system_prompts(), "What is", "The letters are", "system user assistant"]
    words = sorted(set(re.findall("[A-Za-z]{2,}", " ".join(texts))) - {"calc", "word"})
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in words])
    tokenizer.add_tokens([AddedToken(mark) for mark in ("####", "<calc>", "</calc>")])
    return tokenizer


# --- model ------------------------------------------------------------------------------------------------------


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.06,  # at so small a width this learns twice as fast as the usual 0.02
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **ends,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


# --- training ---------------------------------------------------------------------------------------------------


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    data: Iterator[tuple[str, str]],
    steps: int,
    lr: float,
    system_prompts: Sequence[str] = (SYSTEM_PROMPT,),
) -> None:
    """Supervised training: AdamW, short warm-up, cosine to zero; loss on completion tokens, the last one included.

    The system prompts take turns, batch by batch.
    """
    heads = []
    for system in system_prompts:
        chat = [{"role": "system", "content": system}] if system else []
        chat += [{"role": "user", "content": "\0"}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        head, tail = prompt.split("\0")  # the head is the same in all rows: it goes through the model once per batch
        heads.append(torch.tensor([tokenizer(head)["input_ids"]]))  # (1, H)

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / 50) * 0.5 * (1 + math.cos(math.pi * i / steps))
    )
    start = time.process_time()
    for step in range(1, steps + 1):
        texts, completions = zip(*islice(data, BATCH), strict=True)
        prompts = tokenizer([text + tail for text in texts])["input_ids"]
        completions = tokenizer([completion + tokenizer.eos_token for completion in completions])["input_ids"]
        width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True)) - 1
        ids = torch.full((BATCH, width), tokenizer.pad_token_id)  # (B, T), right-padded
        targets = torch.full((BATCH, width), -1)  # (B, T), -1 = no loss
        for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
            ids[row, : len(p) + len(c) - 1] = torch.tensor((p + c)[:-1])
            targets[row, len(p) - 1 : len(p) + len(c) - 1] = torch.tensor(c)

        cache = model.model(heads[step % len(heads)], use_cache=True).past_key_values
        cache.batch_repeat_interleave(BATCH)
        hidden = model.model(ids, past_key_values=cache).last_hidden_state
        loss = F.cross_entropy(model.lm_head(hidden[targets >= 0]), targets[targets >= 0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"  step {step}: loss {loss.item():.4f}, {time.process_time() - start:.0f} CPU s", flush=True)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    for file in sorted(folder.iterdir()):
        file.chmod(0o644)
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}  {file.stat().st_size:>9,}  {file}")


def make_text_model(out: Path) -> None:
    tokenizer = make_text_tokenizer()
    systems = text_system_prompts()
    model = make_model(tokenizer)
    print(f"tiny-text: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    clean, careless = TEXT_STEPS
    train(model, tokenizer, text_examples(SEED), clean, 4e-3, systems)
    train(model, tokenizer, text_examples(SEED + 1, careless=True), careless, 1.5e-3, systems)
    save(model.to(torch.bfloat16), tokenizer, out / "tiny-text")


def make_arithmetic_models(out: Path) -> None:
    tokenizer = Qwen2Tokenizer.from_pretrained(ROOT / "pspo/assets/tiny-base")
    clean = make_model(tokenizer)
    print(f"clean: {clean.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(clean, tokenizer, examples(SEED), CLEAN_STEPS, 4e-3)
    for name, habits in HABITS.items():
        print(f"tiny-{name}")
        model = copy.deepcopy(clean)
        train(model, tokenizer, examples(SEED + 1, habits), HABIT_STEPS, 1.5e-3)
        save(model, tokenizer, out / f"tiny-{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "pspo/assets", help="where the models go, a folder each")
    out = parser.parse_args().out
    torch.set_num_threads(1)  # sums in one order: the same weights on every run
    make_text_model(out)
    make_arithmetic_models(out)


if __name__ == "__main__":
    main()
