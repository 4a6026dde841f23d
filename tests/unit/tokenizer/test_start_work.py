"""The work of a tokenizer's start: a vocabulary of hundreds of thousands is read once, and made into one model."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from factories.models.tokenizer_folders import byte_fallback_tokenizer, detokenizers_of, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument, StartupError
from penstock.tokenizer import control_tokens, load_bundle
from penstock.tokenizer import tokenizer as tokenizer_file
from penstock.tokenizer.load_bundle import check_folder
from penstock.tokenizer.tokenizer import EncodeOptions, SpelledTokens, TextTokenizer, Vocabulary
from tokenizers import AddedToken, Tokenizer, models

NONCE = "\U00100001\U00100002\U00100003\U00100004"
PIECES = [
    "<s>",
    "</s>",
    "<",
    "s",
    ">",
    "/",
    "hello",
    "world",
    " ",
    "你",
    "好",
    "<|user|>",
    "<0xE4>",
    "<unk>",
    "é",
    "\n",
]
PLAIN = EncodeOptions(parse_special_tokens=False, add_special_tokens=False)


class _Counted:
    """A Tokenizer that notes what goes through all of its vocabulary."""

    calls: ClassVar[list[str]] = []

    def __init__(self, model: Any, made: Tokenizer | None = None) -> None:
        vars(self)["tokenizer"] = Tokenizer(model) if made is None else made

    @classmethod
    def from_str(cls, text: str) -> _Counted:
        cls.calls.append("from_str")
        return cls(None, Tokenizer.from_str(text))

    def __getattr__(self, name: str) -> Any:
        if name in ("to_str", "get_vocab"):
            self.calls.append(name)
        return getattr(vars(self)["tokenizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["tokenizer"], name, value)


@cache
def beside() -> Vocabulary:
    """Make a vocabulary whose control tokens are entries that no merge makes."""
    return Vocabulary(vocabulary_of(byte_fallback_tokenizer()).bundle, NONCE)


@cache
def renamed() -> Vocabulary:
    """Make the same one with a model of its own without these entries, as any other model gets it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_tokens, "_may_spell", lambda model, tokens: True)
        return Vocabulary(beside().bundle, NONCE)


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int], set[int]]:
    """Ids of a text in which nothing is a control token, by encoding and by a chat, and all control ids."""
    vocabulary = vocabulary_of(tokenizer)
    text_tokenizer = TextTokenizer(vocabulary)
    encoded = text_tokenizer.encode([text], PLAIN)[0].ids
    return encoded, text_tokenizer.encode_rendered(text, text), set(vocabulary.marks.control_tokens)


def merging(*merges: tuple[str, str], entries: tuple[str, ...] = (), **options: Any) -> Tokenizer:
    """Make a tokenizer whose control token <s> is an entry, with these merges."""
    pieces = ["<unk>", "<s>", "<", "s", ">", "a", *entries]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(merges), **options)
    )
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    return tokenizer


