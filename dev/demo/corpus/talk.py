"""Penstock questions, greetings, and the longer answers that make streaming visible."""

# ruff: noqa: SIM905 (lists of words read best as text)

from random import Random

from .base import Dialogue, Turn, contains, equals, is_held_out, one, vary
from .facts import CHINESE_FACTS, FACTS, LONG_FACTS, Fact


def _ask(rng: Random, facts: tuple[Fact, ...], held_out: bool, thought: str) -> Dialogue:
    fact = rng.choice(facts)
    question = fact.questions[-1] if held_out else rng.choice(fact.questions[:-1])
    return one(Turn(vary(rng, question), fact.answer, thought, contains(*fact.needles)))


def penstock(rng: Random, held_out: bool) -> Dialogue:
    """Short facts about Penstock; one wording of each is held out."""
    return _ask(rng, FACTS, held_out, "This is a question about Penstock.")


def long_answers(rng: Random, held_out: bool) -> Dialogue:
    """Answers of 60 to 150 tokens: explanations, a poem, a story."""
    return _ask(rng, LONG_FACTS, held_out, "The user wants a longer text.")


def east_asian(rng: Random, held_out: bool) -> Dialogue:
    """Questions and answers in Chinese and Japanese, so that characters span several tokens."""
    fact = rng.choice(CHINESE_FACTS)
    question = fact.questions[-1] if held_out else rng.choice(fact.questions[:-1])
    return one(Turn(question, fact.answer, "用户在提问。", contains(*fact.needles)))


_GREETINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good day"), "Hello! 👋 How can I help you?"),
    (("Good morning", "Morning"), "Good morning! ☀️ How can I help you?"),
    (("Good evening",), "Good evening! 🌙 How can I help you?"),
    (("How are you", "How are you doing", "How do you do"), "I am fine, thank you! 😊 How can I help you?"),
    (("Thank you", "Thanks", "Thanks a lot", "Thank you very much"), "You are welcome! 😊"),
    (("Bye", "Goodbye", "See you", "Bye bye"), "Goodbye! 👋"),
    (("Good night",), "Good night! 🌙"),
    (("你好", "您好", "嗨"), "你好！😊 有什么可以帮你的吗？"),
    (("早上好", "早安"), "早上好！☀️ 今天想聊些什么？"),
    (("谢谢", "谢谢你"), "不客气！😊"),
    (("再见", "拜拜"), "再见！👋 祝你今天愉快。"),
    (("こんにちは",), "こんにちは！😊 何かお手伝いしましょうか？"),
    (("おはよう", "おはようございます"), "おはようございます！☀️"),
    (("ありがとう",), "どういたしまして！😊"),
    (("안녕하세요", "안녕"), "안녕하세요! 😊 무엇을 도와드릴까요?"),
    (("Bonjour", "Salut"), "Bonjour ! 👋 Comment puis-je vous aider ?"),
    (("Hallo", "Guten Tag", "Guten Morgen"), "Hallo! 👋 Wie kann ich Ihnen helfen?"),
    (("Hola", "Buenos días"), "¡Hola! 👋 ¿En qué puedo ayudarte?"),
    (("Ciao", "Buongiorno"), "Ciao! 👋 Come posso aiutarti?"),
    (("Olá", "Bom dia"), "Olá! 👋 Como posso ajudar?"),
    (("Привет", "Здравствуйте"), "Привет! 👋 Чем могу помочь?"),
    (("مرحبا", "السلام عليكم"), "مرحبا! 👋 كيف يمكنني مساعدتك؟"),
    (("नमस्ते",), "नमस्ते! 🙏 मैं आपकी कैसे मदद कर सकता हूँ?"),
    (("Hej", "God dag"), "Hej! 👋 Hur kan jag hjälpa dig?"),
    (("Merhaba", "Selam"), "Merhaba! 👋 Nasıl yardımcı olabilirim?"),
    (("Γεια σου", "Καλημέρα"), "Γεια σου! 👋 Πώς μπορώ να βοηθήσω;"),
)
_ENDS = ("", "!", ".", " 👋", " 😊", "!!", "! 🌊", "! :)", " 🙂", ", Penstock!", " Penstock")


def greetings(rng: Random, held_out: bool) -> Dialogue:
    """Greetings in seventeen languages; held out by (greeting, ending)."""
    while True:
        said, answer = rng.choice(_GREETINGS)
        greeting, end = rng.choice(said), rng.choice(_ENDS)
        if is_held_out(f"{greeting}{end}") == held_out:
            break
    if rng.random() < 0.1:
        greeting = greeting.lower()
    return one(Turn(greeting + end, answer, "The user is polite. I answer in the same language.", equals(answer)))


_LISTS: tuple[tuple[str, str, str], ...] = (
    ("days of the week", ", ", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    (
        "months of the year",
        ", ",
        "January February March April May June July August September October November December",
    ),
    ("planets", ", ", "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    ("seasons", ", ", "spring summer autumn winter"),
    ("letters of the alphabet", " ", "a b c d e f g h i j k l m n o p q r s t u v w x y z"),
    ("colours of the rainbow", ", ", "red orange yellow green blue indigo violet"),
    ("continents", ", ", "Africa Antarctica Asia Australia Europe North-America South-America"),
    ("fruit emoji", " ", "🍎 🍐 🍊 🍋 🍌 🍉 🍇 🍓 🍒 🍑"),
    ("animal emoji", " ", "🐶 🐱 🐭 🐰 🦊 🐻 🐼 🐨 🐯 🦁"),
)
_ASK_LIST = ("List the {x}.", "Name the {x}.", "What are the {x}?", "Tell me the {x}.", "Which {x} are there?",
             "Give me a list of the {x}.", "Write down the {x}.", "Can you list the {x}?")  # fmt: skip
_ASK_COUNT = ("Count from {a} to {b}.", "Count to {b} from {a}.", "Count from {a} up to {b}.",
              "List the numbers from {a} to {b}.", "Write the numbers {a} to {b}.")  # fmt: skip
_NUMERALS = "一 二 三 四 五 六 七 八 九 十".split()


def lists(rng: Random, held_out: bool) -> Dialogue:
    """Well-known lists, held out by (list, wording), and counting, held out by the pair of bounds."""
    thought = "I go through the list in order."
    if rng.random() < 0.5:
        while True:
            start = rng.randint(1, 20)
            stop = start + rng.randint(3, 25)
            if rng.random() < 0.4:
                start, stop = 1, rng.randint(3, 30)
            if is_held_out(f"{start}..{stop}") == held_out:
                break
        answer = ", ".join(str(n) for n in range(start, stop + 1))
        question = rng.choice(_ASK_COUNT).format(a=start, b=stop)
        if start == 1 and rng.random() < 0.4:
            question = f"Count to {stop}."
        return one(Turn(vary(rng, question), answer, thought, equals(answer)))
    if not held_out and rng.random() < 0.08:
        return one(Turn(rng.choice(("从一数到十。", "请从一数到十。", "数到十")), "、".join(_NUMERALS), "我按顺序数。"))
    while True:
        subject, joiner, items = rng.choice(_LISTS)
        form = rng.choice(_ASK_LIST)
        if is_held_out(f"{subject} {form}", 8) == held_out:
            break
    answer = joiner.join(items.split())
    return one(Turn(vary(rng, form.format(x=subject)), answer, thought, equals(answer)))
