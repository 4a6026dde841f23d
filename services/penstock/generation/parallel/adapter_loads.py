"""Adapters on their way into the other ranks and out of them: a thread of their own sends them between the steps."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.generation.parallel.leader_adapters import HeldAdapter
from penstock.generation.parallel.rank_messages import NO_MEMORY, READY, AdapterPartOrder, encode_adapter, encode_forget

if TYPE_CHECKING:
    from penstock.generation.layers.lora import EmbeddingPart, LoraPart

_YIELD_SECONDS = 1e-4
_Load = tuple["Future[HeldAdapter]", "Mapping[int, Sequence[LoraPart]]", "EmbeddingPart | None"]


class AdapterLoads:
    """Loads of adapters into the other ranks, one after the other, and the end of adapters that are unused.

    Adapters are never sent by a thread that an interrupt may reach (KeyboardInterrupt, on the main one): after half a
    message a rank would understand nothing more.
    """

    def __init__(self, send: Callable[[bytes], None], answers: Callable[[], list[bytes]]) -> None:
        """`send` sends a message to all ranks; `answers` waits for the next answer of each. Both may raise."""
        self._send, self._answers = send, answers
        self._numbers = itertools.count()
        # Loads, numbers to forget, and None: the end.
        self._orders: SimpleQueue[_Load | int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rank adapters", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def load(self, sites: Mapping[int, Sequence[LoraPart]], embedding: EmbeddingPart | None) -> Future[HeldAdapter]:
        """Let each rank take its part; the future has the adapter when all ranks have it. On any thread.

        The future raises as `send` and `answers`; ResourceExhausted (ADAPTER_MEMORY_FULL) and InvalidArgument
        (ADAPTER_BROKEN), field `path`, if a rank could not take it. Then no rank keeps any part of it.
        """
        found: Future[HeldAdapter] = Future()
        self._orders.put((found, sites, embedding))
        return found

    def stop(self) -> None:
        """End the thread after its queue; `send` and `answers` must fail by now. Later loads get no answer."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, int):
                self._forget(order)
            else:
                self._load(*order)
            # While this waits for the next one, it would keep the matrices.
            del order

    def _load(
        self,
        found: Future[HeldAdapter],
        sites: Mapping[int, Sequence[LoraPart]],
        embedding: EmbeddingPart | None,
    ) -> None:
        if not found.set_running_or_notify_cancel():
            return
        held = HeldAdapter(next(self._numbers))
        # A queue's put may run anywhere, in the middle of another one too.
        forget = weakref.finalize(held, self._orders.put, held.number)
        forget.atexit = False
        try:
            for part in _parts(held.number, sites, embedding):
                for message in part.encoded():
                    self._send(message)
                    # A lock goes to the first that asks; a waiting engine thread needs time to wake up.
                    time.sleep(_YIELD_SECONDS)
            self._send(encode_adapter(held.number))
            _check(self._answers())
        except BaseException as error:
            forget()
            found.set_exception(error)
        else:
            found.set_result(held)
        finally:
            # The error holds this frame, and `found` holds the error: breaking the cycle frees the matrices.
            del found

    def _forget(self, number: int) -> None:
        try:
            self._send(encode_forget([number]))
        except Exception:
            # A rank is lost: its users are told elsewhere, and nobody waits for this.
            return


def _parts(
    number: int, sites: Mapping[int, Sequence[LoraPart]], embedding: EmbeddingPart | None
) -> Iterator[AdapterPartOrder]:
    for site, parts in sites.items():
        for part in parts:
            yield AdapterPartOrder(number, site, part.first, part.scale, part.a_RI, part.b_OR)
    if embedding is not None:
        yield AdapterPartOrder(number, None, 0, embedding.scale, embedding.a_VR, embedding.b_IR)


def _check(answers: list[bytes]) -> None:
    """Raise the error for an adapter that not all ranks have taken."""
    for rank, answer in enumerate(answers, 1):
        if answer == NO_MEMORY:
            raise ResourceExhausted(
                f"path: rank {rank} has no memory for the adapter", reason="ADAPTER_MEMORY_FULL", field="path"
            )
        if answer != READY:
            raise InvalidArgument(
                "path", f"rank {rank} could not take the adapter: the log says why", reason="ADAPTER_BROKEN"
            )
