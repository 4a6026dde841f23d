"""Spelling and reversing of short words: held out are wordings that a word was never asked in."""

from random import Random

from .base import Dialogue, Turn, contains, equals, is_held_out, letters, one, vary
from .wordlist import WORDS

_SPELL = ("Spell {w}", "Spell the word {w}.", "How do you spell {w}?", "Spell: {w}", "Can you spell {w}?",
          "Spell out {w}.", "Write {w} letter by letter.", "Which letters are in {w}?")  # fmt: skip
_REVERSE = ("Reverse {w}", "Reverse the word {w}.", "Spell {w} backwards.", "What is {w} backwards?",
            "Write {w} in reverse.", "Reverse: {w}", "Turn {w} around.", "Say {w} backwards.")  # fmt: skip


LONGEST = 5
"""Letters of the longest word that is asked for: each is learnt by heart, since a token does not show its letters."""
SHORT_WORDS = tuple(word for word in WORDS if len(word) <= LONGEST)


def _ask(rng: Random, forms: tuple[str, ...], held_out: bool) -> tuple[str, str]:
    """A word, and a wording of the wanted side for it."""
    while True:
        word, form = rng.choice(SHORT_WORDS), rng.choice(forms)
        if is_held_out(f"{word} {form}", 8) == held_out:
            return word, vary(rng, form.format(w=word))


def spelling(rng: Random, held_out: bool) -> Dialogue:
    """`Spell river` → `r-i-v-e-r`."""
    word, question = _ask(rng, _SPELL, held_out)
    spelled = "-".join(word)
    return one(Turn(question, spelled, "I name the letters in order.", equals(spelled)))


def reversing(rng: Random, held_out: bool) -> Dialogue:
    """`Reverse river` → `r-i-v-e-r → revir`: spelling first is what makes it learnable."""
    word, question = _ask(rng, _REVERSE, held_out)
    backwards = word[::-1]
    answer = "-".join(word) + " → " + letters(backwards)
    return one(Turn(question, answer, "I spell it, then read it from the end.", contains("→ " + backwards)))
