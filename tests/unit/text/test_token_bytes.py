"""Token bytes against the tokenizers library, on small tokenizers made here and on real ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.text.token_bytes import TextCursor, TokenBytes, UnsupportedTokenizer
from tokenizers import Tokenizer, decoders

_ALPHABET = {"Ġ": 0x20, "Ċ": 0x0A, "ð": 0xF0, "Ł": 0x9F, "ĺ": 0x98, "Ģ": 0x80, "Ã": 0xC3, "©": 0xA9}
BYTE_LEVEL = ["a", "b", "ab", "Ġa", "ĠĠ", "Ġ", "Ċ", "ð", "Ł", "ĺ", "Ģ", "ðŁ", "ĺĢ", "Ã", "©", "Ã©b"]
SENTENCE_PIECE = [
    "<unk>",
    *(f"<0x{byte:02X}>" for byte in (0x20, 0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF)),
    "▁",
    "▁a",
    "a",
    "b▁",
    "▁▁",
    "é",
    "ab",
    "<0xZZ>",
]
LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
GEMMA = {"type": "Sequence", "decoders": LLAMA["decoders"][:3]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def document(vocabulary: list[str], decoder: dict[str, Any] | None) -> dict[str, Any]:
    tokens = {token: token_id for token_id, token in enumerate(vocabulary)}
    added = [
        {"id": len(vocabulary), "content": "<|end|>", "special": True},
        {"id": len(vocabulary) + 1, "content": "<think> é", "special": False},
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": decoder, "added_tokens": [entry | flags for entry in added],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": tokens, "merges": []},
    }  # fmt: skip


def folder(path: Path, content: dict[str, Any]) -> Path:
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def text(table: TokenBytes, ids: list[int], *, skip_special: bool) -> str:
    cursor = TextCursor(table, skip_special=skip_special)
    return b"".join(cursor.feed(token_id) for token_id in ids).decode(errors="replace")


KINDS = {"bytes": (BYTE_LEVEL, BYTES), "llama": (SENTENCE_PIECE, LLAMA), "gemma": (SENTENCE_PIECE, GEMMA),
         "metaspace": (SENTENCE_PIECE, METASPACE)}  # fmt: skip
TRAILING = {"type": "Sequence", "decoders": [{"type": "Strip", "content": "_", "start": 0, "stop": 1}]}
_REPLACE, _FALLBACK, _FUSE, _STRIP = LLAMA["decoders"]
# The same steps, but Strip acts on every token, and the others on the whole text.
REORDERED = [
    {"type": "Sequence", "decoders": steps}
    for steps in ([_REPLACE, _STRIP, _FUSE], [_REPLACE, _FUSE, _FALLBACK], [_FALLBACK, _FUSE, METASPACE])
]
UNSUPPORTED = [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, TRAILING, _STRIP, *REORDERED]


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS), scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenBytes, Tokenizer]:
    content = document(*request.param)
    path = folder(tmp_path_factory.mktemp("tokenizer"), content)
    return TokenBytes.from_folder(path), Tokenizer.from_str(json.dumps(content))


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 19), max_size=9), skip=st.booleans())
def test_the_bytes_of_a_text_are_what_the_library_decodes(
    pair: tuple[TokenBytes, Tokenizer], ids: list[int], skip: bool
) -> None:
    table, library = pair
    ids = [token_id for token_id in ids if token_id < len(table)]
    # The library takes a whole run of byte tokens back when its end is bad; a text that only grows cannot.
    valid = [library.decode(ids[:end], skip_special_tokens=skip) for end in range(len(ids) + 1)]
    if "\ufffd" not in "".join(valid) or not table.byte_tokens:
        assert text(table, ids, skip_special=skip) == valid[-1]


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 19), max_size=7), ids=st.lists(st.integers(0, 19), max_size=5), skip=st.booleans()
)
def test_a_cursor_goes_on_after_a_prompt_as_if_it_had_been_fed_all_of_it(
    pair: tuple[TokenBytes, Tokenizer], prompt: list[int], ids: list[int], skip: bool
) -> None:
    fed, begun = TextCursor(pair[0], skip_special=skip), TextCursor(pair[0], skip_special=skip)
    before = b"".join(fed.feed(token_id) for token_id in prompt)
    begins = [place for place in range(max(0, len(before) - 3), len(before)) if is_begun(before[place:])]
    assert begun.begin(prompt) == (before[begins[0] :] if begins else b"")
    assert [begun.feed(token_id) for token_id in ids] == [fed.feed(token_id) for token_id in ids]


def is_begun(data: bytes) -> bool:
    """True when `data` is the beginning of one character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


