"""Loading of a tokenizer's folder, in the process that does it."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from factories.models.byte_tokenizer import save_byte_tokenizer
from factories.source_tree import ROOT
from penstock.common.checkpoint import demo_folder
from penstock.text.tokenizer_json import read_tokenizer_json
from penstock.tokenizer import load_process
from penstock.tokenizer.load_process import (
    copy_added_tokens_directly,
    load,
    read_added_tokens_alone,
    read_sources_once,
)
from tokenizers import AddedToken
from transformers import tokenization_utils_base
from transformers.utils import import_utils


def test_the_names_that_models_export_are_those_that_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Any = import_utils.define_import_structure
    monkeypatch.setattr(import_utils, "define_import_structure", reads)
    misses = reads.cache_info().misses
    init = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    read_sources_once()
    assert reads.cache_info().misses == misses
    given: Any = import_utils.define_import_structure
    assert given is not reads
    assert given(init) == reads(init)
    # Those of one model are its own affair.
    one = str(Path(init).parent / "qwen2" / "__init__.py")
    assert given(one) == reads(one)


def test_deep_copies_of_added_tokens_are_like_them_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_deepcopy_dispatch", dict(vars(copy)["_deepcopy_dispatch"]))
    words = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = [
        AddedToken("<a>", **dict(zip(words, flags, strict=True)))
        for flags in itertools.product((False, True), repeat=len(words))
    ]
    by_pickling = copy.deepcopy(tokens)
    copy_added_tokens_directly()
    made = copy.deepcopy({"tokens": tokens})["tokens"]
    assert [one.__getstate__() for one in made] == [one.__getstate__() for one in by_pickling]
    assert not any(one is token for one, token in zip(made, tokens, strict=True))


DATA = (ROOT / os.environ.get("PENSTOCK_CONFORMANCE_DATA", "../shared/data")).resolve()
TOKENIZERS = [demo_folder(), *sorted((DATA / "tokenizers").glob("*"))]


@pytest.mark.parametrize("folder", TOKENIZERS, ids=lambda folder: folder.name)
def test_transformers_takes_of_the_file_itself_its_added_tokens_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization_utils_base, "json", json)
    whole = load(folder)
    read: list[Any] = []

    def noted(path: Path) -> dict[str, Any]:
        read.append(path.name)
        return read_tokenizer_json(path)

    monkeypatch.setattr(load_process, "read_tokenizer_json", noted)
    read_added_tokens_alone()
    assert load(folder) == whole
    assert set(read) <= {"tokenizer.json"}
    # A configuration with tokens of its own leaves nothing to read.
    assert read or "added_tokens_decoder" in (folder / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("ends", [2, [2, [3, 4]]], ids=["an id", "a run of ids"])
def test_templates_with_names_are_read_whatever_the_ends_are(tmp_path: Path, ends: Any) -> None:
    for path in demo_folder().glob("*token*"):
        shutil.copy(path, tmp_path)
    config = json.loads((demo_folder() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    named = tmp_path / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("{{ tools }}")
    assert dict(load(tmp_path).templates) == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def test_a_tokenizer_that_encodes_nothing_is_told_with_the_file_that_chooses_it(tmp_path: Path) -> None:
    """Without tokenizer_config.json transformers makes Gemma's own, with an unknown token that the vocabulary lacks."""
    save_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text", "vocab_size": 256}))
    with pytest.raises(ValueError, match=r"encodes no text .*tokenizer_config\.json has no tokenizer_class"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert load(tmp_path).backend
