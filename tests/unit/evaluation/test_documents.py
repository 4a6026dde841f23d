"""Documents of a text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import StartupError
from penstock.evaluation.documents import documents_of
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

TEXT = "Penstock serves a model. " * 40


def plain_ids() -> list[int]:
    return Tokenizer.from_file(str(demo_folder() / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids


def test_the_text_in_pieces() -> None:
    documents = documents_of(demo_folder(), TEXT, 100, 32)
    assert [len(one) for one in documents] == [32, 32, 32, 4]
    assert [token for one in documents for token in one] == plain_ids()[:100]


def test_a_piece_of_one_token_expects_nothing_and_is_left_out() -> None:
    assert [len(one) for one in documents_of(demo_folder(), TEXT, 33, 32)] == [32]


def test_each_document_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    shutil.copytree(demo_folder(), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.id_to_token(0)} $A", special_tokens=[(tokenizer.id_to_token(0), 0)]
    )
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    documents = documents_of(tmp_path / "model", TEXT, 62, 32)
    assert [one[0] for one in documents] == [0, 0]
    assert [token for one in documents for token in one[1:]] == plain_ids()[:62]
    with pytest.raises(StartupError, match="--context 1"):
        documents_of(tmp_path / "model", TEXT, 62, 1)


def test_a_text_of_nothing_and_a_folder_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--text-file has 0 tokens"):
        documents_of(demo_folder(), "", 100, 32)
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        documents_of(tmp_path, TEXT, 100, 32)
