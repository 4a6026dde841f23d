"""The interface of every engine's adapter."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Unsupported(Exception):
    """Raised when the engine lacks something that was asked for, such as a number format."""


@dataclass(frozen=True)
class Settings:
    """One run's choices, the same for every engine."""

    model: str
    # bf16, fp32, int8, int4 or one of the engine's own.
    dtype: str
    threads: int
    # Tokens that the KV memory holds, where the engine lets one choose.
    kv_tokens: int
    max_context: int
    # Folder of converted checkpoints.
    cache: str
    # The engine's own options, as KEY=VALUE of --option ENGINE.KEY=VALUE.
    options: dict[str, str] = field(default_factory=dict)
    # Folders of LoRA adapters, as PEFT saves them; request i of a run takes that at i modulo their number.
    adapters: tuple[str, ...] = ()
    # GGUF file that the model was published as; empty: there is none.
    published: str = ""

    def converted(self, name: str) -> Path:
        """Return the path for a form of the model that an engine converts for itself."""
        return Path(self.cache) / f"{Path(self.model).resolve().name}.{name}"


@dataclass(frozen=True)
class TextScores:
    """Readings of a text with its own tokens given, one for each token after the first of its document."""

    # Of the token that the text has.
    log_probabilities: list[float] = field(default_factory=list)
    # Id that is likeliest in its place; empty where an engine does not tell.
    likeliest: list[int] = field(default_factory=list)

    def add_logits(self, logits: Any, following: Sequence[int]) -> None:
        """Add rows of float32 logits (rows, vocabulary), each with the token that follows it. A last row without one
        is left out."""
        import numpy

        rows = numpy.asarray(logits)[: len(following)]
        highest = rows.max(axis=1)
        sums = numpy.exp(rows - highest[:, None]).sum(axis=1, dtype=numpy.float64)
        chosen = rows[numpy.arange(len(rows)), list(following)]
        self.log_probabilities.extend((chosen - highest - numpy.log(sums)).tolist())
        self.likeliest.extend(rows.argmax(axis=1).tolist())


class TokenTimes:
    """Seconds from the start to every output token of every request."""

    def __init__(self, num_requests: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(num_requests)]
        self._start = time.perf_counter()

    def add(self, request: int, count: int = 1) -> None:
        """Note that `count` tokens of a request came just now."""
        self.times[request].extend([time.perf_counter() - self._start] * count)

    def add_to_all(self, requests: Iterable[int]) -> None:
        """Note that a token of each of these came just now."""
        now = time.perf_counter() - self._start
        for request in requests:
            self.times[request].append(now)


class Adapter(ABC):
    """One engine in this process. Called in the order prepare, load, run…, close, from one thread."""

    # True where `run` honours Settings.adapters.
    takes_adapters = False

    def __init__(self, settings: Settings) -> None:
        """Raises Unsupported for adapters that the engine does not take."""
        if settings.adapters and not self.takes_adapters:
            raise Unsupported("requests of several LoRA adapters at once")
        self.settings = settings

    def adapter(self, request: int) -> int:
        """Return the place of a request's adapter among Settings.adapters, which must not be empty."""
        return request % len(self.settings.adapters)

    @abstractmethod
    def prepare(self) -> None:
        """Do all that is not load time: imports, and converting the checkpoint. Raises ImportError, Unsupported."""

    @abstractmethod
    def load(self) -> None:
        """Load files into an engine that is warm and waits for work."""

    @abstractmethod
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        """Decode greedily, all requests at once; output i has exactly outputs[i] tokens. Returns TokenTimes.times."""

    def score(self, documents: list[list[int]]) -> TextScores:
        """Read documents of at least two tokens. Raises Unsupported where the engine does not tell."""
        raise Unsupported("log-probabilities of a text")

    @abstractmethod
    def version(self) -> str:
        """Return the engine's own version, with other facts that name it."""

    def facts(self) -> dict[str, int | float | str]:
        """Return further facts worth writing down after loading, such as bytes of weights."""
        return {}

    def processes(self) -> list[int]:
        """Return the ids of the processes that count in the memory."""
        return [os.getpid()]

    def close(self) -> None:  # noqa: B027  # most engines end with their process
        """End all that was started."""
