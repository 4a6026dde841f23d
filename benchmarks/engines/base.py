"""The interface of every engine's adapter."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


class Unsupported(Exception):
    """Raised when the engine lacks something that was asked for, such as a number format."""


@dataclass(frozen=True)
class Settings:
    """One run's choices, the same for every engine."""

    model: str
    # bf16, fp32, int8 or int4.
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

    def converted(self, name: str) -> Path:
        """Return the path for a form of the model that an engine converts for itself."""
        return Path(self.cache) / f"{Path(self.model).resolve().name}.{name}"


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
