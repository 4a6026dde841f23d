"""From a folder to a model of transformers: supported models, configuration, weights, linear layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.common.dtypes import BY_STORED, dtype_name
from penstock.common.errors import StartupError
from penstock.common.gguf_parts import GGUF_FILE, linked_parts
from penstock.common.logging import get_logger
from penstock.common.progress import CountBytes
from penstock.generation.attention.state_pool import state_bytes
from penstock.generation.attention.transformers_interface import SeesLaterRows, UnsupportedAttention
from penstock.generation.core.model_config import MAX_LAYERS, ConfigReader, ModelConfig, ModelRoute, RopeConfig
from penstock.generation.devices.torch_dtypes import COMPUTED_DTYPES
from penstock.generation.models.constant_cutoffs import keep_cutoffs
from penstock.generation.models.foreign_experts import mix_without_sorting
from penstock.generation.models.indexed_modules import PagedIndexers
from penstock.generation.models.module_scans import shorten_scans
from penstock.generation.models.module_states import move_states
from penstock.generation.models.module_swaps import ModuleSwaps
from penstock.generation.models.own_attention import take_over
from penstock.generation.models.recording import Recording, record
from penstock.generation.models.self_check import check_paged
from penstock.generation.models.state_limits import NOT_ATTENDED, NOT_WHOLE
from penstock.generation.models.transformers_fallback import (
    NO_ATTENTIONS,
    NO_EMBEDS,
    NO_HIDDEN_STATES,
    TransformersModel,
)
from penstock.generation.models.transformers_states import StatefulModel, has_states
from penstock.generation.weights.files import StoredTensor, file_names, read_header
from penstock.generation.weights.quantised.table import QUANTISED_FIELDS, read_dense, read_format

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import LinearMethod

_log = get_logger("penstock.generation")
# Context of a model that names no largest position.
_UNBOUNDED_CONTEXT = 32_768
# What would help where rows see later positions because the configuration says so.
_DECODES = (
    ", since config.json has no is_decoder true: set it there if the weights were trained to continue texts, as those "
    "of an encoder were not"
)
# Types of vision models, which transformers has under another name than its causal language models. The text part of
# these gives generate()'s ids without images; that of others does not: rows of PaliGemma's prompts see later positions.
_SEEING = frozenset((
    "aria", "aya_vision", "cohere2_vision", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "llava", "llava_next",
    "llava_onevision", "mistral3", "ovis2", "qwen2_5_vl", "qwen3_vl", "smolvlm", "step3p7", "video_llava", "vipllava",
))  # fmt: skip


def read_transformers_config(
    config: ConfigReader, generation: ConfigReader, folder: Path, route: ModelRoute
) -> ModelConfig:
    """Return the configuration of a folder's model, as far as its files contain it; the loader adds the geometry.

    Raises StartupError naming MODEL, or --trust-remote-code, for a model that transformers does not run as a decoder.
    """
    model_type = config.text("model_type")
    _check_type(model_type, config, route)
    with _quiet(), _as_startup_error(f"{config.source} cannot be read by transformers"):
        from transformers import AutoConfig

        whole: Any = AutoConfig.from_pretrained(
            folder, trust_remote_code=_runs_code(config, route), local_files_only=True
        )
        text: Any = whole.get_text_config(decoder=True)
    if getattr(whole, "is_encoder_decoder", False):
        raise _no_decoder(model_type)
    _refuse_state(model_type, whole)
    format = read_format(config)
    number = _Numbers(config, text)
    # Some without attention name no heads.
    heads, hidden = number("num_attention_heads", 1), number("hidden_size")
    names = (getattr(one, "dtype", None) for one in (whole, text))
    dtype = next((dtype_name(name) for name in names if name is not None), None)
    return ModelConfig(
        model_type=model_type,
        architecture=_architecture(config) or type(whole).__name__,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", 4 * hidden),
        # Those of an encoder, where the whole had one, have the usual name.
        num_layers=number("decoder_layers", number("num_hidden_layers", maximum=MAX_LAYERS), maximum=MAX_LAYERS),
        num_heads=heads,
        # Recorded by the loader: some models have others in some layers.
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        max_position_embeddings=_context(text, number, model_type),
        rms_norm_eps=0.0,
        rope=RopeConfig("default", 0.0),
        tie_word_embeddings=bool(getattr(whole, "tie_word_embeddings", False)),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(),
        eos_token_ids=generation.token_ids("eos_token_id") or _ids(whole, text, "eos_token_id"),
        bos_token_id=next(iter(_ids(whole, text, "bos_token_id")), None),
        pad_token_id=next(iter(_ids(whole, text, "pad_token_id")), None),
        checkpoint_dtype=dtype if dtype in COMPUTED_DTYPES else None,
        checkpoint_format="" if format is None else format.description,
        route="fallback",
    )


def _architecture(config: ConfigReader) -> str:
    """Return the first of `architectures`; empty where there is none. Raises StartupError."""
    named = config.values.get("architectures")
    if not named:
        return ""
    if not isinstance(named, list) or not isinstance(named[0], str) or not named[0].isprintable():
        raise config.error("architectures", "must be a list of names")
    return named[0]


def load_transformers_model(
    folder: Path,
    config: ModelConfig,
    route: ModelRoute,
    device: Device,
    dtype: str,
    quantization: str,
    progress: CountBytes | None = None,
) -> TransformersModel:
    """Load the weights by transformers, from safetensors only and without the network, and check how the model runs.

    Arguments as of `registry.load_model`. Raises StartupError naming the flag.
    """
    headers: dict[str, StoredTensor] = {}
    if (folder / GGUF_FILE).exists():
        total = sum(path.stat().st_size for path in linked_parts(folder))
    else:
        headers = {name: one for file in file_names(folder) for name, one in read_header(folder / file).items()}
        total = sum(one.end - one.begin for one in headers.values())
    if progress is not None:
        progress(0, total)
    compute = device.compute_dtype(dtype, _stored_dtype(config, headers.values()))
    quantization = "none" if quantization == "auto" else quantization
    # Before the weights: it may be refused.
    method = device.linear_method(compute, quantization)
    causal, num_dequantised = _loaded(folder, config, route, compute)
    causal = causal.to(device.torch_device)
    parameters = sum(parameter.numel() for parameter in causal.parameters())
    indexers = PagedIndexers(causal)
    config = replace(config, index=indexers.heads)
    recording = _recorded(causal, config)
    # With rounded weights an indexer would choose other positions.
    kept = recording.read_linears.union(*(module.modules() for module in indexers.modules))
    keep_cutoffs(causal)
    if device.torch_device.type == "cpu":
        shorten_scans(causal)
        mix_without_sorting(causal)
    num_bytes = _swap_modules(causal, kept, method, device.layer_kernels(compute), compute, quantization)
    config = replace(
        _with_geometry(config, recording),
        dtype=dtype_name(compute),
        num_parameters=parameters,
        weight_forms=_forms(num_dequantised, compute, quantization),
    )
    kind = StatefulModel if recording.states else TransformersModel
    model: TransformersModel = kind(
        causal,
        recording.decoder,
        config,
        recording.calls,
        device.attention(compute, config.head_dim),
        dtype=compute,
        device=device.torch_device,
        num_bytes=num_bytes,
        unsupported=_unsupported(recording, config),
        states=recording.states,
    )
    _log_geometry(config, recording)
    if route.self_check:
        model = check_paged(model, recording, is_quantised=quantization != "none")
    else:
        _log.warning("--no-self-check: nobody has checked that this model's answers are those of transformers")
    if progress is not None:
        progress(total, total)
    return model


def _stored_dtype(config: ModelConfig, tensors: Iterable[StoredTensor]) -> torch.dtype:
    """Return the checkpoint's number format: as its config.json says, else that of the first tensor with a known
    one."""
    named = COMPUTED_DTYPES.get(config.checkpoint_dtype or "")
    if named is not None:
        return named
    kinds = (BY_STORED[one.dtype].name for one in tensors if one.dtype in BY_STORED)
    return next((COMPUTED_DTYPES[name] for name in kinds if name in COMPUTED_DTYPES), torch.float32)


def _recorded(causal: Any, config: ModelConfig) -> Recording:
    """Run the model once, and return what it did. Raises StartupError where the fallback cannot do the same."""
    with _as_startup_error(f"MODEL: transformers' modules of model_type {config.model_type!r} do not run"):
        try:
            take_over(causal)
            move_states(causal)
            return record(
                causal, config.num_layers, config.max_position_embeddings, has_indexers=config.index is not None
            )
        except UnsupportedAttention as error:
            hint = _DECODES if isinstance(error, SeesLaterRows) and not _decodes(causal) else ""
            raise StartupError(
                f"MODEL: model_type {config.model_type!r} cannot run by the fallback: {error}{hint}", flag="MODEL"
            ) from error


def _decodes(causal: Any) -> bool:
    return bool(getattr(causal.config.get_text_config(decoder=True), "is_decoder", True))


def _swap_modules(
    causal: Any,
    kept: Collection[nn.Module],
    method: LinearMethod,
    kernels: LayerKernels,
    compute: torch.dtype,
    quantization: str,
) -> int:
    """Put the device's linear layers, but for those `kept`, experts and norms in place of the model's; return the bytes
    of all weights."""
    swaps = ModuleSwaps(causal, compute)
    if method.name != "plain":
        swaps.linears(method, kept)
        swaps.experts(method, kernels, is_quantised=quantization != "none")
    swaps.norms(kernels)
    if quantization != "none":
        _log.info(
            "linear layers and experts of transformers are quantised; other weights stay as they are",
            quantization=quantization,
            quantised_parameters=swaps.num_swapped,
            other_parameters=sum(parameter.numel() for parameter in causal.parameters()),
        )
    return swaps.num_bytes + _dense_bytes(causal)


def _with_geometry(config: ModelConfig, recording: Recording) -> ModelConfig:
    """Return `config` with the pool's geometry: the widest of the recorded calls of attention.

    Without any attention, one small layer stands for the pool that blocks are counted in.
    """
    width = max((max(call.key_width, call.value_width) for call in recording.calls), default=2)
    return replace(
        config,
        num_layers=max(1, len(recording.calls)),
        num_heads=max((call.num_heads for call in recording.calls), default=1),
        num_kv_heads=max((call.num_kv_heads for call in recording.calls), default=1),
        # Kernels take pairs.
        head_dim=width + width % 2,
    )


def transformers_version() -> str:
    """Return the version of the installed transformers. Raises StartupError where there is none."""
    try:
        from transformers import __version__
    except ImportError as error:
        raise StartupError(
            "MODEL is of no native family, and transformers, which may know it, is not installed: "
            "pip install 'penstock[fallback]'",
            flag="MODEL",
        ) from error
    return str(__version__)


def _check_type(model_type: str, config: ConfigReader, route: ModelRoute) -> None:
    """Refuse models that transformers has no decoder for. Raises StartupError."""
    version = transformers_version()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    if config.values.get("is_encoder_decoder") or (
        model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ):
        raise _no_decoder(model_type)
    if _runs_code(config, route):
        _log.warning(
            "--trust-remote-code: Python code of MODEL's folder runs with all the rights of this process",
            files=sorted({str(name) for name in config.values["auto_map"].values()}),
        )
        return
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if model_type in _SEEING:
        _log.warning("the text part of this model is served: prompts have no images", model_type=model_type)
        return
    if _has_code(config):
        raise StartupError(
            f"{config.source}: model_type {model_type!r} brings its own code (auto_map): read it, then "
            "--trust-remote-code runs it, with all the rights of this process",
            flag="--trust-remote-code",
        )
    if model_type in CONFIG_MAPPING:
        raise config.error("model_type", f"{model_type!r} has no causal language model in transformers {version}")
    raise config.error(
        "model_type",
        f"{model_type!r} is unknown here and to transformers {version}: a newer transformers may know it "
        "(pip install -U transformers), or --trust-remote-code where the folder brings its code",
    )


def _has_code(config: ConfigReader) -> bool:
    auto_map = config.values.get("auto_map")
    return isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map


def _runs_code(config: ConfigReader, route: ModelRoute) -> bool:
    return route.trust_remote_code and _has_code(config)


def _no_decoder(model_type: str) -> StartupError:
    return StartupError(
        f"MODEL: model_type {model_type!r} is an encoder-decoder: Penstock serves decoder-only models", flag="MODEL"
    )


def _refuse_state(model_type: str, whole: Any) -> None:
    """Refuse models that keep a state of their own elsewhere than in transformers' cache. Raises StartupError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = next(
        (
            MODEL_FOR_CAUSAL_LM_MAPPING[type(one)]
            for one in (whole, whole.get_text_config(decoder=True))
            if type(one) in MODEL_FOR_CAUSAL_LM_MAPPING
        ),
        None,
    )
    # The class registers its layers' kinds with transformers' cache.
    if getattr(kind, "_is_stateful", False) and not has_states(whole):
        raise StartupError(
            f"MODEL: layers of model_type {model_type!r} keep a state of their own in another form than that of "
            "transformers' cache: such models are not served",
            flag="MODEL",
        )


