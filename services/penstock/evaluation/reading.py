"""A reading: for each token of a text, its log-probability and the tokens that were likeliest in its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.common.errors import StartupError

_KIND = "penstock-reading-1"
_DOCUMENTS = ("document_ids", "document_lengths")


@dataclass(frozen=True, slots=True)
class Reading:
    """Log-probabilities under teacher forcing, of all tokens that have one before them in their document.

    (N) of the token that the text has, and ids and log-probabilities (N, K) of the K likeliest, the likeliest first.
    """

    log_probability: Tensor
    likeliest_ids: Tensor
    likeliest: Tensor

    @classmethod
    def of_logits(cls, pieces: Iterable[Tensor], ids: Sequence[int], most: int) -> Self:
        """Return the reading of a document from the logits after each of its tokens: (rows, vocabulary) in pieces.
        `most` is K, at most the vocabulary. The row after the last token is left out."""
        following, at = torch.tensor(ids[1:]), 0
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for piece in pieces:
            expected = following[at : at + len(piece)]
            scores = piece[: len(expected)].float().log_softmax(-1)
            top = scores.topk(min(most, scores.shape[1]))
            found.append((scores.gather(1, expected[:, None]).squeeze(1), top.indices.int(), top.values))
            at += len(expected)
        return cls(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    @classmethod
    def joined(cls, readings: Sequence[Reading]) -> Self:
        """Return the reading of several documents."""
        return cls(*(torch.cat([getattr(one, field.name) for one in readings]) for field in fields(cls)))

    @property
    def perplexity(self) -> float:
        """Perplexity of the text."""
        return float((-self.log_probability.double().mean()).exp())

    def save(self, path: Path, documents: Sequence[Sequence[int]], about: str) -> None:
        """Write it with the documents that it is of; `about` says by what it was read. Raises OSError."""
        tensors = {field.name: getattr(self, field.name).contiguous() for field in fields(self)}
        ids, lengths = [token for document in documents for token in document], [len(one) for one in documents]
        tensors |= {name: torch.tensor(part).int() for name, part in zip(_DOCUMENTS, (ids, lengths), strict=True)}
        save_file(tensors, path, metadata={"kind": _KIND, "about": about})


@dataclass(frozen=True, slots=True)
class SavedReading:
    """A reading of a file, with its documents."""

    reading: Reading
    documents: list[list[int]]
    about: str

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `Reading.save` wrote. Raises StartupError naming --reference for any other."""
        names = [field.name for field in fields(Reading)]
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != _KIND or set(file.keys()) != {*names, *_DOCUMENTS}:
                    raise _no_reading(path, "it is not a file that --save-reference wrote")
                reading = Reading(*(file.get_tensor(name) for name in names))
                ids, lengths = (file.get_tensor(name) for name in _DOCUMENTS)
        except (OSError, SafetensorError) as error:
            raise _no_reading(path, str(error)) from error
        if not _do_fit(reading, ids, lengths):
            raise _no_reading(path, "its tensors do not fit each other")
        return cls(reading, [part.tolist() for part in ids.split(lengths.tolist())], metadata.get("about", ""))


def _do_fit(reading: Reading, ids: Tensor, lengths: Tensor) -> bool:
    """True for the tensors of a reading of these documents. A file may lie about each of them."""
    tensors = [getattr(reading, field.name) for field in fields(reading)]
    if [one.dtype for one in (*tensors, ids, lengths)] != [
        torch.float32,
        torch.int32,
        torch.float32,
        *[torch.int32] * 2,
    ]:
        return False
    if [one.ndim for one in (*tensors, ids, lengths)] != [1, 2, 2, 1, 1]:
        return False
    rows, most = int((lengths.long() - 1).sum()), reading.likeliest.shape[1]
    return (
        min(len(lengths), most) > 0
        # A document of one token has none that is expected.
        and int(lengths.min()) > 1
        and len(ids) == int(lengths.long().sum())
        and int(ids.min()) >= 0
        and len(reading.log_probability) == rows
        and reading.likeliest.shape == reading.likeliest_ids.shape == (rows, most)
        and not any(bool(one.isnan().any()) for one in tensors)
    )


def _no_reading(path: Path, why: str) -> StartupError:
    return StartupError(f"--reference {path}: {why}", flag="--reference")
