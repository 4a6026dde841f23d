"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors, checked and read.

Scales and patterns are those of peft 0.18 (peft/tuners/lora/layer.py:LoraLayer.update_layer,
peft/utils/other.py:get_pattern_key).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.common.errors import InvalidArgument
from penstock.generation.adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.module_patterns import ModulePatterns
from penstock.generation.devices.torch_dtypes import STORED_DTYPES
from penstock.generation.layers.lora import SITES_A_LAYER, AdapterWeights, EmbeddingPart, LoraPart
from penstock.generation.weights.files import StoredTensor, read_header
from penstock.generation.weights.tensor_names import RowOrder, layer_prefix, site_linears

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.layers.linear.base import Linear

_PREFIX = "base_model.model."
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
# Fields of adapter_config.json that change nothing of what is computed, or that are read here.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "loftq_config", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "alpha_pattern", "lora_alpha", "use_rslora", "task_type", "init_lora_weights", "bias",
    "fan_in_fan_out", "lora_ga_config",
})  # fmt: skip
# Ways to begin a training that change the base model's weights, too: without that change the adapter is wrong.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# More than any layer is wide.
_MOST_RANK = 2**31 - 1
# Largest alpha: the kernels' scales are float32, and a product of float16 ends at 65504.
_MOST_ALPHA = 1e6
_LONGEST_NAME = 256
# Of the header of adapter_model.safetensors: bytes of a tensor's entry, and of all else in it.
_ENTRY_BYTES, _OTHER_HEADER_BYTES = 512, 1 << 16
_MATRICES = re.compile(r"(?P<module>.+?)\.lora_(?P<kind>[AB])(\.default)?\.weight")
_EMBEDDING_MATRICES = re.compile(r"(?P<module>.+?)\.lora_embedding_(?P<kind>[AB])(\.default)?")
T = TypeVar("T")
# Rows of the embedding, or columns of the head, to compare at a time.
_COMPARED = 256


@dataclass(frozen=True, slots=True)
class _TargetModule:
    """A module's place in the model: its site, first output and shape."""

    site: int
    first: int
    outputs: int
    inputs: int
    order: RowOrder | None = None