class _Numbers:
    """Whole numbers of a configuration of transformers, which knows a field's other names."""

    def __init__(self, config: ConfigReader, text: Any) -> None:
        self._config = config
        self._text = text

    def __call__(self, name: str, default: int | None = None, *, maximum: int = 2**31 - 1) -> int:
        """Return it. Raises StartupError naming the field."""
        value = self._value(name)
        # Some models have one for each layer.
        if isinstance(value, (list, tuple)) and value and all(isinstance(one, int) for one in value):
            value = max(value)
        return ConfigReader({name: value}, self._config.source).integer(name, default, maximum=maximum)

    def _value(self, name: str) -> Any:
        # A field that layers have each refuses to be read as one.
        if name in (getattr(self._text, "per_layer_attributes", None) or ()):
            return [getattr(self._text.per_layer_config[place], name) for place in range(self("num_hidden_layers"))]
        return getattr(self._text, name, None)


def _context(text: Any, number: _Numbers, model_type: str) -> int:
    """Return the most positions of a sequence.

    Some rotary embeddings change with the longest sequence of a batch. Below the length of the change they are the same
    for all sequences; a longer sequence would change others.
    """
    # MPT has another name for it.
    most = number("max_position_embeddings", number("max_seq_len", _UNBOUNDED_CONTEXT))
    # Where contexts are longer, rows of Doge leave out some keys.
    limits = [min(most, number("keep_window_size", most))]
    for rope in _ropes(text):
        kind = rope.get("rope_type")
        if kind == "longrope" or "dynamic" in str(kind):
            own = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limits.append(min(most, int(own or most)))
    least = min(limits, default=most)
    if least < most:
        _log.warning(
            "the context ends where this model's attention or rotary embedding changes for all sequences of a batch",
            model_type=model_type,
            context=least,
            instead_of=most,
        )
    return least


