"""A pass of transformers' modules as one graph of operators: with few rows most of its time is Python's between them.

torch's tracer records the operators of one pass, which later passes repeat. What the tracer cannot record must not
happen: numbers of a tensor that Python reads, and results with a size that depends on numbers. A pass is watched for
both first. Sizes may decide in Python, too. So a pass with another number of rows is recorded as well, and must have
the same operators: a number of rows that became a constant may give the same bits until positions are high. Then the
first graph pass with each number of rows runs beside the modules, and one with other bits is the last.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from penstock.common.logging import get_logger

_log = get_logger("penstock.generation")
# Passes with more rows spend little time in Python.
_MOST_ROWS = 64
# Modules run so often first: a model that answers a few times need not be traced.
_AFTER = 8
# A graph is made anew for another pool, so often at most.
_MOST_GRAPHS = 4
# Methods by which Python reads a tensor's numbers without an operator.
_READS = frozenset(("tolist", "numpy", "__array__", "__dlpack__", "data_ptr"))


Tensors = tuple[Tensor, ...]


class Unreadable(Sequence[int]):
    """Stand-in for numbers of a step on the host, which a graph would keep."""

    @override
    def __getitem__(self, index: Any) -> NoReturn:
        _read("a step's numbers on the host")

    @override
    def __len__(self) -> NoReturn:
        _read("a step's numbers on the host")


class PassGraph:
    """Graph of one computation on tensors with some rows, used where it gives the same bits. One thread's only."""

    def __init__(self, objects: Sequence[torch.ScriptObject] = ()) -> None:
        """`objects`: those of C++ that the computation calls."""
        self._objects = tuple(objects)
        self._graph: Callable[..., Tensors] | None = None
        # What beside the inputs a graph depends on.
        self._key: Hashable = None
        # Rows of the pass that was recorded, and its operators; None: a pass with another number of rows has the same.
        self._recorded: tuple[int, str] | None = None
        # Numbers of rows with which it gave the modules' bits.
        self._checked: set[int] = set()
        # Passes until a graph is made, and graphs that may still be made.
        self._passes_left = _AFTER
        self._graphs_left = _MOST_GRAPHS

    def __call__(
        self,
        key: Hashable,
        inputs: Tensors,
        by_modules: Callable[[], Tensors],
        compute: Callable[..., Tensors],
        changed: Tensors = (),
    ) -> Tensors:
        """Return the results for `inputs`, with the rows in the first dimension of the first one.

        `by_modules` gives them, and `compute(*inputs, *changed)` gives them from nothing else. `key`: see above.
        `changed`: inputs that the computation changes in place, as states of sequences. It must run once on them.
        """
        rows = inputs[0].shape[0]
        if not 0 < rows <= _MOST_ROWS:
            return by_modules()
        if self._graph is None or key != self._key:
            if self._graphs_left:
                self._passes_left -= 1
                if self._passes_left <= 0:
                    self._make(key, inputs, compute, changed)
            # After the graph is made: what the modules write stays.
            return by_modules()
        if rows in self._checked:
            return _run(self._graph, (*inputs, *changed))
        return self._checked_result(self._graph, rows, inputs, by_modules, compute, changed)

    def _make(self, key: Hashable, inputs: Tensors, compute: Callable[..., Tensors], changed: Tensors) -> None:
        self._graphs_left -= 1
        self._passes_left, self._key, self._checked = _AFTER, key, set()
        try:
            with _NoReads(), _FixedSizes():  # type: ignore[no-untyped-call]  # torch types neither
                compute(*inputs, *_copies(changed))
            self._graph, operators = _traced(compute, (*inputs, *_copies(changed)), self._objects)
            self._recorded = inputs[0].shape[0], operators
        except Exception as error:  # whatever modules raise where they find another kind of tensor
            self._give_up(error)

    def _checked_result(
        self,
        graph: Callable[..., Tensors],
        rows: int,
        inputs: Tensors,
        by_modules: Callable[[], Tensors],
        compute: Callable[..., Tensors],
        changed: Tensors,
    ) -> Tensors:
        try:
            if self._recorded is not None and rows not in (1, self._recorded[0]):
                graph = self._compared(self._recorded, graph, rows, (*inputs, *_copies(changed)), compute)
            found = _run(graph, (*inputs, *_copies(changed)))
        except Exception as error:  # of the modules, and of a torch without one of these functions
            self._give_up(error)
            return by_modules()
        result = by_modules()
        if all(_same_bits(*pair) for pair in zip(found, result, strict=True)):
            self._checked.add(rows)
        else:
            self._give_up(_NotFixed(f"other bits with {rows} rows"))
        return result

    def _compared(
        self,
        recorded: tuple[int, str],
        graph: Callable[..., Tensors],
        rows: int,
        inputs: Tensors,
        compute: Callable[..., Tensors],
    ) -> Callable[..., Tensors]:
        """Return the graph to go on with. Raises _NotFixed where other rows have other operators."""
        other, operators = _traced(compute, inputs, self._objects)
        if operators == recorded[1]:
            self._recorded = None
            return graph
        if recorded[0] > 1:
            raise _NotFixed(f"other operators with {rows} rows")
        # Python may leave out operators for one row, for which those of some rows may be as good.
        self._graph, self._recorded, self._checked = other, (rows, operators), set()
        return other

    def _give_up(self, error: Exception) -> None:
        self._graph, self._recorded, self._graphs_left = None, None, 0
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        _log.debug("the modules of this model run one by one: a pass is no graph", why=why)


