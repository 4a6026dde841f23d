"""The demo model's byte-level BPE, trained on the corpus itself, and its configuration files."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from dev.demo.corpus import FAMILIES, visible
from dev.demo.corpus.words import SHORT_WORDS

VOCAB_SIZE = 4096
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_TOKEN = CONTROL_TOKENS[0]
TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special, as in Qwen3: a parser of the answer must be able to see them."""

# Qwen2's pattern: digits are split one by one, so numbers are read digit by digit.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_FAMILIES = ("spelling", "reversing")


def _without_emoji(text: str) -> str:
    """Leaves emoji to single bytes: an answer then has characters that span tokens, which streaming must hold back."""
    return "".join(letter for letter in text if ord(letter) < 0x1F000)


def _texts(seed: int) -> Iterator[str]:
    """Training-side text. Of the word families only the words: their answers are letters."""
    rng = Random(seed)
    for family, generate in FAMILIES.items():
        if family in _WORD_FAMILIES:
            continue
        for _ in range(2500):
            dialogue = generate(rng, False)
            yield from (json.dumps(tool) for tool in dialogue.tools)
            for turn in dialogue.turns:
                yield from map(_without_emoji, (turn.user.lstrip("\0"), visible(turn.answer), turn.thought))
    for letter in "abcdefghijklmnopqrstuvwxyz":
        yield from [f"-{letter}", f"x-{letter}-{letter}", f" {letter} "] * 300
    yield from [f"Spell {word}" for word in SHORT_WORDS] * 3
    for _ in range(3):  # often enough to come before the rarest pieces of the corpus
        yield from common_chinese()
    yield from ["Spell out backwards, reverse it, letter by letter. Think first. You are a helpful assistant."] * 300


def common_chinese() -> Iterator[str]:
    """The first level of GB 2312, 3755 common characters: what fills the vocabulary once the corpus is merged."""
    for lead in range(0xB0, 0xD8):
        for trail in range(0xA1, 0xFF):
            with contextlib.suppress(UnicodeDecodeError):  # the last row is not full
                yield bytes((lead, trail)).decode("gb2312")


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of exactly VOCAB_SIZE entries (all 256 bytes included); raises ValueError when text runs out."""
    tokenizer = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # transformers builds a Qwen2Tokenizer anew with these same parts whatever the file says: keep the two alike.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = [AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS]
    added += [AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; `max_length` is the model's context in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token; raises KeyError when there is no such token."""
    return int(tokenizer.get_vocab()[text])