def _ropes(text: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embeddings of a configuration, one or several by type of layer."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if isinstance(found, dict):
        nested = [one for one in found.values() if isinstance(one, dict)]
        yield from nested or [found]


def _ids(whole: Any, text: Any, name: str) -> tuple[int, ...]:
    for config in (whole, text):
        value = getattr(config, name, None)
        values = value if isinstance(value, (list, tuple)) else [value]
        found = tuple(dict.fromkeys(one for one in values if isinstance(one, int) and one >= 0))
        if found:
            return found
    return ()


def _loaded(folder: Path, config: ModelConfig, route: ModelRoute, dtype: torch.dtype) -> tuple[Any, int]:
    """Return the model with its weights, and the number of its matrices that the folder has in a quantised format.
    Raises StartupError naming missing tensors."""
    num_dequantised = 0
    with _quiet(), _as_startup_error(f"MODEL: transformers cannot load {folder}"):
        from transformers import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
        )

        own: Any = AutoConfig.from_pretrained(folder, trust_remote_code=route.trust_remote_code, local_files_only=True)
        if getattr(own.get_text_config(decoder=True), "output_router_logits", False):
            own.get_text_config(decoder=True).output_router_logits = False
        causal: Any
        info: dict[str, Any]
        factory: Any = AutoModelForCausalLM
        if type(own) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(own) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            # A model that also sees; without images its head is that of a decoder.
            factory = AutoModelForImageTextToText
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
        if config.checkpoint_format:
            # Transformers would ask for the format's own library, and for a GPU.
            for name in QUANTISED_FIELDS:
                if hasattr(own, name):
                    delattr(own, name)
            with torch.device("meta"):
                blank: Any = factory.from_config(own, trust_remote_code=route.trust_remote_code)
            linears = {
                name: (module.out_features, module.in_features)
                for name, module in blank.named_modules()
                if isinstance(module, torch.nn.Linear)
            }
            tensors, num_dequantised = read_dense(folder, linears, dtype)
            causal, info = type(blank).from_pretrained(None, config=own, state_dict=tensors, **options)
        else:
            causal, info = factory.from_pretrained(
                folder,
                config=own,
                trust_remote_code=route.trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                **options,
            )
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(one if isinstance(one, str) else one[0]) for one in info.get(kind) or ())
        if names:
            what = "lacks" if kind == "missing_keys" else "has in another shape"
            raise StartupError(f"{folder} {what} {', '.join(names[:5])} ({len(names)} tensors)", flag="MODEL")
    unexpected = sorted(map(str, info.get("unexpected_keys") or ()))
    if unexpected and (folder / GGUF_FILE).exists():
        # All of its tensors were named: the facts ask for another model.
        raise StartupError(f"{folder} has tensors that its facts do not ask for: {unexpected[0]}", flag="MODEL")
    if unexpected:
        _log.warning(
            "tensors of the checkpoint that the model does not have", count=len(unexpected), some=unexpected[:5]
        )
    return causal.eval().requires_grad_(False), num_dequantised


