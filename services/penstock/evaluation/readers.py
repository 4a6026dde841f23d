"""Readers of documents in this process: a model in one of our number formats, and transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.common.errors import StartupError
from penstock.evaluation.number_format import NumberFormat
from penstock.evaluation.reading import Reading
from penstock.evaluation.stepped_model import SteppedModel
from penstock.generation.devices.base import Device

Documents = Sequence[list[int]]
# Documents that are read, and all.
ShowRead = Callable[[int, int], None]


class Reader(Protocol):
    """Reader of documents."""

    def readings(self, documents: Documents, most: int) -> Iterator[Reading]:
        """Yield each document's reading, with its `most` likeliest tokens in every place."""


def read_all(reader: Reader, documents: Documents, most: int, show: ShowRead) -> Reading:
    """Read all documents."""
    found: list[Reading] = []
    show(0, len(documents))
    for one in reader.readings(documents, most):
        found.append(one)
        show(len(found), len(documents))
    return Reading.joined(found)


class FormatReader:
    """A Reader of a folder's model, as the generation service computes it."""

    def __init__(self, folder: Path, device: Device, format: NumberFormat, longest: int, chunk: int) -> None:
        """Load the model for documents of at most `longest` tokens; `chunk` of them are one step. Raises
        StartupError."""
        self._model = SteppedModel(folder, device, format, 1, longest)
        self._chunk = chunk

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self._model.weights.num_bytes

    @property
    def bits_per_weight(self) -> float:
        """Mean number of bits of a weight, scales and an embedding that is there twice included."""
        return 8 * self.weight_bytes / self._model.weights.config.num_parameters

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token."""
        return self._model.kv_bytes_per_token

    def readings(self, documents: Documents, most: int) -> Iterator[Reading]:
        for ids in documents:
            starts = range(0, len(ids), self._chunk)
            pieces = (self._model.step([ids[at : at + self._chunk]], [at]).cpu() for at in starts)
            yield Reading.of_logits(pieces, ids, most)


class TransformersReader:
    """A Reader of a folder's model by transformers' own modules, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        """Load the model. Raises StartupError naming --reference where transformers cannot."""
        from transformers import AutoModelForCausalLM

        try:
            # In its mode for reading: no dropout.
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError, AttributeError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise StartupError(
                f"--reference transformers: it does not load {folder.name}: {first} (give --reference-model the "
                "checkpoint that it was made of)",
                flag="--reference",
            ) from error

    @torch.inference_mode()
    def readings(self, documents: Documents, most: int) -> Iterator[Reading]:
        for ids in documents:
            yield Reading.of_logits([self._model(torch.tensor([ids]), use_cache=False).logits[0]], ids, most)