def _traced(
    compute: Callable[..., Tensors], inputs: Tensors, objects: Sequence[torch.ScriptObject]
) -> tuple[Callable[..., Tensors], str]:
    """Return a function of the operators of `compute(*inputs)`, and their text without sizes of tensors. Weights are
    freed with the function: `torch.jit.trace` keeps every one for good."""
    unit: Any = torch._C.CompilationUnit()
    # The tracer knows objects as attributes of a module. The stub of its class is of another one.
    module = cast("Any", torch._C.ScriptModule)("Pass", unit, True)
    for number, one in enumerate(objects):
        module._register_attribute(f"object_{number}", one._type(), one)
    names = [f"input_{number}" for number in range(len(inputs))]
    with warnings.catch_warnings():
        # Of sizes that Python reads: the comparisons look at them.
        warnings.simplefilter("ignore")
        graph, _ = torch._C._create_graph_by_tracing(compute, inputs, lambda _: "", True, False, module, names)
    torch._C._jit_pass_erase_shape_information(graph)
    text: str = cast("Any", graph).str(False)
    return partial(unit.create_function("run", graph), module), text


def _run(graph: Callable[..., Tensors], inputs: Tensors) -> Tensors:
    # The optimiser would make a graph for each shape, and might take equal constants for one.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        return graph(*inputs)


def _copies(tensors: Tensors) -> Tensors:
    return tuple(one.clone() for one in tensors)


class _NotFixed(Exception):
    """Error for a pass that a graph cannot repeat."""


class _NoReads(TorchFunctionMode):
    """Raise _NotFixed where Python reads a tensor's numbers without an operator."""

    @override
    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            _read(func.__name__)
        return func(*args, **(kwargs or {}))


class _FixedSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Raise _NotFixed at operators that give Python a number, or a result with a size that numbers decide."""

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch would import its compiler to say so."""
        return False

    @override
    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._can_decompose():
            # Into what may read numbers.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if torch.Tag.data_dependent_output in func.tags:
            _read(str(func))
        if torch.Tag.dynamic_output_shape in func.tags and not _has_whole_indices(func, args):
            _read(str(func))
        return func(*args, **(kwargs or {}))


def _has_whole_indices(func: Any, args: tuple[Any, ...]) -> bool:
    """True for an index of whole numbers, which gives as many rows as it has itself."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _read(what: str) -> NoReturn:
    raise _NotFixed(what)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """True when both have the same numbers; NaN is NaN."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
