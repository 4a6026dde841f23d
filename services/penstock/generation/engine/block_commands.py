"""Copies of blocks that somebody outside orders: an operator by RPC, or code that has the engine in its own process.

`BlockCommands` is the one way to do so. It works between two steps, on the engine's thread: over RPC and in a service
by `EngineLoop.run_on_engine`. It refuses blocks that the engine holds, by number: those of running requests and, in the
host pool, those of swapped ones. A block that only caches a prefix may be read; after a write it has no prefix.
A caller in the engine's own process claims the blocks that it copies instead: the engine then leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.generation.core.step import BlockCopy, CopyKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.generation.engine.engine import Engine

# Most blocks in the list of an error.
_MOST_LISTED = 16


class BlockCommands:
    """Orders to copy blocks of one engine."""

    def __init__(self, engine: Engine, *, claims: bool = False) -> None:
        """`claims`: all blocks are claimed for the caller first (CallerBlocks.claim), and stay claimed."""
        self._engine = engine
        self._claims = claims

    def copy(self, pairs: Sequence[tuple[int, int]]) -> float:
        """Copy blocks of the device's pool, [source, destination] each, and return the seconds that it took.

        They are carried out in order: each reads what those before it wrote. Raises as `swap`, naming `pairs`.
        """
        return self._run("pairs", [BlockCopy(source, destination) for source, destination in pairs])

    def swap(self, swaps: Sequence[tuple[int, int, int]]) -> float:
        """Copy blocks between the two pools and return the seconds that it took.

        Each is [kind, source, destination]: 0 from the host to the device, 1 from the device to the host. They are
        carried out in order.

        Raises InvalidArgument naming `swaps` for an impossible kind, block or number of blocks, FailedPrecondition
        NO_HOST_POOL, and FailedPrecondition BLOCK_IN_USE listing blocks that the engine holds; also BUSY if it claims
        blocks, see CallerBlocks.claim.
        """
        for place, (kind, _, _) in enumerate(swaps):
            if kind not in (CopyKind.IN, CopyKind.OUT):
                raise InvalidArgument(f"swaps[{place}].kind", "must be 0 (host to device) or 1 (device to host)")
        if self._engine.host_blocks is None:
            raise FailedPrecondition("there is no host pool: start with --host-kv-memory", reason="NO_HOST_POOL")
        copies = [BlockCopy(source, destination, CopyKind(kind)) for kind, source, destination in swaps]
        return self._run("swaps", copies)

    def _run(self, field: str, copies: list[BlockCopy]) -> float:
        engine = self._engine
        most = engine.config.max_block_copies
        if len(copies) > most:
            raise InvalidArgument(field, f"has {len(copies)} blocks, more than the {most} of --max-block-copies")
        pools = {"device": engine.device_blocks, "host": engine.host_blocks or engine.device_blocks}
        used: dict[str, set[int]] = {"device": set(), "host": set()}
        written: set[tuple[str, int]] = set()
        for place, copy in enumerate(copies):
            for name, side, block in _ends(copy):
                pool = pools[side]
                if not 0 <= block < pool.num_blocks:
                    raise InvalidArgument(f"{field}[{place}].{name}", f"must be in [0, {pool.num_blocks}): {side} pool")
                used[side].add(block)
            _, side, block = _ends(copy)[1]
            if (side, block) in written:
                raise InvalidArgument(f"{field}[{place}].destination", "is written twice")
            written.add((side, block))
        if self._claims:
            engine.caller_blocks.claim(used["device"], field, host_blocks=used["host"])
        else:
            _refuse(
                {side: [block for block in blocks if pools[side].num_holders(block)] for side, blocks in used.items()}
            )
        device, host = (sorted(block for on, block in written if on == side) for side in pools)
        return engine.copy_blocks(copies, device, host)


def _ends(copy: BlockCopy) -> tuple[tuple[str, str, int], tuple[str, str, int]]:
    """Return (field, pool, block) of both ends of a copy."""
    source = "host" if copy.kind is CopyKind.IN else "device"
    destination = "host" if copy.kind is CopyKind.OUT else "device"
    return ("source", source, copy.source), ("destination", destination, copy.destination)


def _refuse(held: dict[str, list[int]]) -> None:
    """Raise FailedPrecondition when there are blocks that the engine holds."""
    words, metadata = [], {}
    for side, blocks in held.items():
        if blocks:
            metadata[f"{side}_blocks"] = _listed(blocks)
            words.append(f"{side} blocks {_listed(blocks)}")
    if words:
        raise FailedPrecondition(f"requests hold {' and '.join(words)}", reason="BLOCK_IN_USE", metadata=metadata)


def _listed(blocks: Iterable[int]) -> str:
    numbers = sorted(set(blocks))
    more = [f"and {len(numbers) - _MOST_LISTED} more"] if len(numbers) > _MOST_LISTED else []
    return ", ".join([*map(str, numbers[:_MOST_LISTED]), *more])
