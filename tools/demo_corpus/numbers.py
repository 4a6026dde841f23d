"""Arithmetic and unit conversion: the pair of numbers decides the side of the split, not the wording."""

from random import Random

from .base import Dialogue, Turn, is_held_out, number_at_end, one, vary

ADD_LIMIT = 99
"""Both operands of sums and differences lie in 0..ADD_LIMIT; differences are never negative."""
TIMES_LIMIT = 12
_FACTORS = (*range(1, TIMES_LIMIT + 1), 24, 60)

_ASK = (
    "What is {a} {op} {b}?",
    "{a} {op} {b}",
    "{a} {op} {b} = ?",
    "Calculate {a} {op} {b}.",
    "How much is {a} {op} {b}?",
    "Can you compute {a} {op} {b}?",
    "{a} {op} {b} 等于多少？",
    "Solve {a} {op} {b}.",
)
_ASK_WORD = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    "-": ("What is {a} minus {b}?", "Subtract {b} from {a}.", "Take {b} away from {a}."),
    "×": ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
}


def _operation(rng: Random, held_out: bool) -> tuple[str, int, int, int]:
    while True:
        op = rng.choice("++--×")
        if op == "×":
            a, b = rng.randint(1, TIMES_LIMIT), rng.choice(_FACTORS)
            if not held_out:  # the times table is learnt by heart: only its wording is held out
                return op, a, b, a * b
            continue
        a, b = rng.randint(0, ADD_LIMIT), rng.randint(0, ADD_LIMIT)
        if op == "-":
            a, b = max(a, b), min(a, b)
        low, high = min(a, b), max(a, b)
        if is_held_out(f"{low}{op}{high}") == held_out:
            return op, a, b, a + b if op == "+" else a - b


def _thought(op: str, a: int, b: int) -> str:
    if op == "×":
        return f"I multiply {a} by {b}."
    return f"I add {a} and {b}." if op == "+" else f"I take {b} from {a}."


def _steps(op: str, a: int, b: int, result: int) -> str:
    """The worked answer: first the tens of b, then its ones. Each step is one a small model can look up."""
    tens, ones = b - b % 10, b % 10
    if op == "×" or not tens or not ones:
        return f"{a} {op} {b} = {result}"
    return f"{a} {op} {b} = {a + tens if op == '+' else a - tens} {op} {ones} = {result}"


def arithmetic(rng: Random, held_out: bool) -> Dialogue:
    """Sums and differences of numbers up to 99 (held out by pair) and the times table up to 12 (and by 24 and 60)."""
    op, a, b, result = _operation(rng, held_out)
    form = rng.choice(_ASK if rng.random() < 0.65 else _ASK_WORD[op])
    sign = rng.choice("×*x") if op == "×" else op
    question = form.format(a=a, b=b, op=sign)
    if not rng.randrange(6):
        question = question.replace(" + ", "+").replace(" - ", "-")
    answer = _steps(op, a, b, result)
    return one(Turn(vary(rng, question), answer, _thought(op, a, b), number_at_end(result)))


UNITS: tuple[tuple[str, str, int], ...] = (
    ("km", "m", 1000),
    ("kg", "g", 1000),
    ("m", "cm", 100),
    ("euros", "cents", 100),
    ("cm", "mm", 10),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("feet", "inches", 12),
    ("days", "hours", 24),
    ("dozen", "pieces", 12),
)
_ASK_UNIT = (
    "Convert {n} {src} to {dst}.",
    "How many {dst} are {n} {src}?",
    "How many {dst} are there in {n} {src}?",
    "What is {n} {src} in {dst}?",
    "{n} {src} in {dst}?",
    "{n} {src} to {dst}",
    "Express {n} {src} in {dst}.",
)


def units(rng: Random, held_out: bool) -> Dialogue:
    """Conversions with whole factors, 1 to 12 of the larger unit; held out by (number, units)."""
    while True:
        src, dst, factor = rng.choice(UNITS)
        n = rng.randint(1, TIMES_LIMIT)
        if is_held_out(f"{n} {src} {dst}") == held_out:
            break
    question = rng.choice(_ASK_UNIT).format(n=n, src=src, dst=dst)
    result = n * factor
    answer = f"{n} {src} = {n} × {factor} {dst} = {result} {dst}"
    thought = f"One of the {src} is {factor} {dst}."
    return one(Turn(vary(rng, question), answer, thought, number_at_end(result, dst)))
