"""Draws that wait for the device once are the reference's, also where candidates do not decide a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories.engine.sequences import params, sequence
from penstock.generation.core.sequence import Sequence
from penstock.generation.sampling import queued_drawing
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.sampling.sampling_kernels import QueuedSampling, SamplingKernels

VOCAB = 9000
OPTIONS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_k": 20},
    {"do_sample": True, "top_p": 0.9, "top_logprobs": 2},
    {"do_sample": True},
    {"top_logprobs": 1},
    {"do_sample": True, "typical_p": 0.7},
]


def sequences() -> list[Sequence]:
    return [sequence([1, 2], params(**options), seq_id=number) for number, options in enumerate(OPTIONS)]


def drawn(logits: torch.Tensor, kernels: SamplingKernels) -> list[Any]:
    return list(Sampler(torch.device("cpu"), kernels).sample(logits.clone(), sequences()))


# Flat scores have a nucleus of more tokens than there are candidates.
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_tokens_and_logprobs_are_the_references(spread: float) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(OPTIONS), VOCAB, generator=generator) * spread
        assert drawn(logits, QueuedSampling()) == drawn(logits, SamplingKernels())


@pytest.mark.parametrize("row", range(len(OPTIONS)))
def test_a_row_that_is_not_a_number_is_an_error(row: int) -> None:
    logits = torch.zeros(len(OPTIONS), VOCAB)
    logits[row, 5] = torch.nan
    with pytest.raises(FloatingPointError, match="not numbers"):
        drawn(logits, QueuedSampling())


def test_rows_that_candidates_do_not_decide_cost_one_more_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = queued_drawing.QueuedDrawing._read

    def counted(drawing: queued_drawing.QueuedDrawing) -> Any:
        reads.append(drawing)
        return read(drawing)

    monkeypatch.setattr(queued_drawing.QueuedDrawing, "_read", counted)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(OPTIONS), VOCAB, generator=generator)
    drawn(logits * 8, QueuedSampling())
    assert len(reads) == 1
    drawn(logits * 0.01, QueuedSampling())
    assert len(reads) == 3
