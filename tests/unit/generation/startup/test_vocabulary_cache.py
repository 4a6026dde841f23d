"""Tables of a large tokenizer in the cache: a later start has the same without reading its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from penstock.common.checkpoint import demo_folder
from penstock.generation.startup import vocabulary_cache
from penstock.generation.startup.vocabulary_cache import TokenTables, VocabularyCache
from penstock.text.token_bytes import Leading, TextCursor, TokenBytes

VOCAB_SIZE = 4096


@dataclass
class Reader:
    """Reads a folder's tables by a cache, and counts how often its tokenizer.json is read."""

    folder: Path
    cache: VocabularyCache
    reads: int = 0
    vocab_size: int = VOCAB_SIZE
    table: TokenBytes | None = field(default=None)

    def start(self) -> TokenTables:
        found = self.cache.token_tables(self.folder, self.vocab_size, self._read)
        assert found is not None
        found.prefixes()
        return found

    def _read(self) -> TokenBytes:
        self.reads += 1
        return self.table or TokenBytes.from_folder(self.folder, self.vocab_size)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in demo_folder().glob("*token*"):
        shutil.copy(path, folder)
    path = folder / "tokenizer.json"
    # Large enough to be kept.
    path.write_text(" " * vocabulary_cache.SMALLEST + path.read_text())
    return Reader(folder, VocabularyCache(tmp_path / "cache", most=2))


def facts(found: TokenTables) -> object:
    table, prefixes = found.token_bytes, found.prefixes()
    every = range(len(table) + 2)
    return (
        [(table.bytes_of(one), table.bytes_of(one, skip_special=False)) for one in every],
        [prefixes.extensions(one) for one in every],
        (table.leading, table.byte_tokens, table.beyond),
    )


def test_a_later_start_has_the_same_tables(reader: Reader) -> None:
    first, second = facts(reader.start()), facts(reader.start())
    assert second == first
    assert reader.reads == 1


def test_every_kind_of_token_comes_back(reader: Reader) -> None:
    tokens = {0: b"<s>", 1: b"\xc3", 2: b"\xa9", 3: b" a", 4: b"a b", 6: b"\xff", 7: b""}
    reader.table = TokenBytes(
        tokens, special=[0], byte_tokens=[1, 2, 6], leading=Leading.DROP_ALL, first={4: b"a b"}, beyond=[9, 8]
    )
    first, second = reader.start(), reader.start()
    assert facts(second) == facts(first)
    texts = []
    for found in (first, second):
        cursor = TextCursor(found.token_bytes, skip_special=True)
        texts.append([cursor.feed(one) for one in (4, 0, 1, 2, 6, 3, 7, 5)])
    assert texts[1] == texts[0]
    assert reader.reads == 1


def _change_config(reader: Reader) -> None:
    path = reader.folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))


def _change_size(reader: Reader) -> None:
    reader.vocab_size += 1


def _change_tokenizer(reader: Reader) -> None:
    path = reader.folder / "tokenizer.json"
    path.write_text(" " + path.read_text())


def _change_content(reader: Reader) -> None:
    (path,) = (reader.folder.parent / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [_change_config, _change_size, _change_tokenizer, _change_content])
def test_another_source_is_read_again(reader: Reader, change: Callable[[Reader], None]) -> None:
    reader.start()
    change(reader)
    reader.start()
    assert reader.reads == 2


def test_what_changes_while_it_is_read_is_not_kept(reader: Reader) -> None:
    found = reader.cache.token_tables(reader.folder, VOCAB_SIZE, reader._read)
    assert found is not None
    _change_tokenizer(reader)
    found.prefixes()
    assert not (reader.folder.parent / "cache").exists()


def test_content_of_another_form_is_read_again(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"{}\n", b"[]\n", b'{"offsets": 1, "order": 0}\nabcd', b'{"offsets": "1", "order": 0}\n'):
        with monkeypatch.context() as patch:
            patch.setattr(vocabulary_cache, "_packed", lambda *_, content=content: content)
            reader.start()
        reader.start()
        shutil.rmtree(reader.folder.parent / "cache")
    assert reader.reads == 10


def test_a_small_one_is_not_kept(reader: Reader) -> None:
    shutil.copy(demo_folder() / "tokenizer.json", reader.folder)
    reader.start()
    assert not (reader.folder.parent / "cache").exists()


def test_no_table_is_no_vocabulary(reader: Reader) -> None:
    assert reader.cache.token_tables(reader.folder, VOCAB_SIZE, lambda: None) is None
