"""Reading of a tokenizer.json without its merges: the same of each token as by reading all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.checkpoint import demo_folder
from penstock.text.tokenizer_json import read_tokenizer_json

# Texts that look like the place where merges begin, or end.
ODD = ['"merges": [', "merges", '"', "\\", '": [', "]}}", "]", "[", "é\n"]
HEAD = {"version": "1.0", "added_tokens": [{"id": 9, "content": '"merges": [', "special": True}], "decoder": None}


def written(path: Path, document: dict[str, Any], indent: int | None = 2) -> Path:
    file = path / "tokenizer.json"
    file.write_text(json.dumps(document, ensure_ascii=False, indent=indent), encoding="utf-8")
    return file


def without_merges(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "model": {**document["model"], "merges": []}}


@given(
    tokens=st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=4)), max_size=6, unique=True),
    merges=st.lists(st.one_of(st.sampled_from([*ODD, ["]", "}}"]]), st.lists(st.sampled_from(ODD), max_size=2))),
    indent=st.sampled_from([None, 0, 2]),
)
def test_all_but_merges_is_what_json_has(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[str], merges: list[Any], indent: int | None
) -> None:
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges}
    file = written(tmp_path_factory.mktemp("made"), {**HEAD, "model": model}, indent)
    assert without_merges(read_tokenizer_json(file)) == without_merges({**HEAD, "model": model})


def test_merges_of_the_usual_order_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merges = [["a", "b"]] * 1000
    file = written(tmp_path, {**HEAD, "model": {"vocab": {"merges": 0}, "merges": merges}})
    parsed: list[int] = []
    loads = json.loads

    def noted(text: str) -> Any:
        parsed.append(len(text))
        return loads(text)

    monkeypatch.setattr("penstock.text.tokenizer_json.json.loads", noted)
    assert read_tokenizer_json(file)["model"] == {"vocab": {"merges": 0}, "merges": []}
    assert sum(parsed) < 1000


@pytest.mark.parametrize(
    "document",
    [
        {**HEAD, "model": {"merges": [["a", "b"]], "vocab": {"a": 0}}},
        {"model": {"vocab": {"a": 0}, "merges": [["a", "b"]]}, **HEAD},
        {**HEAD, "model": {"vocab": [["a", 0.0]], "type": "Unigram"}},
        {**HEAD, "model": {"vocab": {"a": 0}, "merges": [["a", "b"]]}, "post_processor": [1]},
    ],
    ids=["merges first", "model first", "no merges", "more behind"],
)
def test_another_order_is_read_whole(tmp_path: Path, document: dict[str, Any]) -> None:
    assert read_tokenizer_json(written(tmp_path, document)) == document


@pytest.mark.parametrize("text", ["[]", "", "{", '{"added_tokens": [], "decoder": null, "model": {"merges": ["a"'])
def test_what_is_no_object_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_tokenizer_json(tmp_path / "tokenizer.json")


def test_the_demo_models_file() -> None:
    file = demo_folder() / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["model"]["merges"]
    assert read_tokenizer_json(file) == without_merges(document)
