"""Graphs that make up a model: their names, tensors and shapes. Plain data: no torch.

The graphs, and the tensors' places in them, are those of Sophon SAIL's EngineLLM.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.common.errors import InvalidArgument, NotFound

BATCH, LENGTH, ROWS = "batch", "length", "rows"
# A size, or a sum of sizes that a call chooses.
Size: TypeAlias = "int | tuple[str, ...]"
Shape: TypeAlias = "tuple[int, ...]"
# Tokens that sample_head returns of each row, as the published graphs do.
SAMPLE_CANDIDATES = 50
FLOAT, ID = "float32", "int32"


class GraphKind(enum.Enum):
    """Kind of a graph; there is one of each, or one for each layer."""

    EMBEDDING = "embedding"
    EMBEDDING_CACHE = "embedding_cache"
    BLOCK = "block"
    BLOCK_CACHE = "block_cache"
    LM_HEAD = "lm_head"
    GREEDY_HEAD = "greedy_head"
    SAMPLE_HEAD = "sample_head"


@dataclass(frozen=True, slots=True)
class GraphStage:
    """A bucket of shapes: sequences at once, and tokens of each."""

    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a graph."""

    name: str
    index: int
    dtype: str
    sizes: tuple[Size, ...]
    is_optional: bool = False

    def shape(self, sizes: dict[str, int]) -> Shape:
        """Return the shape for the sizes of a call, by BATCH, LENGTH and ROWS."""
        return tuple(size if isinstance(size, int) else sum(sizes[name] for name in size) for size in self.sizes)

    def describe(self, most: dict[str, int]) -> str:
        """Describe the possible shapes, for an error: `[batch <= 4, 1, 64]`."""

        def one(size: Size) -> str:
            return str(size) if isinstance(size, int) else f"{' + '.join(size)} <= {sum(most[name] for name in size)}"

        return f"[{', '.join(map(one, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class GraphWeights:
    """Number format of a graph's weights, and the mean of their scales; empty and 1 without weights."""

    format: str = ""
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph. A call's sizes are bounded by those of the largest stage."""

    name: str
    kind: GraphKind
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    stages: tuple[GraphStage, ...]
    weights: GraphWeights = GraphWeights()
    # Of block_i and block_cache_i.
    layer: int = -1

    @property
    def most(self) -> dict[str, int]:
        """Largest sizes of a call."""
        return self.sizes(max(one.batch for one in self.stages), max(one.length for one in self.stages), is_most=True)

    def sizes(self, batch: int, length: int, *, is_most: bool = False) -> dict[str, int]:
        """Sizes of a stage. It has one row after a history; a call may have more."""
        return {BATCH: batch, LENGTH: length, ROWS: length if is_most else 1}

    def stage_shapes(self, tensor: GraphTensor) -> tuple[Shape, ...]:
        """Return the shape of a tensor in each stage."""
        return tuple(tensor.shape(self.sizes(one.batch, one.length)) for one in self.stages)

    def min_shape(self, tensor: GraphTensor) -> Shape:
        """Return the smallest shape of a tensor."""
        return tensor.shape(self.sizes(1, 1))

    def max_shape(self, tensor: GraphTensor) -> Shape:
        """Return the largest shape of a tensor, in each dimension."""
        return tensor.shape(self.most)

    def input(self, index: int, field: str) -> GraphTensor:
        """Return an input. Raises InvalidArgument naming `field`."""
        return _at(self.inputs, index, field)

    def output(self, index: int, field: str) -> GraphTensor:
        """Return an output. Raises InvalidArgument naming `field`."""
        return _at(self.outputs, index, field)

    def bind(self, shapes: dict[int, Shape], stage: int | None) -> dict[str, int]:
        """Return the sizes of a call from the shapes of its inputs, by index.

        Raises InvalidArgument for a shape out of bounds, contradicting shapes, a missing input, and shapes other than
        those of `stage`.
        """
        for tensor in self.inputs:
            if tensor.index not in shapes and not tensor.is_optional:
                raise InvalidArgument("inputs", f"must have one of index {tensor.index}, {tensor.name}")
        sizes: dict[str, int] = {}
        sums: list[tuple[GraphTensor, tuple[str, ...], int]] = []
        for index, shape in shapes.items():
            tensor = self.inputs[index]
            if len(shape) != len(tensor.sizes):
                raise self._wrong(tensor)
            for size, found in zip(tensor.sizes, shape, strict=True):
                if isinstance(size, int):
                    if size != found:
                        raise self._wrong(tensor)
                elif len(size) > 1:
                    sums.append((tensor, size, found))
                elif sizes.setdefault(size[0], found) != found or not 1 <= found <= self.most[size[0]]:
                    raise self._wrong(tensor)
        for tensor, names, found in sums:
            # Without a history there are only the rows.
            if sum(sizes.get(name, 0) for name in names) != found:
                raise self._wrong(tensor)
        if stage is not None:
            self._check_stage(stage, sizes)
        return sizes

    def _check_stage(self, stage: int, sizes: dict[str, int]) -> None:
        if stage >= len(self.stages):
            raise InvalidArgument("stage", f"must be below {len(self.stages)}")
        wanted = self.sizes(self.stages[stage].batch, self.stages[stage].length)
        if any(wanted[name] != size for name, size in sizes.items()):
            shapes = ", ".join(f"{one.name} {list(one.shape(wanted))}" for one in self.inputs)
            raise InvalidArgument("stage", f"has other shapes: {shapes}")

    def _wrong(self, tensor: GraphTensor) -> InvalidArgument:
        return InvalidArgument(
            f"inputs[{tensor.index}].shape",
            f"must be {tensor.describe(self.most)}, with the same sizes in all inputs",
        )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model in its graphs."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str


