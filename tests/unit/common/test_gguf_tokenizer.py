"""Tokenizers of GGUF files give the ids of the original tokenizers, on 10,000 lines of text."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories.models.quantised import write_gguf
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import StartupError
from penstock.common.gguf_file import GgufFile
from penstock.common.gguf_pretokenizers import PRETOKENIZERS
from penstock.common.gguf_tokenizer import convert, write_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("PENSTOCK_CONFORMANCE_DATA", ROOT.parent / "shared" / "data")) / "tokenizers"
NUM_LINES = 10_000
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Beside lines of this project's text: scripts, signs, white space, and what special tokens look like.
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCXYZ", "0123456789", " \t", "\n\r", ".,;:!?'\"()[]{}<>|/\\@#$%^&*-+=~`_",
    "äöüßéèñçøåÆŒ", "абвгдежзийк", "αβγδεζηθ", "一二三四五六七八九十的是不了", "ひらがなカタカナ", "한국어말", "עבריתא",
    "العربية", "देवनागरी", "ไทยภาษา", "🚀😶🌫️✅🦙👩‍💻", "e\u0301a\u0308", "\u200d\u00a0\u3000",
)  # fmt: skip


@cache
def lines() -> tuple[str, ...]:
    """Lines of the repository's files and random ones, each once, in a fixed order."""
    found: dict[str, None] = {}
    for path in sorted((*ROOT.glob("docs/**/*.md"), *ROOT.glob("services/**/*.py"), ROOT / "README.md")):
        found |= dict.fromkeys(path.read_text(encoding="utf-8").splitlines())
    source = random.Random(3)
    chosen = source.sample(list(found), 7 * NUM_LINES // 10)
    while len(chosen) < NUM_LINES:
        words = ("".join(source.choices(source.choice(ALPHABETS), k=source.randint(1, 6))) for _ in range(12))
        chosen.append("".join(words))
    return tuple(chosen)


def lines_to_train() -> tuple[str, ...]:
    """One in ten of the lines: words and scripts of all kinds, for a tenth of a training's time."""
    return lines()[::10]


def original(name: str) -> Path:
    folder = demo_folder() if name == "demo" else DATA / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"{name}: PENSTOCK_CONFORMANCE_DATA has no such tokenizer")
    return folder / "tokenizer.json"


