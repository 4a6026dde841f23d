"""MindIE-LLM's dictionary `model_config`: the rows of its table, their reader, and what they mean to this engine.

`GeneratorTorch(model_config)` and `penstock serve generation --model-config FILE` read it here. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.environment import VISIBLE_NPUS, current_environment, num_npus
from penstock.common.errors import DoesNotFit, StartupError
from penstock.generation.parallel.launch import Rendezvous

FLAG = "--model-config"
# Words of a text that is true, as there, and of one that is not.
_TRUE, _FALSE = ("true", "1"), ("false", "0")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,254}[A-Za-z0-9])?")
_MOST_RANKS = 1_048_576
# Theirs, and that of another engine: this process runs none of them.
_OTHER_BACKENDS = ("vllm",)
_NPU_BACKENDS = ("atb", "ms")
_REQUIRED = object()


class ModelConfigError(ValueError):
    """A field of `model_config` that is missing or wrong; the text names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"model_config[{field!r}] {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table: a field with its type, its default and one line for people."""

    name: str
    kind: type
    doc: str
    default: object = _REQUIRED
    minimum: int | None = None
    maximum: int | None = None
    # Takes a value of the kind; returns what is wrong with it, in words that go on from the field's name.
    check: Callable[[Any], str | None] = lambda _: None

    @property
    def is_required(self) -> bool:
        """True when a dictionary without the field is refused."""
        return self.default is _REQUIRED

    def read(self, values: Mapping[str, Any]) -> Any:
        """Return the field's value, coerced. Raises ModelConfigError."""
        given = values.get(self.name)
        if given is None:
            if self.is_required:
                raise ModelConfigError(self.name, "is missing")
            return self.default
        value = _coerced(self.name, self.kind, given)
        low, high = self.minimum, self.maximum
        if (low is not None and value < low) or (high is not None and value > high):
            raise ModelConfigError(self.name, f"must be {_interval(low, high)}, found {given!r}")
        if (problem := self.check(value)) is not None:
            raise ModelConfigError(self.name, f"{problem}, found {given!r}")
        return value


