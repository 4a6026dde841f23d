"""Leases: owners of tensors and named sequences at the server, so that nothing outlives its caller. Event loop only."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.common.errors import InvalidArgument, NotFound, ResourceExhausted
from penstock.generation.graphs.sequences import PoolSequence

if TYPE_CHECKING:
    from penstock.generation.graphs.graph_limits import GraphLimits

MAX_LEASE_SECONDS = 3600.0
_ID_BYTES = 16


@dataclass(slots=True, eq=False)
class Lease:
    """Tensors and sequences of one caller. A stream has one of its own, without an id."""

    lease_id: str = ""
    seconds: float = 0.0
    # torch tensors, by handle.
    tensors: dict[int, Any] = field(default_factory=dict)
    sequences: dict[str, PoolSequence] = field(default_factory=dict)
    # Forward streams that have used it and are open.
    num_streams: int = 0
    expiry: asyncio.TimerHandle | None = None

    def tensor(self, handle: int, field: str) -> Any:
        """Return a tensor. Raises NotFound TENSOR_NOT_FOUND."""
        found = self.tensors.get(handle)
        if found is None:
            raise NotFound(f"{field}: no tensor of this lease has the handle", reason="TENSOR_NOT_FOUND", field=field)
        return found


class Leases:
    """All leases, and the quotas of their tensors and sequences."""

    def __init__(self, limits: GraphLimits, release: Callable[[list[PoolSequence]], None]) -> None:
        """`release` frees the blocks of sequences, after the computation in them."""
        self.num_expired = 0
        self.num_tensors = 0
        self.tensor_bytes = 0
        self._limits = limits
        self._release = release
        self._by_id: dict[str, Lease] = {}
        self._last_handle = 0

    @property
    def num_leases(self) -> int:
        """Number of leases that have an id."""
        return len(self._by_id)

    def open(self, seconds: float | None) -> Lease:
        """Begin a lease. Raises InvalidArgument, and ResourceExhausted GRAPH_QUOTA."""
        seconds = _checked(self._limits.graph_lease_seconds if seconds is None else seconds)
        if len(self._by_id) >= self._limits.max_graph_leases:
            raise self._full("leases", self._limits.max_graph_leases, "--max-graph-leases")
        # Nobody else can guess it.
        lease = Lease(secrets.token_hex(_ID_BYTES), seconds)
        self._by_id[lease.lease_id] = lease
        self.used(lease)
        return lease

    def find(self, lease_id: str) -> Lease:
        """Return a lease; that counts as a use of it. Raises NotFound LEASE_NOT_FOUND."""
        lease = self._by_id.get(lease_id)
        if lease is None:
            raise NotFound(
                "lease_id: there is no such lease, or it has ended", reason="LEASE_NOT_FOUND", field="lease_id"
            )
        self.used(lease)
        return lease

    def change(self, lease: Lease, seconds: float) -> None:
        """Set the lifetime of a lease after each use of it. Raises InvalidArgument."""
        lease.seconds = _checked(seconds)
        self.used(lease)

    def used(self, lease: Lease) -> None:
        """Restart the lifetime of a lease; a lease in a stream has none."""
        if lease.expiry is not None:
            lease.expiry.cancel()
            lease.expiry = None
        if lease.lease_id in self._by_id and not lease.num_streams:
            lease.expiry = asyncio.get_running_loop().call_later(lease.seconds, self._expire, lease)

    def hold(self, lease: Lease) -> None:
        """Keep a lease for one more stream."""
        lease.num_streams += 1
        self.used(lease)

    def let_go(self, lease: Lease) -> None:
        """End the hold of a stream."""
        lease.num_streams -= 1
        self.used(lease)

    def add(self, lease: Lease, sizes: Iterable[int], make: Callable[[int], Any]) -> list[int]:
        """Put tensors into a lease, `sizes` in bytes: `make` gives the i-th one. Return their handles.

        All or none. Raises ResourceExhausted GRAPH_QUOTA.
        """
        wanted = list(sizes)
        if self.num_tensors + len(wanted) > self._limits.max_graph_tensors:
            raise self._full("tensors", self._limits.max_graph_tensors, "--max-graph-tensors")
        if self.tensor_bytes + sum(wanted) > self._limits.max_graph_tensor_bytes:
            raise self._full("bytes of tensors", self._limits.max_graph_tensor_bytes, "--max-graph-tensor-bytes")
        made = [make(index) for index in range(len(wanted))]
        handles: list[int] = []
        for tensor, size in zip(made, wanted, strict=True):
            self._last_handle += 1
            lease.tensors[self._last_handle] = tensor
            handles.append(self._last_handle)
            self.num_tensors += 1
            self.tensor_bytes += size
        return handles

    def free(self, lease: Lease, handles: Iterable[int]) -> int:
        """Free tensors; return their number. Handles that are not the lease's are ignored."""
        found = [lease.tensors.pop(handle) for handle in set(handles) if handle in lease.tensors]
        self.num_tensors -= len(found)
        self.tensor_bytes -= sum(tensor.nbytes for tensor in found)
        return len(found)

    def end_sequences(self, lease: Lease, names: Iterable[str]) -> int:
        """End sequences; return their number. Names that are not the lease's are ignored."""
        found = [lease.sequences.pop(name) for name in set(names) if name in lease.sequences]
        if found:
            self._release(found)
        return len(found)

    def end(self, lease: Lease) -> tuple[int, int]:
        """End a lease with everything in it; return the numbers of tensors and of sequences."""
        self._by_id.pop(lease.lease_id, None)
        self.used(lease)
        return self.free(lease, list(lease.tensors)), self.end_sequences(lease, list(lease.sequences))

    def end_all(self) -> None:
        """End every lease: the process stops."""
        for lease in list(self._by_id.values()):
            self.end(lease)

    def _expire(self, lease: Lease) -> None:
        self.num_expired += 1
        self.end(lease)

    def _full(self, what: str, most: int, flag: str) -> ResourceExhausted:
        return ResourceExhausted(
            f"there are as many {what} as the {most} that {flag} allows",
            reason="GRAPH_QUOTA",
            retry_after_seconds=self._limits.retry_seconds,
        )


def _checked(seconds: float) -> float:
    # NaN fails every comparison.
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise InvalidArgument("lease_seconds", f"must be above 0 and at most {MAX_LEASE_SECONDS:g}")
    return seconds
