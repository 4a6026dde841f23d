"""SAIL's EngineLLM over a generation service: its model as graphs."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.v1 import common_pb2, graphs_pb2, model_pb2

from penstock_client._config_values import set_option
from penstock_client._exceptions import FailedPrecondition, NotFound, Unavailable
from penstock_client._load_model import load_requests, naming_path
from penstock_client._option_table import CONFIG
from penstock_client._state import logprob_entry
from penstock_client._sync import Client
from penstock_client._types import LogprobEntry
from penstock_client._wrong_values import WrongType, expected, naming, unknown
from penstock_client._wrong_values import found as found_of
from penstock_client.compat.sail.archive import archive_of, archive_requests
from penstock_client.compat.sail.graph_calls import GraphCalls, Input, model_info
from penstock_client.compat.sail.graph_values import BmrtFlag, Dtype, from_bytes, initial, read_into, stored
from penstock_client.compat.sail.server_tensor import ServerTensor
from penstock_client.compat.sail.tensor import Handle, Tensor
from penstock_client.config import ClientConfig

DEFAULT_ADDRESS = "127.0.0.1:50052"
# host:port, or a name that gRPC resolves; anything else is a path.
_ADDRESS = re.compile(r"(dns|ipv4|ipv6|unix):.+|\[[0-9a-fA-F:.]+\]:\d+|[\w.-]+:\d+")


class EngineLLM:
    """The graphs of one served model: `embedding`, `block_i`, `block_cache_i`, `lm_head`, `greedy_head`, `sample_head`.

    It makes Tensors, which are here, and ServerTensors, which stay at the service, and takes numpy arrays as well.
    Errors are PenstockErrors. Close it, or use it as a context manager: what it has at the service ends then.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        *arguments: Any,
        address: str | None = None,
        backend: str | None = None,
        name: str = "",
        config: ClientConfig | None = None,
    ) -> None:
        """`EngineLLM(address, device_ids)`: the model of a running generation service, or of a router's `backend`.

        `EngineLLM(path, device_ids)` and `EngineLLM(path, flags, device_ids)`: a model's folder, a GGUF file, or a tar
        archive of a folder (see `archive`); `EngineLLM(data, size, device_ids)`: the bytes of such a file. Without an
        `address` the model runs in this process, as many of them as there is memory for; the package penstock must be
        installed. With one, the service there loads it, which must have no model: a path is then below its
        `--model-root`, a tar archive of this machine is sent, and the model goes when the engine is closed.

        `name` is the served model's, where that matters: what is loaded gets it. Raises TypeError for other arguments,
        ValueError for a device that the model is not on, PenstockError.
        """
        model = model if isinstance(model, bytes) else os.fspath(model)
        self.flags, wanted = _arguments(model, arguments)
        place = model if isinstance(model, str) and _ADDRESS.fullmatch(model) is not None else None
        is_address = place is not None
        if is_address and address is not None:
            raise TypeError("address: the model is given as one")
        # The model's service in this process; None: it is elsewhere.
        self._own: Any = None
        if not is_address and address is None and backend is None:
            self._own = _own_service(model if isinstance(model, str) else model[: arguments[0]])
            # Also at the interpreter's end, and where nobody closed it.
            weakref.finalize(self, self._own.close)
        target: str = self._own.address if self._own else place or address or DEFAULT_ADDRESS
        self._calls = GraphCalls(target, config or ClientConfig(), backend)
        self._name = name
        self._lease_id = ""
        self._allocated: dict[tuple[str, int, bool], dict[int, ServerTensor]] = {}
        # True: this engine has loaded the model.
        self._owns_model = False
        try:
            if not is_address and self._own is None:
                data = _sent_bytes(model) if isinstance(model, str) else model[: arguments[0]]
                requests = (
                    archive_requests(data, name) if data is not None else load_requests(None, str(model), name, None)
                )
                with Client(target, config) as client, naming_path():
                    client._load(requests, None, backend or "", None)
                self._owns_model = True
            self._graphs = self._read_graphs()
            self._check_devices(wanted)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free everything at the service that is this engine's, and hang up. Calling it again is harmless.

        A model that it has loaded is unloaded, unless requests of others run.
        """
        try:
            if self._lease_id:
                lease, self._lease_id = self._lease_id, ""
                self._end("FreeTensors", graphs_pb2.FreeTensorsRequest(lease_id=lease, all=True))
            if self._owns_model:
                self._owns_model = False
                self._calls.end_stream()
                self._end("UnloadModel", model_pb2.UnloadModelRequest())
        finally:
            self._calls.close()
            own, self._own = self._own, None
            if own is not None:
                own.close()

    @staticmethod
    def archive(folder: str | os.PathLike[str]) -> bytes:
        """Return the files of a model's folder as the bytes that `EngineLLM(data, size, device_ids)` takes.

        Raises OSError for a file that is missing.
        """
        return archive_of(Path(folder))

    # Graphs.

    def get_device_ids(self) -> list[int]:
        """Devices that the model is on."""
        return sorted({device for graph in self._graphs.values() for device in graph.device_ids})

    def get_graph_names(self) -> list[str]:
        """Names of all graphs, as they are listed."""
        return list(self._graphs)

    def get_addr_mode(self, graph_name: str) -> int:
        """1: `get_input_tensors` and `get_output_tensors` have tensors at the service; 0: the service keeps none."""
        return self._graph(graph_name).addr_mode

    def get_stage_num(self, graph_name: str) -> int:
        """Number of stages: buckets of sequence length and batch."""
        return len(self._graph(graph_name).stages)

    def get_input_num(self, graph_name: str) -> int:
        """Number of inputs, optional ones too."""
        return len(self._graph(graph_name).inputs)

    def get_output_num(self, graph_name: str) -> int:
        """Number of outputs."""
        return len(self._graph(graph_name).outputs)

    def get_is_dynamic(self, graph_name: str) -> bool:
        """True when shapes between the smallest and the largest one are taken, too."""
        return self._graph(graph_name).is_dynamic

    # Inputs and outputs.

    def get_input_name(self, graph_name: str, index: int) -> str:
        """Name of an input."""
        return self._input(graph_name, index).name

    def get_output_name(self, graph_name: str, index: int) -> str:
        """Name of an output."""
        return self._output(graph_name, index).name

    def get_input_names(self, graph_name: str) -> list[str]:
        """Names of all inputs."""
        return [one.name for one in self._graph(graph_name).inputs]

    def get_output_names(self, graph_name: str) -> list[str]:
        """Names of all outputs."""
        return [one.name for one in self._graph(graph_name).outputs]

    def get_input_tensor_devid(self, graph_name: str, index: int) -> int:
        """Device of an input."""
        return self._input(graph_name, index).device_id

    def get_output_tensor_devid(self, graph_name: str, index: int) -> int:
        """Device of an output."""
        return self._output(graph_name, index).device_id

    def get_input_shape(self, graph_name: str, index: int, stage: int = 0) -> list[int]:
        """Shape of an input in a stage."""
        return _shape(self._input(graph_name, index), stage)

    def get_output_shape(self, graph_name: str, index: int, stage: int = 0) -> list[int]:
        """Shape of an output in a stage."""
        return _shape(self._output(graph_name, index), stage)

    def get_input_max_shape(self, graph_name: str, index: int) -> list[int]:
        """Largest shape of an input."""
        return list(self._input(graph_name, index).max_shape.sizes)

    def get_output_max_shape(self, graph_name: str, index: int) -> list[int]:
        """Largest shape of an output."""
        return list(self._output(graph_name, index).max_shape.sizes)

    def get_input_min_shape(self, graph_name: str, index: int) -> list[int]:
        """Smallest shape of an input."""
        return list(self._input(graph_name, index).min_shape.sizes)

    def get_output_min_shape(self, graph_name: str, index: int) -> list[int]:
        """Smallest shape of an output."""
        return list(self._output(graph_name, index).min_shape.sizes)

    def get_input_dtype(self, graph_name: str, index: int) -> Dtype:
        """Element type of an input."""
        return Dtype(self._input(graph_name, index).dtype)

    def get_output_dtype(self, graph_name: str, index: int) -> Dtype:
        """Element type of an output."""
        return Dtype(self._output(graph_name, index).dtype)

    def get_input_scale(self, graph_name: str, index: int) -> float:
        """Number that an input's element is multiplied by; 1 where its type holds the value itself."""
        return self._input(graph_name, index).scale

    def get_output_scale(self, graph_name: str, index: int) -> float:
        """Number that an output's element is multiplied by; 1 where its type holds the value itself."""
        return self._output(graph_name, index).scale

    def get_weight_format(self, graph_name: str) -> tuple[str, float]:
        """Number format of a graph's weights, and the mean of their scales: 1 where they are not quantised."""
        graph = self._graph(graph_name)
        return graph.weight_format, graph.weight_scale

    # Tensors.

    def get_input_tensors(
        self, graph_name: str, tensor_name: str | int | None = None, stage: int = 0
    ) -> dict[int, Any]:
        """`get_input_tensors(graph, stage)` and `(graph, tensor_name, stage)`: the stage's tensors at the service, by
        index; the same ones every time.

        Raises FailedPrecondition NO_GRAPH_TENSORS where the service keeps none, ResourceExhausted GRAPH_QUOTA.
        """
        return self._tensors(graph_name, tensor_name, stage, is_input=True)

    def get_output_tensors(
        self, graph_name: str, tensor_name: str | int | None = None, stage: int = 0
    ) -> dict[int, Any]:
        """Return the stage's output tensors, as `get_input_tensors` does those of the input."""
        return self._tensors(graph_name, tensor_name, stage, is_input=False)

    def get_input_tensor(self, graph_name: str, index: int, stage: int = 0) -> Any:
        """One of `get_input_tensors`."""
        self._input(graph_name, index)
        return self._tensors(graph_name, None, stage, is_input=True)[index]

    def get_output_tensor(self, graph_name: str, index: int, stage: int = 0) -> Any:
        """One of `get_output_tensors`."""
        self._output(graph_name, index)
        return self._tensors(graph_name, None, stage, is_input=False)[index]

    def get_input_tensors_addrmode0(self, graph_name: str, stage: int = 0) -> dict[int, Any]:
        """New Tensors for all inputs, here, in any address mode: valid ones, such as a causal mask, else zeros."""
        return self._arrays(self._graph(graph_name).inputs, stage)

    def create_max_input_tensors(self, graph_name: str) -> dict[int, Any]:
        """New Tensors of each input's largest shape, here, whatever the address mode."""
        return self._largest(self._graph(graph_name).inputs)

    def create_max_output_tensors(self, graph_name: str) -> dict[int, Any]:
        """New Tensors of each output's largest shape, here, whatever the address mode."""
        return self._largest(self._graph(graph_name).outputs)

    def get_output_tensors_addrmode0(self, graph_name: str, stage: int = 0) -> dict[int, Any]:
        """New Tensors of zeros for all outputs, here; whatever the address mode."""
        return self._arrays(self._graph(graph_name).outputs, stage)

    # Computation.

    def process(
        self,
        graph_name: str,
        input: Mapping[int, Any],
        output: Mapping[int, Any],
        core_list: Sequence[int] = (),
        *,
        stage: int | None = None,
        sequence: str | None = None,
        start: int | None = None,
    ) -> int:
        """Run a graph on tensors by index, and write those outputs that are there into theirs. Return 0.

        A tensor is a Tensor, a ServerTensor or an array. Optional inputs may be left out. `stage`: shapes must be its.
        `sequence`: keys and values are those of this name in the service's pool, which ends with the engine; `start`:
        tokens of it to go on after. `core_list`: cores of a device, without effect.
        Raises PenstockError, and ValueError or TypeError for arrays that do not fit.
        """
        graph = self._graph(graph_name)
        for what, tensors in (("input", input), ("output", output)):
            if not isinstance(tensors, Mapping) or not all(isinstance(index, int) for index in tensors):
                raise WrongType(f"{what}: must be a mapping of indices to tensors, found {found_of(tensors)}")
        request = graphs_pb2.ForwardRequest(
            model=self._name, graph=graph_name, stage=stage, sequence=sequence or "", start=start
        )
        inputs = [self._argument(graph, index, tensor) for index, tensor in input.items()]
        targets = [self._target(graph, index, tensor) for index, tensor in output.items()]
        if sequence or any(one.handle for one in inputs) or any(one.handle for one in targets):
            request.lease_id = self._lease()
        found = self._calls.forward(request, inputs, targets)
        for index, tensor in output.items():
            if index in found and found[index].data:
                _store(tensor, found[index].data, found[index].shape, Dtype(found[index].dtype))
        return 0

    def free_sequence(self, name: str) -> None:
        """End a named sequence; one that is not there is fine."""
        if self._lease_id:
            request = graphs_pb2.FreeTensorsRequest(model=self._name, lease_id=self._lease_id, sequences=[name])
            self._calls.unary("FreeTensors", request)

    def sample(
        self,
        logits: Any,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        *,
        seed: int | None = None,
        top_logprobs: int | None = None,
        **options: Any,
    ) -> tuple[int, LogprobEntry | None]:
        """Draw the token that Generate would after these ids, from logits (vocabulary) or (1, vocabulary).

        `options` are GenerationConfig's. Return it with its log-probability, when `top_logprobs` is set. Raises
        TypeError for unknown options, PenstockError.
        """
        request = graphs_pb2.SampleRequest(model=self._name, top_logprobs=top_logprobs)
        row = request.rows.add(prompt_token_ids=prompt_ids, output_token_ids=output_ids)
        if seed is not None:
            row.seed = seed
        for name, value in options.items():
            with naming(name, partial(expected, request.config, name, CONFIG.get(name, "")), value):
                if name not in CONFIG:
                    raise unknown(name, CONFIG)
                set_option(request.config, name, CONFIG[name], value)
        if isinstance(logits, ServerTensor):
            request.handle, request.lease_id = logits.handle, self._lease()
        else:
            array = stored(logits, Dtype.BM_FLOAT32).reshape(1, -1)
            request.logits.CopyFrom(
                common_pb2.Tensor(dtype=common_pb2.D_TYPE_FLOAT32, shape=array.shape, data=array.tobytes())
            )
        token = self._calls.unary("Sample", request).tokens[0]
        return token.token_id, logprob_entry(token.logprobs) if token.HasField("logprobs") else None

    # The parts of these.

    def _graph(self, name: str) -> graphs_pb2.GraphInfo:
        graph = self._graphs.get(name)
        if graph is None:
            raise NotFound(f"the model has no graph {name!r}", reason="GRAPH_NOT_FOUND", field="graph")
        return graph

    def _input(self, graph_name: str, index: int) -> graphs_pb2.GraphTensorInfo:
        return _at(self._graph(graph_name).inputs, index)

    def _output(self, graph_name: str, index: int) -> graphs_pb2.GraphTensorInfo:
        return _at(self._graph(graph_name).outputs, index)

    def _argument(self, graph: graphs_pb2.GraphInfo, index: int, tensor: Any) -> Input:
        dtype = _at(graph.inputs, index).dtype
        rank = len(_at(graph.inputs, index).max_shape.sizes)
        if isinstance(tensor, ServerTensor):
            return Input(index, dtype, _of_rank(tensor.shape(), rank), memoryview(b""), tensor.handle)
        try:
            array = stored(_array_of(tensor), Dtype(dtype))
        except (TypeError, ValueError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"input {index}: {error}") from error
        return Input(index, dtype, _of_rank(array.shape, rank), memoryview(array.tobytes()))

    def _target(self, graph: graphs_pb2.GraphInfo, index: int, tensor: Any) -> graphs_pb2.GraphOutput:
        _at(graph.outputs, index)
        target = graphs_pb2.GraphOutput(index=index)
        if isinstance(tensor, ServerTensor):
            target.handle = tensor.handle
        return target

    def _read_graphs(self) -> dict[str, graphs_pb2.GraphInfo]:
        graphs = {one.name: one for one in model_info(self._calls, self._name).forward_graphs}
        if not graphs:
            raise FailedPrecondition(
                "the service opens its model to nobody here: see its --model-access", reason="MODEL_ACCESS_OFF"
            )
        return graphs

    def _check_devices(self, wanted: Iterable[int]) -> None:
        known = self.get_device_ids()
        if set(wanted) <= set(known):
            return
        if self._own is None:
            raise ValueError(f"device ids must be among those of the service: {known}")
        others = sorted(set(wanted) - set(known))
        warnings.warn(f"the model runs on device {known} of this machine; ids {others} have no effect", stacklevel=3)

    def _end(self, method: str, request: Any) -> None:
        """Make a call that ends something, unless it is gone or in use."""
        with contextlib.suppress(NotFound, FailedPrecondition, Unavailable):
            self._calls.unary(method, request)

    def _lease(self) -> str:
        if not self._lease_id:
            self._lease_id = self._calls.unary("AllocateTensors", graphs_pb2.AllocateTensorsRequest()).lease_id
        return self._lease_id

    def _tensors(
        self, graph_name: str, name: str | int | None, stage: int, *, is_input: bool
    ) -> dict[int, ServerTensor]:
        if isinstance(name, int):
            return self._tensors(graph_name, None, name, is_input=is_input)
        graph = self._graph(graph_name)
        infos = graph.inputs if is_input else graph.outputs
        if not 0 <= stage < len(graph.stages):
            raise IndexError(f"stage must be below {len(graph.stages)}")
        if not graph.addr_mode:
            raise FailedPrecondition(
                "no tensors stay at the service (address mode 0): use the addrmode0 forms", reason="NO_GRAPH_TENSORS"
            )
        wanted = [one for one in infos if name is None or one.name == name]
        if not wanted:
            raise NotFound(f"the graph has no tensor {name!r}", reason="TENSOR_NOT_FOUND", field="tensor_name")
        known = self._allocated.setdefault((graph_name, stage, is_input), {})
        missing = [one for one in wanted if one.index not in known]
        if missing:
            known.update(self._allocate(missing, stage))
        return {one.index: known[one.index] for one in wanted}

    def _allocate(self, infos: list[graphs_pb2.GraphTensorInfo], stage: int) -> dict[int, ServerTensor]:
        request = graphs_pb2.AllocateTensorsRequest(model=self._name, lease_id=self._lease_id)
        for one in infos:
            request.tensors.add(dtype=one.dtype, shape=_shape(one, stage))
        answer = self._calls.unary("AllocateTensors", request)
        self._lease_id = answer.lease_id
        made = {}
        for one, handle in zip(infos, answer.handles, strict=True):
            shape, dtype = _shape(one, stage), Dtype(one.dtype)
            made[one.index] = ServerTensor(self._calls, self._name, answer.lease_id, handle, shape, dtype)
            values = initial(one.name, shape)
            if values is not None:
                made[one.index].update_data(values)
        return made

    def _arrays(self, infos: Iterable[graphs_pb2.GraphTensorInfo], stage: int) -> dict[int, Any]:
        return {one.index: _filled(one, _shape(one, stage)) for one in infos}

    def _largest(self, infos: Iterable[graphs_pb2.GraphTensorInfo]) -> dict[int, Any]:
        return {one.index: _filled(one, list(one.max_shape.sizes)) for one in infos}


