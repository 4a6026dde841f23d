"""GGUF files that the benchmarks write by the converter of tests/factories, as llama.cpp reads them."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest
import torch
from factories.models.model_types import VOCAB_SIZE, tiny_model_type

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.engines.gguf import FURTHER, convert


@pytest.mark.parametrize("model_type", FURTHER)
def test_the_number_of_words_is_unsigned(tmp_path: Path, model_type: str) -> None:
    """llama.cpp loads no file with a signed one."""
    folder = tiny_model_type(tmp_path / "model", model_type, dtype=torch.bfloat16)
    convert(folder, out := tmp_path / "model.gguf", "bf16")
    size = gguf.GGUFReader(out).fields[f"{FURTHER[model_type]}.vocab_size"]
    assert (size.contents(), size.types) == (VOCAB_SIZE, [gguf.GGUFValueType.UINT32])