def _forms(count: int, compute: torch.dtype, quantization: str) -> tuple[tuple[str, int], ...]:
    """Return the form in which `count` matrices of a quantised checkpoint run: see ModelConfig.weight_forms."""
    form = dtype_name(compute) if quantization == "none" else quantization
    return ((form, count),) if count else ()


def _dense_bytes(causal: Any) -> int:
    """Return the bytes of parameters and buffers; shared ones count once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*causal.parameters(), *causal.buffers())}
    return sum(tensors.values())


def _unsupported(recording: Recording, config: ModelConfig) -> dict[str, str]:
    found = dict(NOT_ATTENDED) if recording.states else {}
    if not all(call.is_plain(config.num_kv_heads) for call in recording.calls):
        found["output.output_attentions"] = NO_ATTENTIONS
    if config.index is not None:
        found |= NOT_WHOLE
    if not recording.has_hidden_states:
        found |= dict.fromkeys(("output.output_hidden_states", "config.dola_layers"), NO_HIDDEN_STATES)
    if not recording.takes_embeds:
        found["inputs_embeds"] = NO_EMBEDS
    return found


def _log_geometry(config: ModelConfig, recording: Recording) -> None:
    used = sum(call.num_kv_heads * (call.key_width + call.value_width) for call in recording.calls)
    taken = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    _log.info(
        "the model runs by transformers' modules",
        model_type=config.model_type,
        architecture=config.architecture,
        layers=len(recording.calls),
        windows=sorted({call.window for call in recording.calls if call.window is not None}),
        chunks=sorted({call.chunk for call in recording.calls if call.chunk is not None}),
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        # All layers have the pool's widest geometry.
        used_of_pool=round(used / taken, 2),
        state_bytes_of_a_sequence=state_bytes(recording.states),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and advice out of the log inside the block."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def _as_startup_error(what: str) -> Iterator[None]:
    """Turn any error of transformers inside the block into a StartupError naming MODEL."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:  # of any kind: files and, where trusted, code of other people
        text = " ".join(str(error).split())
        raise StartupError(f"{what}: {type(error).__name__}: {text[:300]}", flag="MODEL") from error
