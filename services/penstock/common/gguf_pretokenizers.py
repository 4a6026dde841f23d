"""Patterns that cut text before merges, by llama.cpp's names of them (`tokenizer.ggml.pre`): a row each.

The patterns are those of the original tokenizers, which llama.cpp rewrites for its own engine (llama-vocab.cpp). Each
cuts the pieces that the ones before it left.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """Patterns, one after the other: each match is a piece, and so is what is between two of them."""

    patterns: tuple[str, ...]
    # A piece that is a token stays whole, whatever merges there are.
    ignores_merges: bool = False
    # A text begins with bos unless the file says otherwise.
    adds_bos: bool = False
    # Text is composed (NFC) first, as the original tokenizers do; llama.cpp does not.
    composes: bool = False


_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_WORD_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ends: str, digits: str) -> str:
    """Return the pattern that cuts words where capitals begin."""
    first = r"[^\r\n\p{L}\p{N}]?"
    signs = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return f"{first}{_UPPER}*{_LOWER}+{ends}|{first}{_UPPER}+{_LOWER}*{ends}|{digits}{signs}{_SPACES}"


_LLAMA3 = f"{_WORD_ENDS}|{_WORDS}|{_DIGITS}{_SIGNS}{_SPACES}"
_QWEN2 = f"{_WORD_ENDS}|{_WORDS}|{_DIGIT}{_SIGNS}{_SPACES}"
_QWEN35 = (
    rf"{_WORD_ENDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES
)
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_WORD_ENDS}|{_WORDS}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"

_of_gpt2 = Pretokenizer((_GPT2,))
_of_digits = Pretokenizer((_DIGIT, _GPT2))
_of_llama3 = Pretokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_of_plain_llama3 = Pretokenizer((_LLAMA3,))
_of_qwen2 = Pretokenizer((_QWEN2,), composes=True)
_of_plain_qwen2 = Pretokenizer((_QWEN2,))
_of_deepseek3 = Pretokenizer((_DIGITS, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))
_of_gpt4o = Pretokenizer((_cased(f"{_WORD_ENDS}?", _DIGITS),))
_of_bloom = Pretokenizer((_BLOOM,))
_of_bailing = Pretokenizer((_BAILING,))

PRETOKENIZERS: dict[str, Pretokenizer] = {
    "default": Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum", "exaone4"),
        _of_gpt2,
    ),
    "olmo": Pretokenizer((_GPT2,), composes=True),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _of_digits
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _of_llama3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _of_plain_llama3),
    "qwen2": _of_qwen2,
    **dict.fromkeys(
        ("stablelm2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan", "solar-open", "grok-2"), _of_plain_qwen2
    ),
    "qwen35": Pretokenizer((_QWEN35,), composes=True),
    "tekken": Pretokenizer((_cased("", _DIGIT),), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _of_gpt4o),
    "tiny_aya": Pretokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(f"{_WORD_ENDS}?", _DIGITS))),
    "deepseek-llm": Pretokenizer(
        ("[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": Pretokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _of_deepseek3),
    "falcon": Pretokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _of_bloom),
    "viking": Pretokenizer((_BLOOM, _DIGIT)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _of_bailing),
    "seed-coder": Pretokenizer((_SEED,)),
}
