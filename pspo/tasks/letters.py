"""Generate tasks about the letters of made-up words, endlessly, from a seed: answers that are no numbers.

    Spell 'planet' backwards.                                #### tenalp
    Write the letters of 'planet' in alphabetical order.     #### aelnpt

A word has 3 to 6 letters, in syllables of a consonant, a vowel and sometimes another consonant. Splits share no word.
"""

import random

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


def draw_letters(rng: random.Random) -> tuple[str, Problem]:
    """Draw a word and its task."""
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