def _filled(info: graphs_pb2.GraphTensorInfo, shape: list[int]) -> Tensor:
    """Make a tensor here that the graph takes as it is."""
    tensor = Tensor(Handle(0), shape, Dtype(info.dtype))
    values = initial(info.name, shape)
    if values is not None:
        read_into(tensor.array, stored(values, Dtype(info.dtype)), Dtype(info.dtype))
    return tensor


def _array_of(tensor: Any) -> Any:
    """Return the array of a tensor that is here."""
    if not isinstance(tensor, Tensor):
        return tensor
    tensor.pull()
    return tensor.array


def _store(tensor: Any, data: bytearray, shape: tuple[int, ...], dtype: Dtype) -> None:
    """Write an output's elements into a tensor that is here."""
    if isinstance(tensor, Tensor):
        tensor.hold(shape)
    read_into(_array_of(tensor), from_bytes(bytes(data), shape, dtype), dtype)
    if isinstance(tensor, Tensor):
        tensor.push()


def _own_service(model: str | bytes) -> Any:
    """Open a model in this process. Raises ImportError naming what to install."""
    try:
        service = importlib.import_module("penstock.compat.sail.graph_service")
    except ImportError as error:
        raise ImportError(
            "EngineLLM runs a model in this process where no server is told: pip install penstock, or tell one by "
            "address='HOST:PORT'"
        ) from error
    return service.open_graphs(model)


