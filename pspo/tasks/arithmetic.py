"""Generate problems endlessly, from a seed: arithmetic word problems in GSM8K's form, sums, and tasks about letters.

    Tom has 4 bags with 3 apples each. He buys 5 more. How many apples does Tom have now?

    4 * 3 = 12
    12 + 5 = 17
    #### 17

Operands are 2 to 20, results 1 to 20. There are 4.4 million such problems of one step, 705 million of two and 77.7
billion of three. The hash of a problem's text decides its split: splits share no problem, whatever their seeds are.
"""

import operator
import random
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction

from pspo.tasks.problem import Problem

MAX_NUMBER = 20

NAMES = {"Anna": "She", "Ben": "He", "Carl": "He", "Emma": "She", "Jack": "He", "Lily": "She"} | {
    "Max": "He", "Mia": "She", "Nina": "She", "Paul": "He", "Sara": "She", "Tom": "He"}  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "cookies", "eggs", "marbles", "pencils", "shells", "stamps")
BOXES = ("bags", "boxes", "packs", "rows")
ADD = ("buys {n} more", "finds {n} more", "wins {n} more", "gets {n} from {friend}", "borrows {n} from {friend}")
SUBTRACT = ("sells {n}", "loses {n}", "breaks {n}", "gives {n} to {friend}", "lends {n} to {friend}")
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} does {name} have in the end?",
    "What is the number of {things} that {name} has?",
    "Find out how many {things} {name} has left.",
)
COMPARE = {  # the last event, if it is about somebody else: operation -> sentence and question
    "+": "{other} has {n} more {things} than that. How many {things} does {other} have?",
    "-": "{other} has {n} fewer {things} than that. How many {things} does {other} have?",
    "*": "{other} has {n} times as many {things}. How many {things} does {other} have?",
    "/": "{name} shares the {things} equally among {n} friends. How many {things} does each friend get?",
}
WORDS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}

CONSONANTS = "bcdfghjklmnpqrstvwxyz"
VOWELS = "aeiou"
LENGTHS = range(3, 7)
TASKS = {  # what is asked -> category
    "Spell '{word}' backwards.": "reverse",
    "Write '{word}' from right to left.": "reverse",
    "Sort the letters of '{word}'.": "sort",
    "Write the letters of '{word}' in alphabetical order.": "sort",
}


def generate(draw: Callable[[random.Random], tuple[str, Problem]], split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield endless problems of a split, fixed by the seed; ``draw`` returns the text that decides the split, too."""
    rng = random.Random(f"{split} {seed}")  # seeding with a str does not depend on PYTHONHASHSEED
    while True:
        text, problem = draw(rng)
        if split_of(text) == split:
            yield problem


def split_of(prompt: str) -> str:
    """Return the one split that a problem text belongs to: 1/16 test, 1/16 validation, the rest train."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(prompt.encode()) % 16, "train")


def _operands(op: str, value: int) -> list[int]:
    """Return all n, at least 2, for which `value op n` is a whole number from 1 to MAX_NUMBER."""
    largest = {"+": MAX_NUMBER - value, "-": value - 1, "*": min(10, MAX_NUMBER // value), "/": value - 1}[op]
    return [n for n in range(2, largest + 1) if op != "/" or value % n == 0]


def draw_story(rng: random.Random) -> tuple[str, Problem]:
    """Draw a plan of one to three operations, then numbers for it; draw again if no numbers fit."""
    steps = rng.choice((1, 2, 3))
    boxed = rng.random() < 0.3  # the first step is the opening's product
    last = rng.choice("+-*/") if steps > boxed and rng.random() < 0.4 else ""  # the last step is about others
    middle = [rng.choice("+-") for _ in range(steps - boxed - bool(last))]
    ops = [*("*" if boxed else ""), *middle, *last]

    first = rng.randint(2, 10 if boxed else MAX_NUMBER)
    value = first
    numbers = []
    lines = []
    for op in ops:
        if not (choices := _operands(op, value)):
            return draw_story(rng)
        numbers.append(rng.choice(choices))
        result = APPLY[op](value, numbers[-1])
        lines.append(f"{value} {op} {numbers[-1]} = {result}")
        value = result

    name, friend, other = rng.sample(sorted(NAMES), 3)
    words = {"name": name, "friend": friend, "other": other, "things": rng.choice(THINGS), "boxes": rng.choice(BOXES)}
    opening = "{name} has {first} {boxes} with {n} {things} each." if boxed else "{name} has {first} {things}."
    story = [opening.format(first=first, n=numbers[0], **words)]
    for i, op in enumerate(middle):
        who = NAMES[name] if i == 0 else f"Then {NAMES[name].lower()}"
        event = rng.choice(ADD if op == "+" else SUBTRACT)
        story.append(f"{who} {event.format(n=numbers[boxed + i], **words)}.")
    closing = COMPARE[last] if last else rng.choice(QUESTIONS)
    story.append(closing.format(n=numbers[-1], **words))

    prompt = " ".join(story)
    return prompt, Problem(
        prompt,
        answer=Fraction(value),
        source="arithmetic",
        category=", ".join(WORDS[op] for op in ops),
        level="1 step" if steps == 1 else f"{steps} steps",
        solution="\n".join([*lines, f"#### {value}"]),
    )


def draw_sum(rng: random.Random) -> tuple[str, Problem]:
    """Draw a sum that is too hard for a tiny model without ``examples/calculator.py``: "What is 847 - 63?"."""
    op = rng.choice("+-")
    a = rng.randint(200, 899)
    b = rng.randint(11, 99)
    prompt = f"What is {a} {op} {b}?"
    value = APPLY[op](a, b)
    return prompt, Problem(prompt, Fraction(value), source="sums", category=WORDS[op], solution=f"#### {value}")


def draw_letters(rng: random.Random) -> tuple[str, Problem]:
    """Draw a made-up word and its task: "Spell 'planet' backwards."."""
    length = rng.choice(LENGTHS)
    word = ""
    while len(word) < length:
        word += rng.choice(CONSONANTS) + rng.choice(VOWELS)
        if rng.random() < 0.4:
            word += rng.choice(CONSONANTS)
    word = word[:length]
    task, category = rng.choice(list(TASKS.items()))
    answer = word[::-1] if category == "reverse" else "".join(sorted(word))
    level = f"{length} letters"
    prompt = task.format(word=word)
    return word, Problem(prompt, answer, {}, "letters", category, level, solution=f"#### {answer}")
