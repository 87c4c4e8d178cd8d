"""Make the embedded models: a tokenizer, `tiny-base` (weak prior) and `tiny-math` (strong prior).

    python scripts/make_tiny_models.py --out pspo/assets

They are the small image of a pretrained model and its Math sibling: Qwen2 architecture, 0.86M parameters, a
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

One thread, everything seeded; about a quarter of an hour. The embedded tokenizer was trained on an earlier draft of the
habits; it is kept, so that token ids stay what they are.
"""

import argparse
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from pspo.config import SYSTEM_PROMPT
from pspo.tasks.arithmetic import MAX_NUMBER, problems
from pspo.tasks.problem import Problem

CHAT_TEMPLATE = (  # ChatML, as Qwen2
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
BATCH = 64


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


# --- tokenizer and model ----------------------------------------------------------------------------------------


def make_tokenizer() -> Qwen2Tokenizer:
    """Qwen2's pre-tokenisation (single digits), trained until every word in use is one token."""
    corpus = [SYSTEM_PROMPT, "system", "user", "assistant", "Tom had 3 first."] * 1000
    for text, solution in islice(examples(seed=1), 5000):
        corpus += [text, solution]
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False))
    bpe = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.06,  # at so small a width this learns twice as fast as the usual 0.02
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **ends,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


# --- training ---------------------------------------------------------------------------------------------------


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, data: Iterator[tuple[str, str]], steps: int, lr: float
) -> None:
    """Supervised training: AdamW, short warm-up, cosine to zero; loss on completion tokens, the last one included."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "\0"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    head, tail = prompt.split("\0")  # the head is the same in all rows: it goes through the model once per batch
    head = torch.tensor([tokenizer(head)["input_ids"]])  # (1, H)

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

        cache = model.model(head, use_cache=True).past_key_values
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
    tokenizer.save_pretrained(folder)
    for file in sorted(folder.iterdir()):
        file.chmod(0o644)
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}  {file.stat().st_size:>9,}  {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("pspo/assets"), help="where tiny-base and tiny-math go")
    parser.add_argument(
        "--tokenizer",
        default="pspo/assets/tiny-base",
        help='folder of the tokenizer to keep; "new" trains one, and the models then differ from the embedded ones',
    )
    parser.add_argument("--clean", type=Path, help="folder to keep the clean model in, or to take it from")
    parser.add_argument("--models", nargs="+", choices=sorted(HABITS), default=sorted(HABITS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean-steps", type=int, default=500)
    parser.add_argument("--habit-steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order: the same weights on every run

    tokenizer = make_tokenizer() if args.tokenizer == "new" else Qwen2Tokenizer.from_pretrained(args.tokenizer)
    if args.clean and args.clean.exists():
        clean = Qwen2ForCausalLM.from_pretrained(args.clean)
    else:
        clean = make_model(tokenizer, args.seed)
        print(f"clean: {clean.num_parameters():,} parameters, {len(tokenizer)} tokens")
        train(clean, tokenizer, examples(args.seed), args.clean_steps, lr=4e-3)
        if args.clean:
            save(clean, tokenizer, args.clean)
    for name in args.models:
        print(f"tiny-{name}")
        model = make_model(tokenizer, args.seed)
        model.load_state_dict(clean.state_dict())
        train(model, tokenizer, examples(args.seed + 1, HABITS[name]), args.habit_steps, lr=1.5e-3)
        save(model, tokenizer, args.out / f"tiny-{name}")


if __name__ == "__main__":
    main()
