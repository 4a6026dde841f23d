"""Readings: log-probabilities of a document's tokens, in files, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from penstock.common.errors import StartupError
from penstock.evaluation.reading import Reading, SavedReading
from safetensors.torch import save_file

IDS = [3, 0, 4, 1, 1]


def logits() -> torch.Tensor:
    return torch.randn(len(IDS), 6, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("chunk", [1, 2, 4, 5])
def test_every_token_after_the_first_is_expected_in_any_chunks(chunk: int) -> None:
    found = Reading.of_logits(logits().split(chunk), IDS, 2)
    scores = logits().log_softmax(-1)
    assert torch.equal(found.log_probability, torch.stack([scores[at, token] for at, token in enumerate(IDS[1:])]))
    assert found.likeliest_ids[:, 0].tolist() == scores[:-1].argmax(-1).tolist()
    assert found.likeliest.shape == (4, 2)


def test_perplexity_is_that_of_the_text() -> None:
    found = Reading.of_logits([torch.zeros(5, 8)], IDS, 1)
    assert found.perplexity == pytest.approx(8.0)


def test_more_than_the_vocabulary_are_all_of_it() -> None:
    found = Reading.of_logits([logits()], IDS, 99)
    assert found.likeliest.shape == (4, 6)
    assert torch.allclose(found.likeliest.exp().sum(-1), torch.ones(4))


def test_a_saved_reading_comes_back_with_its_documents(tmp_path: Path) -> None:
    documents = [IDS, IDS[:2]]
    whole = Reading.joined([Reading.of_logits([logits()[: len(ids)]], ids, 3) for ids in documents])
    whole.save(tmp_path / "one.safetensors", documents, "a model")
    saved = SavedReading.load(tmp_path / "one.safetensors")
    assert (saved.documents, saved.about) == (documents, "a model")
    assert torch.equal(saved.reading.log_probability, whole.log_probability)
    assert torch.equal(saved.reading.likeliest_ids, whole.likeliest_ids)


def test_a_file_of_another_kind_is_refused_by_the_flag(tmp_path: Path) -> None:
    weights, text, cut = (tmp_path / name for name in ("weights.safetensors", "text.safetensors", "cut.safetensors"))
    save_file({"weight": torch.zeros(2)}, weights)
    text.write_text("no tensors")
    one = Reading.of_logits([logits()], IDS, 2)
    Reading(one.log_probability[:2], one.likeliest_ids, one.likeliest).save(cut, [IDS], "")
    for file in (weights, text, cut, tmp_path / "missing.safetensors"):
        with pytest.raises(StartupError, match=f"--reference .*{file.name}"):
            SavedReading.load(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("document_lengths", torch.tensor([-1, 7], dtype=torch.int32)),
        ("document_lengths", torch.tensor([1, 5], dtype=torch.int32)),
        ("document_lengths", torch.tensor([3.0, 3.0])),
        ("document_lengths", torch.tensor(6, dtype=torch.int32)),
        ("document_ids", -torch.arange(6, dtype=torch.int32)),
        ("document_ids", torch.arange(6.0)),
        ("log_probability", torch.full((4,), torch.nan)),
        ("likeliest_ids", torch.zeros(4, 3)),
        ("likeliest", torch.zeros(4, 2)),
    ],
)
def test_a_file_that_lies_about_a_tensor_is_refused(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    """Negative lengths and such of another type ended the command with a traceback; others were taken."""
    tensors = {
        "log_probability": -torch.ones(4),
        "likeliest_ids": torch.zeros(4, 3, dtype=torch.int32),
        "likeliest": -torch.ones(4, 3),
        "document_ids": torch.arange(6, dtype=torch.int32),
        "document_lengths": torch.tensor([3, 3], dtype=torch.int32),
    }
    kind = {"kind": "penstock-reading-1"}
    save_file(tensors, tmp_path / "true.safetensors", kind)
    assert SavedReading.load(tmp_path / "true.safetensors").documents == [[0, 1, 2], [3, 4, 5]]
    save_file({**tensors, name: value}, tmp_path / "lies.safetensors", kind)
    with pytest.raises(StartupError, match=r"--reference .*lies\.safetensors: its tensors do not fit each other"):
        SavedReading.load(tmp_path / "lies.safetensors")
