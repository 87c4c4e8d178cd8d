"""Generate tasks about the letters of made-up words, endlessly, from a seed: answers that are no numbers.

    Spell 'planet' backwards.                                #### tenalp
    Write the letters of 'planet' in alphabetical order.     #### aelnpt

A word has 3 to 6 letters, in syllables of a consonant, a vowel and sometimes another consonant. The hash of the word
decides a problem's split: train, validation and test share no word, for any seeds.
"""

import random
from collections.abc import Iterator

from pspo.tasks.arithmetic import split_of, split_rng
from pspo.tasks.problem import Problem

CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
LENGTHS = range(3, 7)
TASKS = {  # what is asked -> category
    "Spell '{word}' backwards.": "reverse",
    "Write '{word}' from right to left.": "reverse",
    "Sort the letters of '{word}'.": "sort",
    "Write the letters of '{word}' in alphabetical order.": "sort",
}
SOLVE = {"reverse": lambda word: word[::-1], "sort": lambda word: "".join(sorted(word))}


def problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of a split ("train", "validation", "test") without end, the same for the same seed.

    `answer` is a text, `solution` the answer after `####`, `category` "reverse" or "sort", `level` the word's length.
    """
    rng = split_rng(split, seed)
    while True:
        word = _draw_word(rng)
        task, category = rng.choice(list(TASKS.items()))
        if split_of(word) == split:
            answer = SOLVE[category](word)
            about = {"source": "letters", "category": category, "level": f"{len(word)} letters"}
            yield Problem(task.format(word=word), answer, solution=f"#### {answer}", **about)


def _draw_word(rng: random.Random) -> str:
    """Draw syllables until they reach a length that was drawn first, and cut what is over it."""
    length, word = rng.choice(LENGTHS), ""
    while len(word) < length:
        word += rng.choice(CONSONANTS) + rng.choice(VOWELS) + (rng.choice(CONSONANTS) if rng.random() < 0.4 else "")
    return word[:length]