class AdaptedModel(Protocol):
    """Interface of a model to its adapters, CausalLM or LeaderModel; see CausalLM. Used while it computes steps."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def head_site(self) -> int: ...

    @property
    def head(self) -> Linear | None:
        """None: no process has the whole."""

    def embed(self, input_ids_T: Tensor) -> Tensor: ...

    def adapter_copies(self, site: int | None) -> tuple[int, int]: ...

    def adapter_weights(
        self, sites: Mapping[int, Sequence[LoraPart]], embedding: EmbeddingPart | None
    ) -> AdapterWeights: ...


class PeftFolder:
    """The files of one adapter, checked against a model. No weight is read before `read`."""

    def __init__(self, path: Path, root: Path | None, model: AdaptedModel, limits: AdapterLimits) -> None:
        """Check everything except the numbers. Raises InvalidArgument as AdapterStore.load."""
        self._model = model
        self._path = path
        self._weights = _checked_file(path, WEIGHTS_FILE, root)
        self._config = _checked_file(path, CONFIG_FILE, root)
        config = _read_config(self._config, limits)
        scales = _Scales(config, limits)
        # Modules with a replaced weight, not a weight plus a product, and that weight in the file.
        saved = _saved_modules(config)
        self._saved: dict[str, tuple[str, StoredTensor]] = {}
        places = _places(model)
        stored = self._header(places)
        self._check_size(stored)
        # Module -> its A and B in the file.
        self._modules: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
        for name, tensor in stored.items():
            if name.removeprefix(_PREFIX).removesuffix(".weight") in saved:
                self._keep(name, tensor)
            else:
                self._sort(name, tensor, places)
        for module in sorted(saved):
            if module not in self._saved:
                raise _broken(f"{WEIGHTS_FILE} has no weight of {module}, which is in modules_to_save")
            if module in self._modules:
                raise _broken(f"{WEIGHTS_FILE} has lora_A and lora_B of {module}, which is in modules_to_save")
        self._places = {module: places[module] for module in self._modules if module != _EMBEDDING}
        if not self._modules:
            raise _broken(f"{WEIGHTS_FILE} has no lora_A and lora_B")
        ranks = {module: self._check_module(module, pair, limits) for module, pair in self._modules.items()}
        self._scales = scales.of(ranks)
        self.rank = max(ranks.values())
        self.targets = tuple(sorted({module.rpartition(".")[2] for module in (*self._modules, *self._saved)}))

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices in the model's dtype, in all processes; padding in memory adds a few."""
        numbers = 0
        for module, pair in self._modules.items():
            copies = self._copies(module)
            numbers += sum(math.prod(pair[kind][1].shape) * count for kind, count in zip("AB", copies, strict=True))
        # As `_change` makes of each: a matrix beside an identity, in either order.
        hidden = self._model.config.hidden_size
        for module, (_, tensor) in self._saved.items():
            numbers += (math.prod(tensor.shape) + hidden * hidden) * max(self._copies(module))
        return numbers * self._model.dtype.itemsize

    def _copies(self, module: str) -> tuple[int, int]:
        """Return how often A and B of a module are in memory."""
        if module == _EMBEDDING:
            return self._model.adapter_copies(None)
        return self._model.adapter_copies(self._model.head_site if module == _HEAD else self._places[module].site)

    @property
    def depends_on_weights(self) -> bool:
        """True when what `read` returns fits only the weights that the model has then."""
        return bool(self._saved)

    def read(self) -> AdapterWeights:
        """Read the matrices. Raises InvalidArgument (ADAPTER_BROKEN) when they are not finite or cannot be read.

        A model in several processes has more to raise: see LeaderModel.adapter_weights.
        """
        sites: dict[int, list[LoraPart]] = {}
        embedding: EmbeddingPart | None = None
        try:
            with self._weights.open("rb") as file:
                for module, pair in self._modules.items():
                    a, b = (self._tensor(file, *pair[kind]) for kind in "AB")
                    if module == _EMBEDDING:
                        embedding = EmbeddingPart(a.T.contiguous(), b, self._scales[module])
                        continue
                    place = self._places[module]
                    if place.order is not None:
                        b = place.order.applied(b, place.first)
                    sites.setdefault(place.site, []).append(LoraPart(place.first, a, b, self._scales[module]))
                for module, (name, stored) in self._saved.items():
                    change_VI = self._change(module, self._tensor(file, name, stored))
                    identity_II = torch.eye(change_VI.shape[1], dtype=change_VI.dtype, device=change_VI.device)
                    if module == _EMBEDDING:
                        embedding = EmbeddingPart(change_VI, identity_II, 1.0)
                    else:
                        sites[self._model.head_site] = [LoraPart(0, identity_II, change_VI, 1.0)]
        except OSError as error:
            raise _broken(f"{WEIGHTS_FILE} could not be read") from error
        for parts in sites.values():
            parts.sort(key=lambda part: part.first)
        return self._model.adapter_weights(sites, embedding)

    def digest(self) -> str:
        """Return the SHA-256 of both files. Raises InvalidArgument (ADAPTER_BROKEN) when they cannot be read."""
        digest = hashlib.sha256()
        try:
            for path in (self._config, self._weights):
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise _broken(f"{path.name} could not be read") from error
        return digest.hexdigest()

    def _tensor(self, file: BufferedReader, name: str, stored: StoredTensor) -> Tensor:
        # Read, not mapped: a mapped file that another process cuts short would end this one.
        data = bytearray(stored.end - stored.begin)
        file.seek(stored.begin)
        if file.readinto(data) != len(data):
            raise _broken(f"{WEIGHTS_FILE} became shorter while it was read")
        tensor = torch.frombuffer(data, dtype=STORED_DTYPES[stored.dtype]).view(stored.shape)
        if not tensor.isfinite().all():
            raise _broken(f"{WEIGHTS_FILE}: {name} is not finite")
        tensor = tensor.to(self._model.device, self._model.dtype)
        if not tensor.isfinite().all():
            raise _broken(f"{WEIGHTS_FILE}: {name} has numbers that are too large for the model's dtype")
        return tensor.contiguous()

    @torch.inference_mode()
    def _change(self, module: str, weight_VI: Tensor) -> Tensor:
        """Return the difference of a saved module's weight from the model's own, in place.

        The model's weight may be packed, quantised or mapped: it is read by applying it to ids and unit vectors.
        """
        vocabulary, hidden = weight_VI.shape
        device = weight_VI.device
        if module == _EMBEDDING:
            for ids in torch.split(torch.arange(vocabulary, device=device), _COMPARED):
                weight_VI[ids] = (weight_VI[ids].float() - self._model.embed(ids).float()).to(weight_VI.dtype)
            return weight_VI
        head = self._model.head
        assert head is not None, "refused by _keep"
        bias = head.as_float(torch.zeros(1, hidden, dtype=weight_VI.dtype, device=device))
        for columns in torch.split(torch.arange(hidden, device=device), _COMPARED):
            units = torch.zeros(len(columns), hidden, dtype=weight_VI.dtype, device=device)
            units[torch.arange(len(columns), device=device), columns] = 1.0
            own = (head.as_float(units) - bias).T
            weight_VI[:, columns] = (weight_VI[:, columns].float() - own).to(weight_VI.dtype)
        return weight_VI

    def _keep(self, name: str, tensor: StoredTensor) -> None:
        """Note a saved module's weight. Raises for a weight that does not fit the model."""
        module = name.removeprefix(_PREFIX).removesuffix(".weight")
        config = self._model.config
        if tensor.shape != (expected := (config.vocab_size, config.hidden_size)):
            raise _unsupported(
                f"{WEIGHTS_FILE}: {module} has shape {list(tensor.shape)}, the model's is {list(expected)}"
            )
        if module == _HEAD and self._model.head is None:
            raise _unsupported(
                "modules_to_save (lm_head): --tensor-parallel has the head's rows in several processes: merge it"
            )
        if module == _EMBEDDING and config.embedding_scale != 1.0:
            raise _unsupported(f"modules_to_save ({module}): this model multiplies its embedding")
        self._saved[module] = (name, tensor)

    def _header(self, places: Mapping[str, _TargetModule]) -> dict[str, StoredTensor]:
        """Return the tensors of the file. Its header may be no longer than a header with every module of the model.

        Parsing JSON holds the interpreter's lock, and so stops all running requests.
        """
        # A, B and a saved weight or a base layer's.
        most = 4 * (len(places) + 1) * _ENTRY_BYTES + _OTHER_HEADER_BYTES
        try:
            return read_header(self._weights, most_bytes=most)
        except (OSError, ValueError) as error:
            raise _broken(f"{WEIGHTS_FILE} is not a safetensors file of an adapter of this model") from error

    def _check_size(self, stored: Mapping[str, StoredTensor]) -> None:
        try:
            size = self._weights.stat().st_size
        except OSError as error:
            raise _broken(f"{WEIGHTS_FILE} could not be read") from error
        for name, tensor in stored.items():
            if len(name) > _LONGEST_NAME:
                raise _broken(f"{WEIGHTS_FILE}: {name[:_LONGEST_NAME]} is no name of a tensor of an adapter")
            dtype = STORED_DTYPES.get(tensor.dtype)
            if dtype is None:
                raise _broken(
                    f"{WEIGHTS_FILE}: {name} is stored as {tensor.dtype[:32]}; supported are {', '.join(STORED_DTYPES)}"
                )
            if tensor.end > size or tensor.end - tensor.begin != math.prod(tensor.shape) * dtype.itemsize:
                raise _broken(f"{WEIGHTS_FILE} is cut off, or its header is wrong at {name}")

    def _sort(self, name: str, tensor: StoredTensor, places: Mapping[str, _TargetModule]) -> None:
        """Note a tensor of the file. Raises for one without a meaning here."""
        if not name.startswith(_PREFIX):
            raise _broken(f"{WEIGHTS_FILE}: {name} is not a name of a tensor of an adapter")
        short = name.removeprefix(_PREFIX)
        # The base model's own, which PEFT saves beside an adapter of the embedding or the head; it is never trained.
        if short in (f"{_EMBEDDING}.base_layer.weight", f"{_HEAD}.base_layer.weight"):
            expected = (self._model.config.vocab_size, self._model.config.hidden_size)
            if tensor.shape != expected:
                raise _broken(f"{WEIGHTS_FILE}: {name} has shape {list(tensor.shape)}, the model's is {list(expected)}")
            return
        found = _MATRICES.fullmatch(short)
        embedding = _EMBEDDING_MATRICES.fullmatch(short)
        if found is None and embedding is None:
            raise _unsupported(f"{WEIGHTS_FILE}: {name} is neither lora_A nor lora_B")
        match = found or embedding
        assert match is not None
        module = match["module"]
        known = module == _EMBEDDING if embedding is not None else module in places
        if embedding is not None and self._model.config.embedding_scale != 1.0:
            raise _unsupported(
                f"target module {module} cannot have an adapter here: this model multiplies its embedding"
            )
        if not known:
            supported = ", ".join((*_short_names(places), _EMBEDDING.rpartition(".")[2]))
            raise _unsupported(f"target module {module} cannot have an adapter here; supported are {supported}")
        pair = self._modules.setdefault(module, {})
        if match["kind"] in pair:
            raise _broken(f"{WEIGHTS_FILE} has two lora_{match['kind']} of {module}")
        pair[match["kind"]] = (name, tensor)

    def _check_module(self, module: str, pair: Mapping[str, tuple[str, StoredTensor]], limits: AdapterLimits) -> int:
        """Return the rank of a module, after a check that its matrices fit it."""
        if set(pair) != {"A", "B"}:
            raise _broken(f"{WEIGHTS_FILE} has only one of lora_A and lora_B of {module}")
        a, b = pair["A"][1].shape, pair["B"][1].shape
        config = self._model.config
        if module == _EMBEDDING:
            outputs, inputs = config.hidden_size, config.vocab_size
        else:
            outputs, inputs = self._places[module].outputs, self._places[module].inputs
        if len(a) != 2 or len(b) != 2 or a[1] != inputs or b[0] != outputs or a[0] != b[1]:
            raise _broken(
                f"{module} has lora_A {list(a)} and lora_B {list(b)}: this model needs [rank, {inputs}] and "
                f"[{outputs}, rank]"
            )
        if not 1 <= a[0] <= limits.max_adapter_rank:
            raise InvalidArgument(
                "path",
                f"{module} has rank {a[0]}: --max-adapter-rank is {limits.max_adapter_rank}",
                reason="ADAPTER_RANK",
            )
        return a[0]