def facts_of(path: Path, *, kind: str, rows: int = 0) -> dict[str, Any]:
    """A tokenizer.json as llama.cpp's converter writes it (base.py: get_vocab_base, and as of a tokenizer.model), with
    `rows` of the embedding."""
    content = json.loads(path.read_text())
    model, added = content["model"], {one["id"]: one for one in content["added_tokens"]}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: one["content"] for number, one in added.items()}
    tokens, kinds = [], []
    for number in range(max(rows, max(by_id) + 1)):
        token = by_id.get(number, f"[PAD{number}]")
        if number not in by_id:
            kinds.append(UNUSED)
        elif number in added:
            looks_special = token.startswith("<|") and token.endswith("|>")
            kinds.append(CONTROL if added[number]["special"] or looks_special else USER_DEFINED)
        else:
            kinds.append(BYTE if kind == "llama" and len(token) == 6 and token.startswith("<0x") else NORMAL)
        tokens.append(token)
    facts = {"general.architecture": "llama", "tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens}
    facts["tokenizer.ggml.token_type"] = kinds
    if kind == "llama":
        # The original's merges are in the order of its pieces' scores.
        ranks: dict[str, int] = {}
        for merge in model["merges"]:
            ranks.setdefault("".join(merge), len(ranks))
        facts["tokenizer.ggml.scores"] = floats([-float(ranks.get(token, len(ranks))) for token in tokens])
    else:
        facts["tokenizer.ggml.merges"] = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return facts


def floats(values: list[float]) -> bytes:
    import struct

    return struct.pack(f"<IIQ{len(values)}f", 9, 6, len(values), *values)


def converted(where: Path, facts: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    write_gguf(where / "tiny.gguf", facts, {})
    return convert(GgufFile(where / "tiny.gguf"))


def check(found: Tokenizer, expected: Tokenizer, change: Callable[[str], str] = str) -> None:
    """Compare ids of all lines, and their texts."""
    texts = [change(line) for line in lines()]
    ours, theirs = (
        [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)] for tokenizer in (found, expected)
    )
    differing = [text for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]
    assert not differing, f"{len(differing)} lines, such as {differing[:3]}"
    ours, theirs = (one.decode_batch(ours, skip_special_tokens=False) for one in (found, expected))
    assert ours == theirs


@pytest.mark.parametrize(("name", "pre"), [("demo", "qwen2"), ("qwen2.5", "qwen2")])
def test_byte_level_ids_are_those_of_the_original(tmp_path: Path, name: str, pre: str) -> None:
    path = original(name)
    facts = facts_of(path, kind="gpt2", rows=151_936 if name == "qwen2.5" else 0)
    found, _ = converted(tmp_path, facts | {"tokenizer.ggml.pre": pre})
    expected = Tokenizer.from_file(str(path))
    check(found, expected)
    text = "<|im_start|>user\nGrüße, 12345 <|im_end|>"
    assert found.encode(text).ids == expected.encode(text).ids
    assert found.get_vocab_size() == expected.get_vocab_size()


def test_sentencepiece_ids_are_those_of_the_original(tmp_path: Path) -> None:
    path = original("mistral-7b")
    facts = facts_of(path, kind="llama")
    facts |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}
    found, settings = converted(tmp_path, facts)
    expected = Tokenizer.from_file(str(path))
    # transformers 5 wrote this file: sentencepiece and llama.cpp begin a text that begins with a space with two,
    # and what follows a special token that is spelled with one more.
    check(found, expected, lambda line: re.sub("</?(s|unk)>", "_", line).lstrip(" ") or "_")
    assert found.encode("<s> two").ids == [1, *found.encode("<s> two").ids[1:]]
    assert found.encode("Hello").ids == expected.encode("Hello").ids
    assert found.encode(" hi", add_special_tokens=False).tokens == ["▁", "▁hi"]
    assert settings == {
        "tokenizer_class": "TokenizersBackend", "backend": "tokenizers",
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip
    found, _ = converted(
        tmp_path, facts | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    assert found.encode("Hello").tokens[0] == "Hello"


def trained(patterns: pre_tokenizers.PreTokenizer, normalizer: Any = None) -> Tokenizer:
    """A small byte-level tokenizer, trained on the lines."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = patterns
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines_to_train(), trainer)
    return tokenizer


# As the original tokenizer.json of each has it (SmolLM2, GPT-2, Llama 3, DeepSeek V3, DeepSeek Coder, Falcon).
ORIGINALS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "deepseek-coder": [
        *(
            pre_tokenizers.Split(one, "isolated")
            for one in map(Regex, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"))
        ),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


@pytest.mark.parametrize("pre", sorted(ORIGINALS))
def test_a_pretokenizer_cuts_as_the_original(tmp_path: Path, pre: str) -> None:
    expected = trained(pre_tokenizers.Sequence(ORIGINALS[pre]))
    expected.save(str(tmp_path / "tokenizer.json"))
    facts = facts_of(tmp_path / "tokenizer.json", kind="gpt2")
    found, _ = converted(tmp_path, facts | {"tokenizer.ggml.pre": pre})
    check(found, expected)


# Names that stand for the same row are read alike.
@pytest.mark.parametrize("pre", sorted({row: name for name, row in PRETOKENIZERS.items()}.values()))
def test_every_pretokenizer_keeps_all_of_a_text(tmp_path: Path, pre: str) -> None:
    facts = facts_of(original("demo"), kind="gpt2")
    found, _ = converted(tmp_path, facts | {"tokenizer.ggml.pre": pre})
    for line in lines()[-200:]:
        whole = normalizers.NFC().normalize_str(line) if PRETOKENIZERS[pre].composes else line
        assert found.decode(found.encode(line, add_special_tokens=False).ids, skip_special_tokens=False) == whole


def test_unigram_ids_are_those_of_the_original(tmp_path: Path) -> None:
    expected = Tokenizer(models.Unigram())
    expected.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    expected.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    expected.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=2000, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    expected.train_from_iterator(lines_to_train(), trainer)
    content = json.loads(expected.to_str())
    # A file has scores of 32 bits, as sentencepiece itself.
    content["model"]["vocab"] = [(one, float(np.float32(score))) for one, score in content["model"]["vocab"]]
    expected = Tokenizer.from_str(json.dumps(content))
    tokens, scores = zip(*content["model"]["vocab"], strict=True)
    facts = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": floats(list(scores)),
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(tokens) - 3)],
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    found, _ = converted(tmp_path, facts)
    check(found, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "has tokenizer.ggml.model 'bert', which is not read"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "has tokenizer.ggml.pre 'kimi-k2', which is not read"),
        ({"tokenizer.ggml.merges": None}, "has no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "has tokenizer.ggml.token_type of 2 numbers"),
        ({"tokenizer.ggml.bos_token_id": 99_999}, "has tokenizer.ggml.bos_token_id 99999"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    facts = facts_of(original("demo"), kind="gpt2") | {"tokenizer.ggml.pre": "qwen2"} | changes
    with pytest.raises(StartupError) as refused:
        converted(tmp_path, {name: value for name, value in facts.items() if value is not None})
    assert named in refused.value.message


def test_templates_are_files_beside_it(tmp_path: Path) -> None:
    facts = facts_of(original("demo"), kind="gpt2") | {
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.../evil": "no",
    }
    write_gguf(tmp_path / "tiny.gguf", facts, {})
    (tmp_path / "folder").mkdir()
    write_tokenizer(tmp_path / "tiny.gguf", tmp_path / "folder")
    found = {str(path.relative_to(tmp_path / "folder")) for path in (tmp_path / "folder").rglob("*") if path.is_file()}
    assert found == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
