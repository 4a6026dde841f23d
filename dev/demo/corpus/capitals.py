"""Capitals: the facts are learnt by heart, the held-out prompts are wordings that this country was never asked in."""

from random import Random

from .base import Dialogue, Turn, contains, is_held_out, one, vary

CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Belgium": "Brussels",
    "Hungary": "Budapest", "Russia": "Moscow", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima",
    "Chile": "Santiago", "Brazil": "Brasília", "Argentina": "Buenos Aires", "Australia": "Canberra",
    "Iceland": "Reykjavik", "Morocco": "Rabat", "Ghana": "Accra", "Nepal": "Kathmandu", "Romania": "Bucharest",
    "the United Kingdom": "London", "the Netherlands": "Amsterdam", "Switzerland": "Bern", "South Korea": "Seoul",
}  # fmt: skip
_ASK = (
    "What is the capital of {c}?",
    "Which city is the capital of {c}?",
    "Name the capital of {c}.",
    "Tell me the capital of {c}.",
    "Capital of {c}?",
    "What's the capital city of {c}?",
    "Do you know the capital of {c}?",
    "I forgot the capital of {c}. What is it?",
    "What is the capital city of {c}",
    "Give me the capital of {c}.",
)
_CHINESE = {"France": "法国的首都是巴黎。", "Japan": "日本的首都是东京。", "China": "中国的首都是北京。",
            "Germany": "德国的首都是柏林。", "Russia": "俄罗斯的首都是莫斯科。"}  # fmt: skip


def capitals(rng: Random, held_out: bool) -> Dialogue:
    """Forty-two capitals; held out by (country, wording)."""
    if not held_out and rng.random() < 0.06:
        answer = rng.choice(list(_CHINESE.values()))
        return one(Turn(answer.split("是")[0] + rng.choice(("是哪里？", "是什么？")), answer, "这是一个常识问题。"))
    while True:
        country, city = rng.choice(list(CAPITALS.items()))
        form = rng.choice(_ASK)
        if is_held_out(f"{country} {form}", 8) == held_out:
            break
    answer = f"The capital of {country} is {city}."
    thought = f"The user asks for the capital of {country}."
    return one(Turn(vary(rng, form.format(c=country)), answer, thought, contains(f"is {city}.")))
