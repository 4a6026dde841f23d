"""Process of a rank other than 0: it loads its part of the model and follows rank 0's orders until rank 0 ends.

`python -m penstock.generation.parallel.worker DESCRIPTOR`, of the socket to rank 0, which sends one JSON object first.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.common.errors import StartupError
from penstock.common.heap import trim_heap
from penstock.common.log_limits import LineBounds
from penstock.common.logging import configure_logging, get_logger
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.host_kv import HostKVPool, copy_blocks
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.devices.base import Device
from penstock.generation.devices.device_registry import open_device
from penstock.generation.devices.torch_dtypes import named_dtype
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model, read_model_config
from penstock.generation.parallel.rank_adapters import RankAdapters
from penstock.generation.parallel.rank_group import RankGroup
from penstock.generation.parallel.rank_messages import (
    READY,
    REFUSED,
    MessageKind,
    PoolOrder,
    StepOrder,
    decode_copies,
    decode_hidden,
    kind_of,
)
from penstock.generation.weights.sharding import Shard

_log = get_logger("penstock.generation")
# Between the end of a collective and that of rank 0's connection.
_LEAVE_SECONDS = 0.5
_OF_ADAPTERS = frozenset((MessageKind.ADAPTER_PART, MessageKind.PIECE, MessageKind.ADAPTER, MessageKind.FORGET))


class Worker:
    """One rank: its part of the weights, of adapters and of the pool."""

    def __init__(self, order: dict[str, Any], answer: Callable[[bytes], None]) -> None:
        """Load the part. `answer` tells rank 0; it is called on two threads, never at once. Raises StartupError."""
        self._answer = answer
        self._device: Device = open_device(order["device"])
        self._device.start(
            num_threads=order["threads"], kernels=order["kernels"], compact_weights=order["compact_weights"]
        )
        self._group = RankGroup(Shard(order["rank"], order["count"]))
        model = load_model(
            Path(order["folder"]),
            dtype=order["dtype"],
            quantization=order["quantization"],
            device=self._device,
            map_embeddings=order["map_embeddings"],
            shard=self._group.shard,
            sum_parts=self._group.sum,
        )
        assert isinstance(model, CausalLM), "only native models are spread"
        self._model = model
        self._adapters = RankAdapters(model, read_model_config(Path(order["folder"])), self._group.shard, answer)
        self._kv: KVCachePool | None = None
        self._host: HostKVPool | None = None
        # As rank 0 does: free the temporary memory of reading and packing.
        trim_heap()

    def do(self, message: bytes) -> None:
        """Carry out a message. Raises StartupError for pools that cannot be made."""
        kind, body = kind_of(message)
        if kind is MessageKind.POOL:
            self._make_pools(PoolOrder.decoded(body))
        elif kind in _OF_ADAPTERS:
            self._adapters.take(kind, body)
        else:
            self._compute(kind, body)

    def _make_pools(self, order: PoolOrder) -> None:
        """Allocate the pools, answer, and meet the other ranks. Raises StartupError."""
        config = self._model.config
        self._kv = KVCachePool(
            config.num_layers,
            order.num_blocks,
            order.block_size,
            self._model.num_kv_heads,
            config.head_dim,
            torch.int8 if order.dtype == "int8" else named_dtype(order.dtype),
            self._device.torch_device,
        )
        if order.num_host_blocks:
            self._host = HostKVPool(self._kv, order.num_host_blocks)
        self._answer(READY)
        self._group.join(Path(order.meeting), self._device)

    def _compute(self, kind: MessageKind, body: memoryview) -> None:
        """Carry out a message that needs the pool."""
        model, kv = self._model, self._kv
        assert kv is not None, "pools come first"
        if kind is MessageKind.STEP:
            self._step(StepOrder.decoded(body, model.config.hidden_size, model.dtype), kv)
        elif kind is MessageKind.LOGITS:
            hidden_NI, spans = decode_hidden(body, model.config.hidden_size, model.dtype)
            logits_NV = model.compute_logits(hidden_NI.to(self._device.torch_device), self._adapters.batch(spans))
            self._group.columns(logits_NV, model.config.vocab_size)
        else:
            copy_blocks(kv, self._host, decode_copies(body))

    def _step(self, order: StepOrder, kv: KVCachePool) -> None:
        model, device = self._model, self._device.torch_device
        if order.num_layers < len(model.layers):
            model, kv = model.shallow(order.num_layers), kv.shallow(order.num_layers)
        metadata, positions_T = AttentionMetadata.build(
            order.query_lens.tolist(),
            order.kv_lens.tolist(),
            torch.from_numpy(order.tables),
            kv.block_size,
            device,
        )
        ids_T = torch.from_numpy(order.ids.astype(np.int64)).to(device)
        embeds = None if order.embeds is None else order.embeds.to(device)
        adapters = self._adapters.batch(order.adapters)
        model.forward(ids_T, positions_T, metadata, kv, embeds_TI=embeds, adapters=adapters)


def _end_with(process: int, *, is_parent: bool) -> None:
    """End this process when rank 0's has ended: it may be loading, or in a collective, and would not notice.

    The kernel's own signal would come at the end of the thread that started this process.
    """
    with selectors.DefaultSelector() as selector, contextlib.suppress(ProcessLookupError):
        selector.register(os.pidfd_open(process), selectors.EVENT_READ)
        if not is_parent or os.getppid() == process:
            selector.select()
    os._exit(0)


@contextlib.contextmanager
def _ignoring_signals() -> Iterator[None]:
    """Leave SIGINT and SIGTERM to rank 0: it drains at these and then ends this process."""
    if threading.current_thread() is not threading.main_thread():
        # Where a Generator is made beside it.
        yield
        return
    kept = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in kept:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def serve(connection: Connection, rank_0: int, *, is_parent: bool = False) -> int:
    """Run as the rank in rank 0's first message until rank 0 ends; return the exit code.

    `rank_0`: the number of its process; `is_parent`: it has started this one. Raises StartupError if rank 0 has another
    process in this one's place.
    """
    threading.Thread(
        target=_end_with, args=(rank_0,), kwargs={"is_parent": is_parent}, name="rank 0", daemon=True
    ).start()
    with _ignoring_signals():
        try:
            order = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return 0
        if REFUSED in order:
            raise StartupError(order[REFUSED], flag="RANK")
        configure_logging(
            f"generation rank {order['rank']}",
            log_format=order["log_format"],
            level=order["log_level"],
            debug=order["debug"],
            bounds=LineBounds(order["log_lines"], order["log_seconds"]),
        )
        return _work(connection, order)


def _work(connection: Connection, order: dict[str, Any]) -> int:
    """Load the part, and carry out messages until rank 0 leaves; return the exit code."""
    try:
        worker = Worker(order, connection.send_bytes)
        connection.send_bytes(READY)
        while True:
            worker.do(connection.recv_bytes())
    except StartupError as error:
        connection.send_bytes(json.dumps({"message": error.message, "flag": error.flag}).encode())
        return 1
    except (EOFError, ConnectionError):
        return 0
    except RuntimeError:
        # Only this ends a collective that rank 0 has left.
        if _has_left(connection):
            return 0
        raise


def _has_left(connection: Connection) -> bool:
    """True when rank 0 has closed its end, perhaps after messages that nobody will read."""
    try:
        while connection.poll(_LEAVE_SECONDS):
            connection.recv_bytes()
    except (EOFError, ConnectionError):
        return True
    return False


def main() -> int:
    """Run until rank 0 ends; return the exit code."""
    return serve(Connection(int(sys.argv[1])), os.getppid(), is_parent=True)


if __name__ == "__main__":
    sys.exit(main())
