"""The model opened to callers: graphs, tensors at the server, named sequences and draws. Event loop only.

Computation runs on the engine's thread between two steps, one call at a time (see GraphTurns).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from penstock.common.dtypes import dtype_name
from penstock.common.errors import FailedPrecondition, InvalidArgument, PenstockError, ResourceExhausted, Unavailable
from penstock.generation.attention.fresh_memory import fresh_zeros
from penstock.generation.core.sampling_params import derive_seed
from penstock.generation.core.sequence import Sequence
from penstock.generation.graphs.graph import BATCH, GraphKind, Graphs, GraphWeights, ModelSizes
from penstock.generation.graphs.graph_commands import ForwardResult, OutputTarget
from penstock.generation.graphs.graph_runner import GRAPH_DTYPES, GraphCall, GraphRunner
from penstock.generation.graphs.leases import Lease, Leases
from penstock.generation.graphs.sequences import PoolSequence, SequenceBlocks
from penstock.generation.metrics import GraphFigures
from penstock.generation.models.decoder import CausalLM
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.options.resolve import resolve
from penstock.generation.options.table import OutputOptions
from penstock.generation.options.validate import check_model, validate, with_prompt

if TYPE_CHECKING:
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.engine import Engine
    from penstock.generation.engine.loop import EngineLoop
    from penstock.generation.graphs.graph import Graph, GraphTensor
    from penstock.generation.graphs.graph_commands import (
        ForwardCommand,
        InputTensor,
        SampleCommand,
        SampleRow,
        TensorRequest,
        TensorSlice,
    )
    from penstock.generation.graphs.graph_limits import GraphLimits
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.metrics import GraphMetrics
    from penstock.generation.options.request_limits import RequestLimits
    from penstock.generation.startup.loaded_model import LoadedModel

# Data of a message, so that it stays below the 4 MiB that clients receive by default.
MESSAGE_BYTES = 2 << 20
_BLOCKS = (GraphKind.BLOCK, GraphKind.BLOCK_CACHE)
# Inputs that a named sequence has no use for: its history is in the pool.
_NOT_OF_SEQUENCES = {2: "attention_mask", 3: "history_k", 4: "history_v"}
_MAX_NAME = 256
T = TypeVar("T")


class GraphTurns:
    """Gate before the engine's thread. After each call the engine makes a step, if it has work."""

    def __init__(
        self, share: float, wait_idle: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`share` of the engine's time is for graphs while there are requests; `wait_idle` returns when there are
        none."""
        self._wait_per_second = 1.0 / share - 1.0
        self._wait_idle = wait_idle
        self._clock = clock
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[float], None]]:
        """Wait for a turn, and hold it. Call the yielded function with the seconds that the engine's thread took."""
        async with self._turn:
            remaining = self._not_before - self._clock()
            if remaining > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(remaining):
                        await self._wait_idle()
            yield self._took

    def _took(self, seconds: float) -> None:
        self._not_before = self._clock() + seconds * self._wait_per_second


class ModelAccess:
    """One loaded model, opened. Everything that it holds belongs to a lease or a stream."""

    def __init__(
        self,
        loaded: LoadedModel,
        request_limits: RequestLimits,
        limits: GraphLimits,
        loop: EngineLoop,
        wait_idle: Callable[[], Awaitable[None]],
        metrics: GraphMetrics,
    ) -> None:
        """`wait_idle` returns when there are no requests. Named sequences have a pool of their own, or the pool's
        further blocks."""
        named, model = loaded.pools.named, loaded.weights.model
        kv = named or loaded.pools.kv
        first, count = (kv.num_blocks, kv.num_further_blocks) if named is None else (0, named.num_blocks)
        assert isinstance(model, CausalLM), "only a native model has graphs"
        self.limits = limits
        self.graphs = describe_graphs(model, limits)
        self._loaded = loaded
        self._request_limits = request_limits
        self._loop = loop
        self._metrics = metrics
        self._kv = kv
        self._blocks = SequenceBlocks(first, count, kv.block_size, loaded.served.max_context_tokens)
        self._runner = GraphRunner(model, kv, self._blocks, loaded.weights.device.sampling_kernels())
        self._turns = GraphTurns(limits.graph_share, wait_idle)
        self._leases = Leases(limits, self._release)
        self._num_streams = 0
        self._is_released = False

    @property
    def can_keep_tensors(self) -> bool:
        """True when tensors can stay at the server."""
        return self.limits.max_graph_tensors > 0 and self.limits.max_graph_tensor_bytes > 0

    def figures(self) -> GraphFigures:
        """Return the present state. Callable from any thread."""
        leases, blocks = self._leases, self._blocks
        return GraphFigures(
            self._num_streams,
            leases.num_leases,
            leases.num_expired,
            leases.num_tensors,
            leases.tensor_bytes,
            blocks.num_blocks,
            blocks.num_used,
        )

    @property
    def is_in_use(self) -> bool:
        """True while there is a stream or a lease: its results belong to these weights."""
        return bool(self._num_streams or self._leases.num_leases)

    def close(self) -> None:
        """End every lease."""
        self._leases.end_all()

    def release(self) -> None:
        """Drop the model after its engine has stopped: a stream that is open without a call would keep it in memory. No
        call gets here any more. Calling it again is harmless."""
        if self._is_released:
            return
        self._is_released = True
        del self._loaded, self._kv, self._runner, self._loop, self._turns

    @contextmanager
    def stream(self) -> Iterator[GraphStream]:
        """Open a stream of calls; its tensors and sequences end with it. Raises ResourceExhausted GRAPH_QUOTA."""
        most = self.limits.max_graph_streams
        if self._num_streams >= most:
            raise ResourceExhausted(
                f"there are as many Forward streams as the {most} that --max-graph-streams allows",
                reason="GRAPH_QUOTA",
                retry_after_seconds=self.limits.retry_seconds,
            )
        # Named sequences write behind the blocks of requests.
        self._kv.leave_small_pages()
        self._num_streams += 1
        stream = GraphStream(self, self._leases)
        try:
            yield stream
        finally:
            self._num_streams -= 1
            stream.end()

    def allocate(
        self, model: str, lease_id: str, seconds: float | None, tensors: list[TensorRequest]
    ) -> tuple[Lease, list[int]]:
        """Make tensors of zeros in a lease, a new one for an empty id; return it and their handles.

        Raises NotFound, InvalidArgument naming `tensors[i]`, FailedPrecondition NO_GRAPH_TENSORS, and ResourceExhausted
        GRAPH_QUOTA.
        """
        self._check(model)
        if tensors and not self.can_keep_tensors:
            raise _no_tensors()
        if len(tensors) > self.limits.max_graph_tensors:
            raise InvalidArgument("tensors", f"must have at most {self.limits.max_graph_tensors} entries")
        sizes = [_size(one.dtype, one.shape, f"tensors[{index}]") for index, one in enumerate(tensors)]
        lease = self._leases.find(lease_id) if lease_id else self._leases.open(seconds)
        if lease_id and seconds is not None:
            self._leases.change(lease, seconds)
        try:
            return lease, self._leases.add(
                lease, sizes, lambda index: _zeros(tensors[index], self._loaded.weights.model.device)
            )
        except PenstockError:
            if not lease_id:
                self._leases.end(lease)
            raise

    def read(self, model: str, lease_id: str, wanted: TensorSlice) -> tuple[Tensor, memoryview, int]:
        """Return a tensor, the bytes of a run of its elements, and their number: as many as fit a message.

        Raises NotFound and InvalidArgument.
        """
        self._check(model)
        tensor = self._leases.find(lease_id).tensor(wanted.handle, "handle")
        part = _run(tensor, wanted, "")[: MESSAGE_BYTES // tensor.itemsize]
        return tensor, _bytes(part), part.numel()

    async def write(
        self, model: str, lease_id: str, handle: int, offset: int, data: bytes | None, source: TensorSlice | None
    ) -> None:
        """Write elements from `offset` on: bytes, or elements of another tensor. Raises NotFound and
        InvalidArgument."""
        self._check(model)
        lease = self._leases.find(lease_id)
        tensor = lease.tensor(handle, "handle")
        if source is not None:
            elements = _run(lease.tensor(source.handle, "slice.handle"), source, "slice.")
            if elements.dtype is not tensor.dtype:
                raise InvalidArgument("slice.handle", f"must be of a tensor of {dtype_name(tensor.dtype)}")
        elif not data or len(data) % tensor.itemsize:
            raise InvalidArgument("data", f"must hold whole elements of {tensor.itemsize} bytes, at least one")
        else:
            elements = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
        if offset + elements.numel() > tensor.numel():
            raise InvalidArgument("offset", f"the tensor has {tensor.numel()} elements")
        target = tensor.view(-1)[offset : offset + elements.numel()]
        if elements.nbytes > MESSAGE_BYTES:
            await asyncio.to_thread(_copy, elements, target)
        else:
            _copy(elements, target)

    def free(
        self, model: str, lease_id: str, handles: list[int], sequences: list[str], *, everything: bool
    ) -> tuple[int, int]:
        """Free tensors and sequences, or a whole lease; return their numbers. Raises NotFound LEASE_NOT_FOUND."""
        self._check(model)
        lease = self._leases.find(lease_id)
        if everything:
            return self._leases.end(lease)
        return self._leases.free(lease, handles), self._leases.end_sequences(lease, sequences)

    async def forward(self, command: ForwardCommand, lease: Lease) -> list[ForwardResult]:
        """Run a call; return the requested outputs. Raises NotFound, InvalidArgument, ResourceExhausted."""
        self._check(command.model)
        graph = self.graphs.named(command.graph)
        inputs = self._inputs(graph, command.inputs, lease)
        if command.sequence or command.start is not None:
            _check_sequence(graph, command, inputs)
        sizes = graph.bind({index: tuple(one.shape) for index, one in inputs.items()}, command.stage)
        if command.sequence and sizes[BATCH] != 1:
            raise InvalidArgument("inputs[0].shape", "must have a batch of 1 with a sequence")
        call = GraphCall(graph, sizes, inputs, start=command.start)
        wanted = command.outputs or [OutputTarget(index) for index in range(len(graph.outputs))]
        kept = self._targets(graph, wanted, call, lease)
        try:
            if command.sequence:
                call.sequence = self._sequence(lease, command.sequence)
            found = await self._run(graph.kind, call)
        except BaseException:
            self._leases.free(lease, kept.values())
            if command.sequence and call.sequence is not None and not call.sequence.blocks:
                # It has never got one.
                self._leases.end_sequences(lease, [command.sequence])
            raise
        return [
            ForwardResult(
                one.index,
                graph.outputs[one.index].dtype,
                graph.outputs[one.index].shape(sizes),
                memoryview(b"") if one.index in call.targets else _bytes(found[one.index]),
                kept.get(one.index, one.handle),
            )
            for one in wanted
        ]

    async def sample(self, command: SampleCommand) -> list[SampledToken]:
        """Draw a token for each row, as Generate does. Raises NotFound and InvalidArgument."""
        vocab = self._loaded.served.vocab_size
        self._check(command.model)
        most = self._request_limits.max_return_sequences
        if not 1 <= len(command.rows) <= most:
            raise InvalidArgument("rows", f"must have 1 to {most} entries")
        logits = self._logits(command, len(command.rows), vocab)
        sequences = [self._drawn_sequence(command, row, number) for number, row in enumerate(command.rows)]
        with self._metrics.call("sample"):
            drawn, _ = await self._in_turn(lambda: self._runner.sample(logits, sequences))
        return drawn

    def _check(self, model: str) -> None:
        if self._is_released:
            raise gone()
        check_model(model, self._loaded.served.name)

    def _inputs(self, graph: Graph, given: Iterable[InputTensor], lease: Lease) -> dict[int, Tensor]:
        inputs: dict[int, Tensor] = {}
        for one in given:
            wanted = graph.input(one.index, "inputs.index")
            if one.index in inputs:
                raise InvalidArgument(f"inputs[{one.index}]", "is there twice")
            inputs[one.index] = self._input(one, wanted, lease)
        return inputs

    def _input(self, one: InputTensor, wanted: GraphTensor, lease: Lease) -> Tensor:
        field = f"inputs[{one.index}]"
        if one.handle:
            tensor: Tensor = lease.tensor(one.handle, f"{field}.handle")
            if one.dtype not in ("", dtype_name(tensor.dtype)) or dtype_name(tensor.dtype) != wanted.dtype:
                raise InvalidArgument(f"{field}.dtype", f"must be {wanted.dtype}")
            if one.shape and (min(one.shape) < 0 or math.prod(one.shape) != tensor.numel()):
                raise InvalidArgument(f"{field}.shape", f"must be of the tensor's {tensor.numel()} elements")
            return tensor.view(one.shape) if one.shape else tensor
        if one.dtype != wanted.dtype:
            raise InvalidArgument(f"{field}.dtype", f"must be {wanted.dtype}")
        size = _size(one.dtype, one.shape, field)
        if len(one.data) != size:
            raise InvalidArgument(f"{field}.data", f"must be the {size} bytes of its shape")
        return (
            torch.frombuffer(one.data, dtype=GRAPH_DTYPES[one.dtype])
            .view(one.shape)
            .to(self._loaded.weights.model.device)
        )

    def _targets(self, graph: Graph, wanted: list[OutputTarget], call: GraphCall, lease: Lease) -> dict[int, int]:
        """Set the call's targets; return the handles of new tensors, by output."""
        returned, kept = 0, []
        for index in [one.index for one in wanted]:
            graph.output(index, "outputs.index")
            if [one.index for one in wanted].count(index) > 1:
                raise InvalidArgument(f"outputs[{index}]", "is there twice")
        for one in wanted:
            output, field = graph.outputs[one.index], f"outputs[{one.index}]"
            shape = output.shape(call.sizes)
            if one.handle:
                tensor = lease.tensor(one.handle, f"{field}.handle")
                if dtype_name(tensor.dtype) != output.dtype or tensor.numel() != math.prod(shape):
                    raise InvalidArgument(
                        f"{field}.handle", f"must be of a tensor of {output.dtype} like {list(shape)}"
                    )
                call.targets[one.index] = tensor
            elif one.keep:
                kept.append((one.index, output.dtype, shape))
            else:
                returned += _size(output.dtype, shape, field)
        if returned > self.limits.max_graph_call_bytes:
            raise InvalidArgument("outputs", f"must be at most {self.limits.max_graph_call_bytes} bytes in messages")
        if not kept:
            return {}
        if not self.can_keep_tensors:
            raise _no_tensors()
        sizes = [_size(dtype, shape, "outputs") for _, dtype, shape in kept]
        device = self._loaded.weights.model.device
        handles = self._leases.add(
            lease, sizes, lambda number: fresh_zeros(kept[number][2], GRAPH_DTYPES[kept[number][1]], device)
        )
        for (index, _, _), handle in zip(kept, handles, strict=True):
            call.targets[index] = lease.tensors[handle]
        return {index: handle for (index, _, _), handle in zip(kept, handles, strict=True)}

    def _sequence(self, lease: Lease, name: str) -> PoolSequence:
        if name not in lease.sequences:
            lease.sequences[name] = PoolSequence([0] * self._loaded.weights.model.config.num_layers)
        return lease.sequences[name]

    async def _run(self, kind: GraphKind, call: GraphCall) -> dict[int, Tensor]:
        with self._metrics.call(kind.value):
            outputs, seconds = await self._in_turn(lambda: self._runner.run(call))
        self._metrics.took(seconds)
        return outputs

    async def _in_turn(self, call: Callable[[], T]) -> tuple[T, float]:
        """Run `call` on the engine's thread in a turn; return the seconds that it took there, too.

        A turn lasts as long as the call. All of its time counts, even if the call fails or the caller leaves: callers
        that leave would otherwise get more of the engine than their share.
        """
        spent = 0.0

        def timed(_: Engine) -> T:
            nonlocal spent
            begin = time.monotonic()
            try:
                return call()
            finally:
                spent = time.monotonic() - begin

        async with self._turns.turn() as took:
            if self._is_released:
                # It waited for its turn meanwhile.
                raise gone()
            future = self._loop.run_on_engine(timed)
            running = asyncio.wrap_future(future)
            # The caller may be gone before it fails.
            running.add_done_callback(lambda one: one.cancelled() or one.exception())
            try:
                return await asyncio.shield(running), spent
            except asyncio.CancelledError:
                if not future.cancel():
                    await asyncio.wait({running})
                raise
            finally:
                took(spent)

    def _release(self, sequences: list[PoolSequence]) -> None:
        """Release blocks on the engine's thread: a call that runs there may still write into them."""

        def release() -> None:
            for sequence in sequences:
                self._blocks.release(sequence)

        if self._is_released:
            return
        self._loop.run_on_engine(lambda _: release())

    def _logits(self, command: SampleCommand, rows: int, vocab: int) -> Tensor:
        if command.logits is not None:
            given = command.logits
            if given.dtype != "float32" or given.shape != (rows, vocab):
                raise InvalidArgument("logits", f"must be float32 of the shape [{rows}, {vocab}]")
            if len(given.data) != _size(given.dtype, given.shape, "logits"):
                raise InvalidArgument("logits", "must have the bytes of its shape")
            return torch.frombuffer(bytearray(given.data), dtype=torch.float32).view(rows, vocab)
        if not command.handle:
            raise InvalidArgument("logits", "must be set, or handle")
        tensor: Tensor = self._leases.find(command.lease_id).tensor(command.handle, "handle")
        if tensor.dtype is not torch.float32 or tensor.numel() != rows * vocab:
            raise InvalidArgument("handle", f"must be of a tensor of float32 like [{rows}, {vocab}]")
        return tensor.view(rows, vocab)

    def _drawn_sequence(self, command: SampleCommand, row: SampleRow, number: int) -> Sequence:
        """Return the sequence that a row is drawn for."""
        loaded = self._loaded
        options = GenerateOptions(
            prompt_token_ids=row.prompt,
            resumed_token_ids=[row.output] if row.output else [],
            options=command.options,
            stop=command.stop,
            output=OutputOptions(top_logprobs=command.top_logprobs),
            seed=row.seed,
        )
        options = with_prompt(options, loaded.files.defaults, loaded.served)
        validate(options, loaded.served, self._request_limits)
        params = resolve(options, loaded.files.defaults, loaded.served, self._request_limits).params
        _check_plain(params)
        params = replace(params, plugins=loaded.files.plugins.make(command.options))
        prompt = options.prompt_token_ids
        # No sequence of the engine has a negative id; the sampler of this call alone keeps its state.
        seed = derive_seed(params.seed, 0)
        return Sequence(-1 - number, 0, params, seed, [*prompt, *row.output], len(prompt))


class GraphStream:
    """Calls of one stream, one after the other, and everything that it holds."""

    def __init__(self, access: ModelAccess, leases: Leases) -> None:
        self._access = access
        self._leases = leases
        self._own = Lease()
        self._held: dict[str, Lease] = {}

    async def forward(self, command: ForwardCommand) -> list[ForwardResult]:
        """Run a call. Raises the errors of ModelAccess.forward."""
        return await self._access.forward(command, self._lease(command.lease_id))

    def _lease(self, lease_id: str) -> Lease:
        if not lease_id:
            return self._own
        lease = self._leases.find(lease_id)
        if lease_id not in self._held:
            self._held[lease_id] = lease
            self._leases.hold(lease)
        return lease

    def end(self) -> None:
        """Free everything that the stream holds, and release its leases."""
        self._leases.end(self._own)
        for lease in self._held.values():
            self._leases.let_go(lease)
        self._held.clear()


def gone() -> Unavailable:
    """Make the error of a call when its model was unloaded since its stream began."""
    return Unavailable("the model of this stream was unloaded: open another stream", reason="NO_MODEL")


def describe_graphs(model: CausalLM, limits: GraphLimits) -> Graphs:
    """Return the graphs of a model."""
    config, dtype = model.config, dtype_name(model.dtype)
    sizes = ModelSizes(
        config.num_layers, config.hidden_size, config.num_kv_heads, config.head_dim, config.vocab_size, dtype
    )
    layers = [_weights(layer.quantisable, dtype) for layer in model.layers]
    return Graphs(
        sizes, limits.stages, embedding=GraphWeights(dtype), layers=layers, head=_weights((model.head,), dtype)
    )


def _weights(linears: tuple[Linear, ...], dtype: str) -> GraphWeights:
    quantised = [linear for linear in linears if linear.quantised_as]
    if not quantised:
        return GraphWeights(dtype)
    return GraphWeights(quantised[0].quantised_as, sum(linear.mean_scale for linear in quantised) / len(quantised))


def _check_sequence(graph: Graph, command: ForwardCommand, inputs: dict[int, Tensor]) -> None:
    if not command.sequence:
        raise InvalidArgument("start", "must be unset without a sequence")
    if graph.kind not in _BLOCKS:
        raise InvalidArgument("sequence", "must be empty for a graph without keys and values")
    if len(command.sequence) > _MAX_NAME:
        raise InvalidArgument("sequence", f"must be at most {_MAX_NAME} characters long")
    for index, name in _NOT_OF_SEQUENCES.items():
        if index in inputs:
            raise InvalidArgument(f"inputs[{index}]", f"must be left out with a sequence: {name} is the server's")


def _check_plain(params: SamplingParams) -> None:
    """Refuse modes in which a row alone does not determine the draw."""
    mode = params.mode
    needs_more = not mode.streams or mode.keeps_hidden_states or bool(mode.early_exits)
    if needs_more or params.guidance.is_on or params.token_healing:
        raise InvalidArgument("config", "must ask for greedy search or sampling, without guidance and token healing")
    if params.num_return_sequences != 1:
        raise InvalidArgument("config.num_return_sequences", "must be 1: send a row for each")


def _no_tensors() -> FailedPrecondition:
    return FailedPrecondition(
        "no tensors stay at this server: raise --max-graph-tensors and --max-graph-tensor-bytes",
        reason="NO_GRAPH_TENSORS",
    )


def _size(dtype: str, shape: tuple[int, ...], field: str) -> int:
    """Return the bytes of a tensor. Raises InvalidArgument."""
    if dtype not in GRAPH_DTYPES:
        raise InvalidArgument(f"{field}.dtype", f"must be one of {', '.join(GRAPH_DTYPES)}")
    if not shape or min(shape) < 1:
        raise InvalidArgument(f"{field}.shape", "must have one size at least, and sizes of 1 or more")
    return math.prod(shape) * GRAPH_DTYPES[dtype].itemsize


def _zeros(wanted: TensorRequest, device: torch.device) -> Tensor:
    return fresh_zeros(wanted.shape, GRAPH_DTYPES[wanted.dtype], device)


def _run(tensor: Tensor, wanted: TensorSlice, prefix: str) -> Tensor:
    """Return the elements of a slice. Raises InvalidArgument."""
    total = tensor.numel()
    if wanted.offset >= total:
        raise InvalidArgument(f"{prefix}offset", f"must be below the tensor's {total} elements")
    count = total - wanted.offset if wanted.count is None else wanted.count
    if not 1 <= count <= total - wanted.offset:
        raise InvalidArgument(f"{prefix}count", f"must be at least 1, and end within the tensor's {total} elements")
    return tensor.view(-1)[wanted.offset : wanted.offset + count]


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy elements. Source and target may be overlapping parts of one tensor."""
    target.copy_(source.clone())


def _bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, row-major; a copy, which nobody writes into."""
    flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().tobytes())