def _places(model: AdaptedModel) -> dict[str, _TargetModule]:
    """Return the modules that an adapter may change, except the embedding."""
    config = model.config
    places = {_HEAD: _TargetModule(model.head_site, 0, config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for number, linear in enumerate(site_linears(config, layer)):
            if linear is None:
                continue
            first = 0
            for name, rows in zip(linear.parts, linear.rows, strict=True):
                site = layer * SITES_A_LAYER + number
                places[f"{layer_prefix(layer)}{name}"] = _TargetModule(site, first, rows, linear.inputs, linear.order)
                first += rows
    return places


def _short_names(places: Mapping[str, _TargetModule]) -> list[str]:
    return list(dict.fromkeys(module.rpartition(".")[2] for module in places))


def _checked_file(path: Path, name: str, root: Path | None) -> Path:
    """Return a file of the folder, with links followed. Raises InvalidArgument (ADAPTER_PATH)."""
    # The path may come from a caller: the error does not reveal which files exist outside the root.
    missing = f"has no {name}" if root is None else f"has no {name} that lies below --adapter-root"
    try:
        file = (path / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise InvalidArgument("path", missing, reason="ADAPTER_PATH") from None
    if (root is not None and not file.is_relative_to(root.resolve())) or not file.is_file():
        raise InvalidArgument("path", missing, reason="ADAPTER_PATH")
    return file


def _read_config(file: Path, limits: AdapterLimits) -> dict[str, Any]:
    """Return adapter_config.json, after a check for unsupported fields by name."""
    try:
        with file.open("rb") as opened:
            text = opened.read(limits.max_config_bytes + 1)
        if len(text) > limits.max_config_bytes:
            raise _broken(f"{CONFIG_FILE} is longer than {limits.max_config_bytes} bytes")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(f"{CONFIG_FILE} is not JSON") from error
    if not isinstance(config, dict):
        raise _broken(f"{CONFIG_FILE} is not an object")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _unsupported(f"{CONFIG_FILE}: peft_type is not LORA")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported(f"{CONFIG_FILE}: task_type is not CAUSAL_LM")
    if config.get("use_dora"):
        raise _unsupported(f"{CONFIG_FILE}: use_dora: its norms need the whole base weight: merge the adapter")
    if config.get("bias", "none") != "none":
        raise _unsupported(f"{CONFIG_FILE}: bias other than none")
    if config.get("fan_in_fan_out"):
        raise _unsupported(f"{CONFIG_FILE}: fan_in_fan_out")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise _unsupported(
            f"{CONFIG_FILE}: init_lora_weights {begun[:32]}, which changes the base model: save it as plain LoRA "
            "(path_initial_model_for_weight_conversion)"
        )
    # Any field that a later PEFT adds may affect the computation.
    for field, value in config.items():
        if value and field not in _HARMLESS:
            raise _unsupported(f"{CONFIG_FILE}: {str(field)[:64]}")
    return config


def _saved_modules(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the modules that the adapter replaces, of the embedding and the head. Raises for others."""
    saved = config.get("modules_to_save") or []
    by_name = {module.rpartition(".")[2]: module for module in (_EMBEDDING, _HEAD)}
    names = [str(name).rpartition(".")[2] for name in (saved if isinstance(saved, list) else [saved])]
    if others := ", ".join(name for name in names if name not in by_name):
        raise _unsupported(
            f"{CONFIG_FILE}: modules_to_save ({others[:200]}), which replace weights: merge the adapter; supported are "
            f"{', '.join(by_name)}"
        )
    return frozenset(by_name[name] for name in names)


class _Scales:
    """The ranks and scales of each module in adapter_config.json."""

    def __init__(self, config: Mapping[str, Any], limits: AdapterLimits) -> None:
        """Check the fields. Raises InvalidArgument."""
        self._rank, self._alpha = _whole(config.get("r"), "r"), _alpha(config.get("lora_alpha"), "lora_alpha")
        ranks, alphas = (_entries(config, field) for field in ("rank_pattern", "alpha_pattern"))
        self._ranks = [_whole(value, "rank_pattern") for value in ranks.values()]
        self._alphas = [_alpha(value, "alpha_pattern") for value in alphas.values()]
        self._rank_keys = ModulePatterns("rank_pattern", tuple(ranks), limits)
        self._alpha_keys = ModulePatterns("alpha_pattern", tuple(alphas), limits)
        is_rs = config.get("use_rslora") or False
        if not isinstance(is_rs, bool):
            raise _broken(f"{CONFIG_FILE}: use_rslora is neither true nor false")
        self._is_rs = is_rs

    def of(self, ranks: Mapping[str, int]) -> dict[str, float]:
        """Return module -> scale. `ranks` are those of the modules' matrices. Raises InvalidArgument if the
        configuration has another rank, or patterns are wrong or slow. Blocking."""
        modules = tuple(ranks)
        by_rank, by_alpha = self._rank_keys.first_matches(modules), self._alpha_keys.first_matches(modules)
        scales = {}
        for module, found in ranks.items():
            expected = self._ranks[by_rank[module]] if module in by_rank else self._rank
            if expected != found:
                raise _broken(f"{module} has rank {found}, and {CONFIG_FILE} says {expected}")
            alpha = self._alphas[by_alpha[module]] if module in by_alpha else self._alpha
            scales[module] = alpha / (math.sqrt(found) if self._is_rs else found)
        return scales


def _entries(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise _broken(f"{CONFIG_FILE}: {field} is not an object")
    return given


def _whole(value: object, field: str) -> int:
    """Return a rank. Some writers make it a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _MOST_RANK:
        raise _broken(f"{CONFIG_FILE}: {field} is not a whole number of at least 1")
    if value != int(value):
        raise _broken(f"{CONFIG_FILE}: {field} is not a whole number of at least 1")
    return int(value)


def _alpha(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST_ALPHA <= value <= _MOST_ALPHA:
        raise _broken(f"{CONFIG_FILE}: {field} is not a number from -{_MOST_ALPHA:g} to {_MOST_ALPHA:g}")
    return float(value)


def _broken(message: str) -> InvalidArgument:
    return InvalidArgument("path", message, reason="ADAPTER_BROKEN")


def _unsupported(message: str) -> InvalidArgument:
    return InvalidArgument("path", message, reason="ADAPTER_UNSUPPORTED")