def test_a_run_of_byte_tokens_is_no_text_from_its_first_bad_byte_on(tmp_path: Path) -> None:
    table = TokenBytes.from_folder(folder(tmp_path, document(SENTENCE_PIECE, LLAMA)))
    good, bad = [SENTENCE_PIECE.index(f"<0x{byte}>") for byte in ("61", "FF")]
    cursor = TextCursor(table, skip_special=True)
    assert [cursor.feed(token_id) for token_id in (bad, good, good)] == [b"\xff"] * 3
    assert [cursor.feed(token_id) for token_id in (SENTENCE_PIECE.index("é"), good)] == ["é".encode(), b"a"]


def test_a_copied_cursor_goes_its_own_way(tmp_path: Path) -> None:
    table = TokenBytes.from_folder(folder(tmp_path, document(SENTENCE_PIECE, LLAMA)))
    cursor, space = TextCursor(table, skip_special=True), SENTENCE_PIECE.index("▁a")
    twin = cursor.copy()
    assert [cursor.feed(space), cursor.feed(space), twin.feed(space)] == [b"a", b" a", b"a"]


def test_special_tokens_are_empty_only_where_they_are_skipped(tmp_path: Path) -> None:
    table = TokenBytes.from_folder(folder(tmp_path, document(BYTE_LEVEL, BYTES)))
    end = len(BYTE_LEVEL)
    assert table.bytes_of(end) == b""
    assert table.bytes_of(end, skip_special=False) == b"<|end|>"
    assert table.bytes_of(end + 1) == "<think> é".encode()
    assert table.bytes_of(10_000) == b"", "padding of the model's vocabulary"


def test_tokens_that_only_the_config_adds_count_too(tmp_path: Path) -> None:
    path = folder(tmp_path, document(BYTE_LEVEL, BYTES))
    added = {"40": {"content": "<|tool|>", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    table = TokenBytes.from_folder(path)
    assert table.bytes_of(40) == b""
    assert table.bytes_of(40, skip_special=False) == b"<|tool|>"
    assert table.bytes_of(30) == b"", "a gap between ids"


@pytest.mark.parametrize("decoder", UNSUPPORTED)
def test_a_decoder_that_cannot_be_split_by_token_is_refused(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    with pytest.raises(UnsupportedTokenizer):
        TokenBytes.from_folder(folder(tmp_path, document(BYTE_LEVEL, decoder)))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json"):
        TokenBytes.from_folder(tmp_path)


def test_the_byte_alphabet_is_the_librarys() -> None:
    decoder = decoders.ByteLevel()
    for character, byte in _ALPHABET.items():
        assert decoder.decode([character]) == bytes([byte]).decode(errors="replace")


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b"])
def test_real_tokenizers_decode_their_vectors(name: str) -> None:
    default = Path(__file__).parents[3].parent / "shared" / "data"
    path = Path(os.environ.get("PENSTOCK_CONFORMANCE_DATA", default)) / "tokenizers" / name
    if not path.is_dir():
        pytest.skip(f"no real tokenizers at {path.parent}")
    table = TokenBytes.from_folder(path)
    vectors = json.loads((path / "vectors.json").read_text(encoding="utf-8"))
    library = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert vectors
    for vector in vectors["vectors"] if isinstance(vectors, dict) else vectors:
        for skip in (True, False):
            assert text(table, vector["ids"], skip_special=skip) == library.decode(
                vector["ids"], skip_special_tokens=skip
            )