def _sent_bytes(model: str) -> bytes | None:
    """Return a tar archive of this machine, to send its bytes; None: the path is the server's."""
    path = Path(model).expanduser()
    if not path.is_file():
        return None
    import tarfile  # takes milliseconds that other clients do not owe

    return path.read_bytes() if tarfile.is_tarfile(path) else None


def _of_rank(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return a shape without the sizes of 1 that it has more of than `rank`: [1, 1, hidden] is [1, hidden]."""
    sizes = list(shape)
    while len(sizes) > rank and 1 in sizes:
        sizes.remove(1)
    return tuple(sizes)


def _arguments(model: str | bytes, arguments: tuple[Any, ...]) -> tuple[BmrtFlag, list[int]]:
    """Return flags and device ids of a constructor's forms. Raises TypeError."""
    *others, device_ids = arguments or ([],)
    if isinstance(device_ids, int) or not all(isinstance(one, int) for one in device_ids):
        raise TypeError("the last argument must be a list of device ids")
    if isinstance(model, bytes):
        if len(others) != 1 or not isinstance(others[0], int) or not 0 < others[0] <= len(model):
            raise TypeError("EngineLLM(data, size, device_ids): the size must be that of the data, or less")
        return BmrtFlag.BM_RUNTIME_AUTO, list(device_ids)
    if len(others) > 1 or not all(isinstance(one, int) for one in others):
        raise TypeError("EngineLLM(model, device_ids) or EngineLLM(model, flags, device_ids)")
    return BmrtFlag(others[0]) if others else BmrtFlag.BM_RUNTIME_AUTO, list(device_ids)


def _at(infos: Sequence[graphs_pb2.GraphTensorInfo], index: int) -> graphs_pb2.GraphTensorInfo:
    if not 0 <= index < len(infos):
        raise IndexError(f"index must be below {len(infos)}")
    return infos[index]


def _shape(info: graphs_pb2.GraphTensorInfo, stage: int) -> list[int]:
    if not 0 <= stage < len(info.shapes):
        raise IndexError(f"stage must be below {len(info.shapes)}")
    return list(info.shapes[stage].sizes)
