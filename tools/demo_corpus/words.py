"""Spelling and reversing: held-out words are real words that no training text contains."""

# ruff: noqa: SIM905 (lists of words read best as text)

from random import Random

from .base import Dialogue, Turn, contains, equals, is_held_out, letters, one, vary
from .wordlist import WORDS

_ONSETS = "b br c ch cl d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sn st str t th tr v w y z".split()
_VOWELS = "a e i o u ea oo ai ou ee ie".split()
_CODAS = "b ck d g ll m n nd ng nt p r rk rn s sh ss st t th x le el er on y ver".split()
_RUDE = ("shit", "slut", "fuc", "dic", "cun", "nig", "tit", "pis", "pee", "poo")
_SPELL = ("Spell {w}", "Spell the word {w}.", "How do you spell {w}?", "Spell: {w}", "Can you spell {w}?",
          "Spell out {w}.", "Write {w} letter by letter.", "Which letters are in {w}?")  # fmt: skip
_REVERSE = ("Reverse {w}", "Reverse the word {w}.", "Spell {w} backwards.", "What is {w} backwards?",
            "Write {w} in reverse.", "Reverse: {w}", "Turn {w} around.", "Say {w} backwards.")  # fmt: skip


def made_up_word(rng: Random) -> str:
    """A pronounceable string of 3 to 9 letters: what lets spelling reach words never seen."""
    while True:
        parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 1, 2)))]
        word = "".join(parts) + (rng.choice(_CODAS) if rng.random() < 0.8 else "")
        if 3 <= len(word) <= 9 and word not in WORDS and not any(rude in word for rude in _RUDE):
            return word


def draw_word(rng: Random, held_out: bool, extra: tuple[str, ...] = ()) -> str:
    """A real word of the wanted side; for training often a made-up one, or one of the tokenizer's own words."""
    draw = rng.random()
    if not held_out and draw < 0.4:
        return made_up_word(rng)
    if not held_out and extra and draw < 0.65:
        return rng.choice(extra)
    while True:
        word = rng.choice(WORDS)
        if is_held_out("word " + word, 6) == held_out:
            return word


class WordFamilies:
    """The two word families, given the whole words that are single tokens (they can only be learnt by heart)."""

    def __init__(self, token_words: tuple[str, ...] = ()) -> None:
        self.token_words = tuple(w for w in token_words if not (w in WORDS and is_held_out("word " + w, 6)))

    def spelling(self, rng: Random, held_out: bool) -> Dialogue:
        """`Spell river` → `r-i-v-e-r`."""
        word = draw_word(rng, held_out, self.token_words)
        spelled = "-".join(word)
        question = vary(rng, rng.choice(_SPELL).format(w=word))
        return one(Turn(question, spelled, "I name the letters in order.", equals(spelled)))

    def reversing(self, rng: Random, held_out: bool) -> Dialogue:
        """`Reverse river` → `r-i-v-e-r → revir`: spelling first is what makes it learnable."""
        word = draw_word(rng, held_out, self.token_words)
        backwards = word[::-1]
        answer = "-".join(word) + " → " + letters(backwards)
        question = vary(rng, rng.choice(_REVERSE).format(w=word))
        return one(Turn(question, answer, "I spell it, then read it from the end.", contains("→ " + backwards)))