def _interval(low: int | None, high: int | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"in [{low}, {high}]"


def _coerced(name: str, kind: type, value: Any) -> Any:
    """Return `value` as `kind`: texts of numbers and truths are read, a float that is whole is an int."""
    if kind is bool:
        return _truth(name, value)
    if kind is int:
        return _whole_number(name, value)
    if not isinstance(value, str):
        raise ModelConfigError(name, f"must be a text, found {value!r}")
    return value


def _truth(name: str, value: Any) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    if isinstance(word, bool):
        return word
    if word in _TRUE or word == 1:
        return True
    if word in _FALSE or word == 0:
        return False
    raise ModelConfigError(name, f"must be true or false, found {value!r}")


def _whole_number(name: str, value: Any) -> int:
    try:
        number = float(value) if isinstance(value, float) or (isinstance(value, str) and "." in value) else int(value)
        if isinstance(value, bool) or number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ModelConfigError(name, f"must be a whole number, found {value!r}") from None
    return int(number)


def _check_backend(value: str) -> str | None:
    if value == "torch":
        return None
    if value in _NPU_BACKENDS:
        if num_npus():
            return None
        return (
            "means an NPU, and this machine shows none (CANN and torch_npu installed?): set torch for its other devices"
        )
    if value in _OTHER_BACKENDS:
        return "must be torch, or atb or ms on an NPU: vLLM is a backend of the router, --backend vllm://HOST:PORT"
    return "must be torch, or atb or ms on an NPU"


def _check_model_name(value: str) -> str | None:
    if _NAME.fullmatch(value):
        return None
    return (
        "must be at most 256 letters, digits, dots, hyphens and underscores, and begin and end with a letter or digit"
    )


def _check_text(value: str) -> str | None:
    return None if value.strip() else "must not be empty"


ROWS: tuple[Row, ...] = (
    Row("backend_type", str, "Engine: torch; atb and ms are this one on an NPU.", check=_check_backend),
    Row("world_size", int, "Number of tensor-parallel ranks: --tensor-parallel.", minimum=1, maximum=_MOST_RANKS),
    Row("rank", int, "This process's rank, below world_size.", minimum=0),
    Row("npu_device_id", int, "Number of the device, among those that are visible.", minimum=0),
    Row("local_rank", int, "This process's rank on its machine, among the visible devices.", minimum=0),
    Row("num_threads", int, "Threads of post-processing, which compute token masks: --mask-threads.", 8, minimum=1),
    Row("trust_remote_code", bool, "Trust code in the model's folder; only --trust-remote-code does.", False),
    Row("model_name", str, "Name of the model: --served-model-name.", None, check=_check_model_name),
    Row("inference_mode", str, "Name of a plugin's mode; here each request says it.", None, check=_check_text),
    Row("max_position_embeddings", int, "Longest prompt and output together: --max-context.", None, minimum=1),
    Row("load_tokenizer", bool, "Load the tokenizer; False refuses texts and stop strings.", True),
    Row("tokenizer_path", str, "Folder or hub id of the tokenizer; the weights' own.", None, check=_check_text),
    # Of their server's configuration: tokens of a block, and GiB of the two pools; -1: what is left of 80 %.
    Row("block_size", int, "Tokens of one KV block, 128 in MindIE: --block-size.", None, minimum=1, maximum=1024),
    Row("npu_mem", int, "GiB of the KV pool, -1: what is left of 80 %: --kv-memory.", None, minimum=-1),
    Row("cpu_mem", int, "GiB of the host pool, 0: none: --host-kv-memory.", None, minimum=-1),
    # Not in their table, which takes the path of the weights for given.
    Row("model_id", str, "Folder or hub id of the weights: MODEL.", None, check=_check_text),
)  # fmt: skip
# Fields of GenerationServiceConfig that the dictionary sets, by its own field.
_OPTIONS = {
    "model_id": "model",
    "world_size": "tensor_parallel",
    "model_name": "served_model_name",
    "max_position_embeddings": "max_context",
    "num_threads": "mask_threads",
    "load_tokenizer": "load_tokenizer",
    "tokenizer_path": "tokenizer_path",
    "block_size": "block_size",
}
# Sizes in GiB.
_POOLS = {"npu_mem": "kv_memory", "cpu_mem": "host_kv_memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A `model_config`, read and checked. The fields are those of `ROWS`."""

    backend_type: str
    world_size: int
    rank: int
    npu_device_id: int
    local_rank: int
    num_threads: int
    trust_remote_code: bool
    model_name: str | None
    inference_mode: str | None
    max_position_embeddings: int | None
    load_tokenizer: bool
    tokenizer_path: str | None
    block_size: int | None
    npu_mem: int | None
    cpu_mem: int | None
    model_id: str | None

    @classmethod
    def read(cls, values: Mapping[str, Any], *, num_devices: int | None = None) -> ModelSettings:
        """Read and check the dictionary. `num_devices` are visible; None: those of this machine.

        Raises ModelConfigError, a ValueError that names the field, and TypeError for what is no dictionary.
        """
        if not isinstance(values, Mapping):
            raise TypeError("model_config: must be a dictionary; a folder or a hub id is for penstock.Generator")
        unknown = sorted(values.keys() - {row.name for row in ROWS}, key=str)
        if unknown:
            raise ModelConfigError(
                unknown[0], "is not known; options of Penstock itself are keyword arguments, or flags"
            )
        settings = cls(**{row.name: row.read(values) for row in ROWS})
        if settings.rank >= settings.world_size:
            raise ModelConfigError(
                "rank", f"must be less than world_size ({settings.world_size}), found {settings.rank}"
            )
        devices = visible_devices() if num_devices is None else num_devices
        for name in ("npu_device_id", "local_rank"):
            value = getattr(settings, name)
            if value >= devices:
                raise ModelConfigError(name, f"must be less than the {devices} visible devices, found {value}")
        return settings

    @classmethod
    def from_file(cls, path: str) -> ModelSettings:
        """Read a JSON file. Raises StartupError naming --model-config."""
        try:
            values = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise StartupError(f"{FLAG} {path} cannot be read as JSON: {error}", flag=FLAG) from error
        if not isinstance(values, dict):
            raise StartupError(f"{FLAG} {path} holds no JSON object", flag=FLAG)
        try:
            return cls.read(values)
        except ModelConfigError as error:
            raise StartupError(f"{FLAG} {path}: {error}", flag=FLAG) from error

    def service_options(self) -> dict[str, object]:
        """Return what the dictionary sets of GenerationServiceConfig, by field.

        Raises ModelConfigError for a rank other than 0 that no launcher has started, StartupError for its variables.
        """
        rendezvous = Rendezvous.of(current_environment(), self.world_size)
        if rendezvous is None and self.rank > 0:
            raise ModelConfigError(
                "rank",
                f"must be 0, found {self.rank}: rank 0 starts the others, where no launcher such as torchrun has "
                "started them and set RANK",
            )
        if rendezvous is not None and self.rank != rendezvous.rank:
            raise ModelConfigError("rank", f"must be {rendezvous.rank}, as the variable RANK, found {self.rank}")
        given = {option: getattr(self, name) for name, option in _OPTIONS.items()}
        if self.world_size == 1:
            del given["tensor_parallel"]
        for name, option in _POOLS.items():
            size = getattr(self, name)
            given[option] = None if size is None else str(size) if size <= 0 else f"{size}GiB"
        # Callers drive the model by hand with one block table a sequence, so every layer has the same blocks.
        given["kv_groups"] = False
        return {option: value for option, value in given.items() if value is not None}

    def with_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of the service, or flags, over what the dictionary sets. Raises as `service_options`."""
        wanted = {**self.service_options(), **{name: value for name, value in given.items() if value is not None}}
        device = str(wanted.get("device") or current_environment().get("PENSTOCK_DEVICE") or "auto")
        return {**wanted, "device": self.device(device)}

    @contextmanager
    def naming_fields(self, keywords: Container[str]) -> Iterator[None]:
        """Raise ModelConfigError in place of a StartupError about what the dictionary set, which only loading can tell,
        such as a context longer than the model's. `keywords`: options given beside it, which go before it."""
        set_here = self.service_options()
        try:
            yield
        except DoesNotFit:
            raise
        except StartupError as error:
            for name, option in {**_OPTIONS, **_POOLS}.items():
                flag = "MODEL" if option == "model" else f"--{option.replace('_', '-')}"
                if error.flag == flag and option in set_here and option not in keywords:
                    raise ModelConfigError(name, f"cannot be used: {error.message}") from error
            raise

    def device(self, wanted: str) -> str:
        """Return the option `device`, for what other options say: npu_device_id is the number of an NPU without one,
        and of this machine's with "auto", where there are some."""
        is_npu = wanted == "npu" or (wanted == "auto" and (num_npus() > 0 or self.backend_type in _NPU_BACKENDS))
        return f"npu:{self.npu_device_id}" if is_npu else wanted

    @property
    def warnings(self) -> tuple[str, ...]:
        """Fields that are set and change nothing here."""
        found = []
        if self.trust_remote_code:
            found.append("trust_remote_code has no effect: code of a folder runs by the option of that name only")
        if self.inference_mode is not None:
            found.append("inference_mode has no effect: each request says how it is decoded")
        return tuple(found)


def visible_devices() -> int:
    """Return the number of devices that this process may use: those that ASCEND_RT_VISIBLE_DEVICES lists, else all.

    Those of a machine are its NPUs; one without any has the CPU, which counts as one.
    """
    listed = current_environment().get(VISIBLE_NPUS)
    if listed is None:
        return max(1, num_npus())
    return len([part for part in listed.split(",") if part.strip()])


def with_model_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation service's flags with what --model-config sets, by flag or variable; flags go before it.

    Raises StartupError naming --model-config.
    """
    path = given.get("model_config") or current_environment().get("PENSTOCK_MODEL_CONFIG")
    if not path:
        return dict(given)
    settings = ModelSettings.from_file(str(path))
    try:
        return settings.with_options(given)
    except ModelConfigError as error:
        raise StartupError(f"{FLAG} {path}: {error}", flag=FLAG) from error
