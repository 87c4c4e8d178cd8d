"""Generate tasks about the letters of made-up words, endlessly, from a seed: answers that are no numbers.

    Spell 'planet' backwards.                                #### tenalp
    Write the letters of 'planet' in alphabetical order.     #### aelnpt

A word has 3 to 6 letters, in syllables of a consonant, a vowel and sometimes another consonant. The hash of the word
decides a problem's split: train, validation and test share no word, for any seeds.
"""

import random
from collections.abc import Iterator

from pspo.tasks.arithmetic import split_of
from pspo.tasks.problem import Problem

CONSONANTS = "bcdfghjklmnpqrstvwxyz"
VOWELS = "aeiou"
LENGTHS = range(3, 7)
TASKS = {  # what is asked -> category
    "Spell '{word}' backwards.": "reverse",
    "Write '{word}' from right to left.": "reverse",
    "Sort the letters of '{word}'.": "sort",
    "Write the letters of '{word}' in alphabetical order.": "sort",
}


def problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of a split ("train", "validation", "test") without end, the same for the same seed."""
    rng = random.Random(f"{split} {seed}")
    while True:
        length = rng.choice(LENGTHS)
        word = ""
        while len(word) < length:
            word += rng.choice(CONSONANTS) + rng.choice(VOWELS)
            if rng.random() < 0.4:
                word += rng.choice(CONSONANTS)
        word = word[:length]
        task, category = rng.choice(list(TASKS.items()))
        if split_of(word) == split:
            answer = word[::-1] if category == "reverse" else "".join(sorted(word))
            yield Problem(
                prompt=task.format(word=word),
                answer=answer,
                source="letters",
                category=category,
                level=f"{length} letters",
                solution=f"#### {answer}",
            )