class Graphs:
    """All graphs of one model, in the order of their list."""

    def __init__(
        self,
        sizes: ModelSizes,
        stages: Sequence[GraphStage],
        *,
        embedding: GraphWeights,
        layers: Sequence[GraphWeights],
        head: GraphWeights,
    ) -> None:
        """Make them; `layers` has the weights of each layer."""
        own = tuple(stages)
        found = [
            _embedding(kind, tokens, sizes, own, embedding)
            for kind, tokens in ((GraphKind.EMBEDDING, LENGTH), (GraphKind.EMBEDDING_CACHE, ROWS))
        ]
        found += [_block(layer, sizes, own, weights) for layer, weights in enumerate(layers)]
        found += [_block_cache(layer, sizes, own, weights) for layer, weights in enumerate(layers)]
        found += _heads(sizes, own, head)
        self.every = tuple(found)
        self._by_name = {graph.name: graph for graph in found}

    def named(self, name: str) -> Graph:
        """Return a graph. Raises NotFound GRAPH_NOT_FOUND."""
        graph = self._by_name.get(name)
        if graph is None:
            raise NotFound("graph: the model has no graph of this name", reason="GRAPH_NOT_FOUND", field="graph")
        return graph


def _embedding(
    kind: GraphKind, tokens: str, sizes: ModelSizes, stages: tuple[GraphStage, ...], weights: GraphWeights
) -> Graph:
    return Graph(
        kind.value,
        kind,
        (GraphTensor("input_ids", 0, ID, ((BATCH,), (tokens,))),),
        (GraphTensor("hidden_states", 0, sizes.dtype, ((BATCH,), (tokens,), sizes.hidden_size)),),
        stages,
        weights,
    )


def _block(layer: int, sizes: ModelSizes, stages: tuple[GraphStage, ...], weights: GraphWeights) -> Graph:
    dtype, batch, length = sizes.dtype, (BATCH,), (LENGTH,)
    hidden = GraphTensor("hidden_states", 0, dtype, (batch, length, sizes.hidden_size))
    kept = (batch, length, sizes.num_kv_heads, sizes.head_dim)
    return Graph(
        f"block_{layer}",
        GraphKind.BLOCK,
        (
            hidden,
            GraphTensor("position_ids", 1, ID, (batch, length), is_optional=True),
            GraphTensor("attention_mask", 2, dtype, (batch, 1, length, length), is_optional=True),
        ),
        (hidden, GraphTensor("past_k", 1, dtype, kept), GraphTensor("past_v", 2, dtype, kept)),
        stages,
        weights,
        layer,
    )


def _block_cache(layer: int, sizes: ModelSizes, stages: tuple[GraphStage, ...], weights: GraphWeights) -> Graph:
    dtype, batch, length, rows = sizes.dtype, (BATCH,), (LENGTH,), (ROWS,)
    hidden = GraphTensor("hidden_states", 0, dtype, (batch, rows, sizes.hidden_size))
    heads = (sizes.num_kv_heads, sizes.head_dim)
    return Graph(
        f"block_cache_{layer}",
        GraphKind.BLOCK_CACHE,
        (
            hidden,
            GraphTensor("position_ids", 1, ID, (batch, rows), is_optional=True),
            GraphTensor("attention_mask", 2, dtype, (batch, 1, rows, (LENGTH, ROWS)), is_optional=True),
            GraphTensor("history_k", 3, dtype, (batch, length, *heads), is_optional=True),
            GraphTensor("history_v", 4, dtype, (batch, length, *heads), is_optional=True),
        ),
        (
            hidden,
            GraphTensor("present_k", 1, dtype, (batch, rows, *heads)),
            GraphTensor("present_v", 2, dtype, (batch, rows, *heads)),
        ),
        stages,
        weights,
        layer,
    )


def _heads(sizes: ModelSizes, stages: tuple[GraphStage, ...], weights: GraphWeights) -> list[Graph]:
    batch = (BATCH,)
    hidden = GraphTensor("hidden_states", 0, sizes.dtype, (batch, sizes.hidden_size))
    logits = GraphTensor("logits", 0, FLOAT, (batch, sizes.vocab_size))
    candidates = (batch, min(SAMPLE_CANDIDATES, sizes.vocab_size))
    greedy = GraphTensor("token", 0, ID, (batch, 1))
    inputs = (
        logits,
        GraphTensor("input_ids", 1, ID, (batch, (LENGTH,)), is_optional=True),
        GraphTensor("top_p", 2, FLOAT, (batch,), is_optional=True),
        GraphTensor("temperature", 3, FLOAT, (batch,), is_optional=True),
        GraphTensor("penalty", 4, FLOAT, (batch,), is_optional=True),
    )
    outputs = (GraphTensor("probs", 0, FLOAT, candidates), GraphTensor("token", 1, ID, candidates))
    return [
        Graph("lm_head", GraphKind.LM_HEAD, (hidden,), (logits,), stages, weights),
        Graph("greedy_head", GraphKind.GREEDY_HEAD, (logits,), (greedy,), stages),
        Graph("sample_head", GraphKind.SAMPLE_HEAD, inputs, outputs, stages),
    ]


def _at(tensors: tuple[GraphTensor, ...], index: int, field: str) -> GraphTensor:
    if index >= len(tensors):
        raise InvalidArgument(field, f"must be below {len(tensors)}")
    return tensors[index]
