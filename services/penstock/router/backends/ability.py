"""Ability of backends to do one request: other engines lack modes and options that our own have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.common.errors import PenstockError, Unavailable
from penstock.router.backends.backend import Backend
from penstock.v1 import generation_pb2

_RETRY_SECONDS = 1.0


class Ability:
    """Ability that one request or call needs. Each backend is asked once."""

    def __init__(self, refusal: Callable[[Backend], PenstockError | None]) -> None:
        """Make it. `refusal` returns the error of a backend that lacks it."""
        self._refusal = refusal
        self._known: dict[str, PenstockError | None] = {}

    @classmethod
    def to_generate(cls, request: generation_pb2.GenerateRequest, *, resumes: bool = False) -> Ability:
        """Make that of a request. `resumes`: tokens of it were sent before."""
        return cls(lambda backend: backend.refusal(request, resumes=resumes))

    @classmethod
    def to_answer(cls, method: str) -> Ability:
        """Make that of a call with a single answer, such as `Score`."""
        return cls(lambda backend: backend.lacks_call(method))

    def has(self, backend: Backend) -> bool:
        """True for a backend that can do it, as far as is known here."""
        if backend.is_own:
            return True
        if backend.key not in self._known:
            self._known[backend.key] = self._refusal(backend)
        return self._known[backend.key] is None

    def missing(self, known: Iterable[Backend]) -> PenstockError | None:
        """Return the error of a request that none of these backends of its model can do now; None: some can.

        One of our own that is not ready may do it later.
        """
        backends = list(known)
        ready = [one for one in backends if one.link.is_ready]
        if not ready or any(self.has(one) for one in ready):
            return None
        refused = self._known[ready[0].key]
        if refused is not None and any(one.is_own for one in backends):
            return Unavailable(
                f"the backends that can do this are not ready ({refused.message})",
                reason="NO_BACKEND",
                retry_after_seconds=_RETRY_SECONDS,
            )
        return refused
