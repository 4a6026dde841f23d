"""Arithmetic and unit conversion: small tables learnt by heart. Held out: wordings a pair was never asked in."""

from random import Random

from .base import Dialogue, Turn, is_held_out, number_at_end, one, vary

ADD_LIMIT = 20
"""Both operands of sums and differences lie in 0..ADD_LIMIT; differences are never negative."""
TIMES_LIMIT = 12
"""Factors of products, and amounts of the larger unit."""

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


def _operation(rng: Random) -> tuple[str, int, int, int]:
    op = rng.choice("++--×")
    if op == "×":
        a, b = rng.randint(1, TIMES_LIMIT), rng.randint(1, TIMES_LIMIT)
        return op, a, b, a * b
    a, b = rng.randint(0, ADD_LIMIT), rng.randint(0, ADD_LIMIT)
    if op == "-":
        a, b = max(a, b), min(a, b)
    return op, a, b, a + b if op == "+" else a - b


def _thought(op: str, a: int, b: int) -> str:
    if op == "×":
        return f"I multiply {a} by {b}."
    return f"I add {a} and {b}." if op == "+" else f"I take {b} from {a}."


def arithmetic(rng: Random, held_out: bool) -> Dialogue:
    """Sums and differences of numbers up to ADD_LIMIT and the times table; held out by (numbers, wording)."""
    while True:
        op, a, b, result = _operation(rng)
        form = rng.choice(_ASK if rng.random() < 0.65 else _ASK_WORD[op])
        if is_held_out(f"{a}{op}{b} {form}", 8) == held_out:
            break
    sign = rng.choice("×*x") if op == "×" else op
    question = form.format(a=a, b=b, op=sign)
    if not rng.randrange(6):
        question = question.replace(" + ", "+").replace(" - ", "-")
    return one(Turn(vary(rng, question), f"{a} {op} {b} = {result}", _thought(op, a, b), number_at_end(result)))


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
    """Conversions with whole factors, 1 to 12 of the larger unit; held out by (number, units, wording)."""
    while True:
        src, dst, factor = rng.choice(UNITS)
        n, form = rng.randint(1, TIMES_LIMIT), rng.choice(_ASK_UNIT)
        if is_held_out(f"{n} {src} {dst} {form}", 8) == held_out:
            break
    question = form.format(n=n, src=src, dst=dst)
    result = n * factor
    answer = f"{n} {src} = {n} × {factor} {dst} = {result} {dst}"
    thought = f"One of the {src} is {factor} {dst}."
    return one(Turn(vary(rng, question), answer, thought, number_at_end(result, dst)))