def test_a_start_reads_the_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out, parsed and parsed again a large vocabulary is most of a start."""
    bundle = beside().bundle
    for module in (control_tokens, tokenizer_file):
        monkeypatch.setattr(module, "Tokenizer", _Counted)
    monkeypatch.setattr(_Counted, "calls", [])
    vocabulary = Vocabulary(bundle)
    TextTokenizer(vocabulary)
    detokenizers_of(vocabulary)
    assert _Counted.calls == ["from_str"]


@given(st.lists(st.text("<|a>", max_size=4), max_size=6), st.text("<|a>b", max_size=20))
@settings(max_examples=300, deadline=None)
def test_a_text_is_searched_for_tokens_as_by_an_expression_of_all(tokens: list[str], text: str) -> None:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    found = re.findall("|".join(map(re.escape, longest_first)), text) if longest_first else []
    assert list(SpelledTokens(tokens).find(text)) == found


def test_no_expression_of_thousands_of_tokens_is_compiled() -> None:
    tokens = [f"<unused{number}>" for number in range(6000)]
    searched = SpelledTokens(tokens)
    assert list(searched.find("a <unused59> and <unused5999><unused6000>")) == ["<unused59>", "<unused5999>"]
    assert searched._first is not None
    assert len(searched._first.pattern) < 10


def test_control_tokens_that_no_merge_makes_share_the_model() -> None:
    kept = beside().content_tokenizer
    model = beside().tokenizer.model
    inside = [index for index, token in beside().marks.control_tokens.items() if model.token_to_id(token) is not None]
    assert sorted(kept.own_ids.values()) == inside == [0, 1, 2]
    assert not renamed().content_tokenizer.own_ids
    assert min(kept.own_ids) >= beside().size


@given(
    parts=st.lists(st.one_of(st.sampled_from(PIECES), st.integers(0, 8), st.text(max_size=3)), max_size=8),
    add=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_the_ids_are_those_of_a_model_without_the_entries(parts: list[str | int], add: bool) -> None:
    controls = list(beside().marks.control_tokens.values())
    text = "".join(part if isinstance(part, str) else beside().marks.add(controls[part]) for part in parts)
    first, second = (TextTokenizer(one) for one in (beside(), renamed()))
    assert first.encode_rendered("", text) == second.encode_rendered("", text)
    spelled = "".join(part if isinstance(part, str) else controls[part] for part in parts)
    options = EncodeOptions(parse_special_tokens=False, add_special_tokens=add)
    assert first.encode([spelled], options)[0].ids == second.encode([spelled], options)[0].ids


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (merging(("<", "s"), ("<s", ">"), entries=("<s",)), "a<s>a"),
        (merging(("<", "s"), ("<s", ">"), ("<s>", "a"), entries=("<s", "<s>a")), "<s><s>a"),
        (merging(ignore_merges=True), "<s>"),
        (merging(("<", "s"), ("<s", "></w>"), entries=("<s", "></w>", "<s></w>"), end_of_word_suffix="</w>"), "<s>"),
        (merging(("<", "##s"), ("<s", "##>"), entries=("##s", "##>", "<s"), continuing_subword_prefix="##"), "<s>"),
    ],
    ids=["merged", "on the way to a longer one", "whole words", "suffix", "prefix"],
)
def test_text_makes_no_control_id_where_merges_would(tokenizer: Tokenizer, text: str) -> None:
    encoded, chat, controls = ids_of(tokenizer, text)
    assert encoded == chat
    assert encoded
    assert not controls.intersection(encoded)


def test_text_makes_no_control_id_that_stands_for_a_byte() -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<0xC3>", normalized=False)])
    encoded, chat, controls = ids_of(tokenizer, "hÃh")
    unknown = tokenizer.token_to_id("<unk>")
    assert encoded == chat
    assert not controls.intersection(encoded) - {unknown}


def test_a_control_token_that_the_model_cannot_spell_gets_a_model_without_it() -> None:
    """Its characters have no entry, nor has what stands for unknown ones: the model raises."""
    pieces = {"a": 0, "b": 1, "ab": 2, "<s x>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[("a", "b")], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<s x>", normalized=False)])
    vocabulary = vocabulary_of(tokenizer)
    mark = vocabulary.marks.add("<s x>")
    assert TextTokenizer(vocabulary).encode_rendered("", f"ab{mark}ba") == [2, 3, 1, 0]


def test_marks_get_no_ids_that_an_entry_has() -> None:
    """A vocabulary with holes has entries behind its size."""
    pieces = {"<unk>": 0, "<s>": 1, "<": 2, "s": 3, ">": 4, "a": 6}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    vocabulary = vocabulary_of(tokenizer, id_limit=7)
    mark = vocabulary.marks.add("<s>")
    assert TextTokenizer(vocabulary).encode_rendered("", f"a{mark}<s>a") == [6, 1, 2, 3, 4, 6]


def test_a_decoding_table_is_made_without_a_dictionary_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = beside().bundle
    monkeypatch.setattr(_Counted, "calls", [])
    counted = _Counted.from_str(bundle.backend)
    _Counted.calls.clear()
    vocabulary = Vocabulary(bundle)
    vocabulary.tokenizer = cast("Tokenizer", counted)
    assert detokenizers_of(vocabulary).kind == "byte_fallback"
    assert _Counted.calls == []


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that the service itself parses."""
    names: list[str] = []
    check: Callable[[Path], None] = load_bundle._check_json

    def noted(path: Path) -> None:
        names.append(path.name)
        check(path)

    monkeypatch.setattr(load_bundle, "_check_json", noted)
    return names


async def test_the_service_leaves_the_large_file_to_the_process_that_loads_it(parsed: list[str]) -> None:
    await load_bundle.load_bundle(demo_folder(), timeout_seconds=120)
    assert "tokenizer.json" not in parsed


async def test_a_broken_large_file_is_named_as_clearly(tmp_path: Path, parsed: list[str]) -> None:
    for path in demo_folder().glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("[]")
    check_folder(tmp_path, whole=False)
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a JSON object; check MODEL"):
        await load_bundle.load_bundle(tmp_path, timeout_seconds=120)
    assert parsed.count("tokenizer.json") == 1


def test_a_text_that_the_vocabulary_has_no_ids_for_is_the_callers_to_change() -> None:
    """A vocabulary without an unknown token: an id of none would be another text."""
    words = vocabulary_of(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]")))
    tokenizer = TextTokenizer(words)
    assert tokenizer.encode(["a"], PLAIN)[0].ids == [0]
    with pytest.raises(InvalidArgument, match=r"texts\[1\]: has text for which"):
        tokenizer.encode(["a", "c"], PLAIN)
    with pytest.raises(InvalidArgument, match="messages: has text for which"):
        tokenizer.encode_rendered("c", None)
