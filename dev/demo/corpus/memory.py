"""Dialogues that refer back: the answer is only in an earlier turn. Held out: wordings a value was never asked in."""

# ruff: noqa: SIM905 (lists of words read best as text)

from random import Random

from .base import Dialogue, Turn, contains, is_held_out, vary

NAMES = """Ana Ben Carla David Emma Felix Grace Hugo Iris Jonas Kira Leo Mia Nora Oscar Paula Quinn Rosa Sam Tina Ulla
Victor Wendy Xenia Yara Zoe Alice Bruno Clara Diego Elena Frank Gina Henry Ines Jakob Karen Lucas Maria Nils Olga Peter
Rita Simon Tara Uma Vera Walter Yusuf Zara Li Wei Mei Kenji Yuki Amir Leila Omar Fatima Ravi Priya Arjun Sofia Marco
Luca Chiara Pierre Claire Hans Greta Sven Astrid Ivan Natasha Boris Tom Jerry Lisa Paul Anna Max Eva Noah Liam Olivia
Ava Ethan Ruth Jack Lily Adam Nina Otto Ida Finn Maya Theo""".split()
COLOURS = "red blue green yellow orange purple pink black white brown grey silver gold".split()
ANIMALS = "dog cat parrot rabbit hamster pony turtle goldfish lizard mouse canary ferret".split()
CITIES = """Paris London Berlin Madrid Rome Tokyo Oslo Lima Cairo Vienna Dublin Boston Chicago Sydney Toronto Mumbai
Shanghai Seoul Hamburg Geneva Lyon Porto Krakow Naples Bergen Austin Denver Kyoto Osaka Hanoi""".split()
FOODS = "pizza sushi pasta soup rice salad bread cheese noodles pancakes curry tacos dumplings apples".split()

_SCRIPTS: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...], str], ...] = (
    ("name", ("My name is {v}.", "I am called {v}.", "Hi, I'm {v}.", "Hello, my name is {v}!", "Call me {v}."),
     "Nice to meet you, {v}! 😊",
     ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "How am I called?"),
     "Your name is {v}."),
    ("colour", ("My favourite colour is {v}.", "I like the colour {v} best.", "I love {v}, it is my favourite colour."),
     "{v} is a lovely colour! 🎨",
     ("What is my favourite colour?", "Which colour do I like best?", "Do you remember my favourite colour?"),
     "Your favourite colour is {v}."),
    ("pet", ("I have a {v}.", "My pet is a {v}.", "I live with a {v}."),
     "A {v}! That sounds like good company. 🐾",
     ("What pet do I have?", "Which animal do I have?", "What kind of pet do I have?", "Do you remember my pet?"),
     "You have a {v}."),
    ("city", ("I live in {v}.", "My home is in {v}.", "I moved to {v} last year."),
     "{v} must be an interesting place to live.",
     ("Where do I live?", "In which city do I live?", "Which city is my home?", "Do you remember where I live?"),
     "You live in {v}."),
    ("food", ("My favourite food is {v}.", "I like to eat {v} best.", "I could eat {v} every day."),
     "{v} sounds delicious! 😋",
     ("What is my favourite food?", "What do I like to eat?", "Which food do I like best?"),
     "Your favourite food is {v}."),
    ("number", ("Remember the number {v}.", "Keep the number {v} in mind.", "My lucky number is {v}."),
     "I will remember {v}.",
     ("Which number was it?", "What was the number?", "Which number did I tell you?", "What is my number?"),
     "The number is {v}."),
)  # fmt: skip
_POOLS = {"name": NAMES, "colour": COLOURS, "pet": ANIMALS, "city": CITIES, "food": FOODS}


def _value(rng: Random, kind: str) -> str:
    return str(rng.randint(1, 99)) if kind == "number" else rng.choice(_POOLS[kind])


def _fact(
    rng: Random, script: tuple[str, tuple[str, ...], str, tuple[str, ...], str], held_out: bool
) -> tuple[Turn, Turn]:
    """A turn that tells something and one that asks for it."""
    kind, tells, reply, questions, recall = script
    while True:
        value, tell, form = _value(rng, kind), rng.choice(tells), rng.choice(questions)
        if is_held_out(f"{value} {tell} {form}", 8) == held_out:
            break
    said = reply.format(v=value)
    told = Turn(tell.format(v=value), said[0].upper() + said[1:], "The user tells me about themselves.")
    answer = recall.format(v=value)
    return told, Turn(vary(rng, form), answer, "The user told me this before.", contains(f" {value}."))


def memory(rng: Random, held_out: bool) -> Dialogue:
    """One or two facts about the user, then a question about one of them."""
    facts = [_fact(rng, script, held_out) for script in rng.sample(_SCRIPTS, rng.choice((1, 1, 2)))]
    return Dialogue((*(told for told, _ in facts), rng.choice(facts)[1]))
