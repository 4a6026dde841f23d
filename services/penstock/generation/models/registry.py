"""The native families, and the two functions that turn a folder into a configuration or a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.common.environment import cache_folder
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.common.progress import CountBytes, HeldCount
from penstock.generation.core.model_config import (
    CONFIG_FILE,
    ConfigReader,
    ModelConfig,
    ModelRoute,
    UnsupportedField,
    read_json,
)
from penstock.generation.devices.torch_dtypes import COMPUTED_DTYPES
from penstock.generation.layers.linear.base import INT4
from penstock.generation.models.delta_families import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from penstock.generation.models.dense_families import (
    COHERE,
    COHERE2,
    GLM,
    GLM4,
    GRANITE,
    LLAMA,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from penstock.generation.models.gemma import GEMMA2, GEMMA3
from penstock.generation.models.gemma4 import GEMMA4, GEMMA4_UNIFIED
from penstock.generation.models.importance_cache import kept
from penstock.generation.models.input_importance import measure_importance
from penstock.generation.models.latent_families import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    KIMI_K2,
    MINICPM3,
    SARVAM_MLA,
    YOUTU,
)
from penstock.generation.models.loaded_weights import Weights
from penstock.generation.models.loader import build_model
from penstock.generation.models.mixtures import GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from penstock.generation.models.sparse_families import DEEPSEEK_V32, GLM_MOE_DSA
from penstock.generation.models.transformers_loading import load_transformers_model, read_transformers_config
from penstock.generation.weights.checkpoint_weights import CheckpointWeights
from penstock.generation.weights.files import is_packed
from penstock.generation.weights.packed_weights import PackedWeights
from penstock.generation.weights.quantised.table import open_checkpoint, read_format
from penstock.generation.weights.sharding import FLAG, Shard, ShardedSource, own_inputs
from penstock.generation.weights.stacked_experts import UnstackedExperts, stacked_shapes
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, layer_prefix, tensor_shapes, unread_prefixes
from penstock.generation.weights.text_part import read_media_ids, text_part

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.summed import Sum
    from penstock.generation.models.language_model import LanguageModel
    from penstock.generation.weights.checkpoint_weights import TensorSource

FAMILIES = {
    family.model_type: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, MISTRAL, PHI3, GRANITE, OLMO2, OLMO3, SMOLLM3, GLM, GLM4, COHERE, COHERE2),
        *(GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS),
        *(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, SARVAM_MLA, GLM4_MOE_LITE, YOUTU, MINICPM3),
        *(DEEPSEEK_V32, GLM_MOE_DSA),
        *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT),
    )
}
_log = get_logger("penstock.generation")
_AUTO = ModelRoute()


def read_model_config(folder: Path, route: ModelRoute = _AUTO) -> ModelConfig:
    """Read and check config.json (and eos of generation_config.json) of `folder`.

    A model of a native type with a field that its family does not honour takes the fallback, unless `route` insists.
    Raises StartupError naming the file and field; for a model that neither route runs, both reasons, or the flag or
    version that would help.
    """
    values = read_json(folder / CONFIG_FILE)
    config = ConfigReader(values, str(folder / CONFIG_FILE))
    whole, config = config, text_part(config)
    model_type = config.text("model_type")
    if config.values.get("is_encoder_decoder"):
        problem = f"is true: model_type {model_type!r} is an encoder-decoder by that, and Penstock serves decoders only"
        raise config.error("is_encoder_decoder", problem)
    path = folder / "generation_config.json"
    generation = ConfigReader(read_json(path) if path.is_file() else {}, str(path))
    if model_type in FAMILIES and route.route != "fallback":
        try:
            found = FAMILIES[model_type].model_config(config, generation)
        except UnsupportedField as refusal:
            if route.route == "native" or is_packed(folder):
                raise
            with _with_both_reasons(refusal.reason):
                return replace(read_transformers_config(whole, generation, folder, route), route_reason=refusal.reason)
        if whole is not config:
            found = replace(found, media_ids=read_media_ids(whole, found.vocab_size))
        form = read_format(config)
        return found if form is None else replace(found, checkpoint_format=form.description, kept_form=form.form)
    if route.route == "native":
        raise config.error(
            "model_type",
            f"{model_type!r} is not native; native are {', '.join(FAMILIES)}, and others may run by --model-route auto",
        )
    if is_packed(folder):
        raise StartupError("MODEL was packed for the native route: leave --model-route out", flag="--model-route")
    return read_transformers_config(whole, generation, folder, route)


def load_model(
    folder: Path,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    device: Device,
    progress: CountBytes | None = None,
    map_embeddings: bool = True,
    route: ModelRoute = _AUTO,
    shard: Shard | None = None,
    sum_parts: Sum | None = None,
) -> LanguageModel:
    """Load a Hugging Face folder (single or sharded safetensors), or one that `penstock pack` wrote.

    `dtype` is "auto" (the checkpoint's, where the device has it) or a name. `quantization` is "none", "int8" or "int4"
    (of the linear layers' weights, quantised as they are read), or "auto": as packed, none otherwise. `progress` is
    called with the loaded bytes of the weights and their total, equal at the end. `map_embeddings`: the embedding of a
    checkpoint is mapped from the page cache, like all of a packed model: see `device.mapped_files`; the fallback maps
    nothing. `shard`: only the part of a rank is loaded, and `sum_parts` adds up the ranks' results. Raises StartupError
    naming the file, tensor or field at fault, or --tensor-parallel.
    """
    config = read_model_config(folder, route)
    if shard is not None:
        shard.check(config)
        if is_packed(folder):
            raise StartupError(f"{FLAG} needs the checkpoint that MODEL was packed from", flag=FLAG)
    if config.route == "fallback":
        if config.route_reason:
            _log.info(
                "the native family does not have a field of this model: transformers' modules run it",
                model_type=config.model_type,
                reason=config.route_reason,
            )
        with _with_both_reasons(config.route_reason):
            return load_transformers_model(folder, config, route, device, dtype, quantization, progress)
    weights: Weights
    if is_packed(folder):
        weights = PackedWeights(folder, config, device, dtype, quantization, progress)
    else:
        weights = checkpoint_weights(
            folder, config, device, dtype, quantization, progress, map_embeddings=map_embeddings, shard=shard
        )
    return build_model(config if shard is None else shard.config(config), weights, device, sum_parts)


def checkpoint_weights(
    folder: Path,
    config: ModelConfig,
    device: Device,
    dtype: str,
    quantization: str,
    progress: CountBytes | None = None,
    *,
    map_embeddings: bool,
    shard: Shard | None = None,
) -> CheckpointWeights:
    """Return the weights of a Hugging Face folder after checking their names and shapes; arguments as of
    `load_model`."""
    show = None if progress is None else HeldCount(progress)
    checkpoint: TensorSource = _checked(folder, config, show)
    stored = COMPUTED_DTYPES.get(config.checkpoint_dtype or "")
    if stored is None:
        stored = checkpoint.dtype(EMBEDDING if EMBEDDING in checkpoint else LM_HEAD) or torch.bfloat16
    if dtype == "auto" and quantization != "none" and stored is torch.float16 and config.kept_form:
        # Of scales: the products of whole numbers work in bfloat16 or float32.
        stored = torch.bfloat16
    computed = device.compute_dtype(dtype, stored)
    weights = CheckpointWeights(
        checkpoint if shard is None else ShardedSource(checkpoint, config, shard),
        device,
        computed,
        quantization,
        is_tied=config.tie_word_embeddings and shard is None,
        map_embeddings=map_embeddings,
    )
    # Layers are measured one by one, without vectors of tokens.
    if quantization == INT4 and config.layer_inputs is None:
        weights.importance = cache(partial(_importance, folder, config, device, computed, show, shard))
    return weights


def _checked(folder: Path, config: ModelConfig, progress: CountBytes | None) -> TensorSource:
    """Open a checkpoint, and check the names and shapes of its tensors."""
    checkpoint = open_checkpoint(folder, progress)
    num_left_out = config.num_draft_layers if config.drafts_are_layers else 0
    for layer in range(config.num_layers, config.num_layers + num_left_out):
        checkpoint.leave_out(layer_prefix(layer))
    for prefix in unread_prefixes(config):
        checkpoint.leave_out(prefix)
    expected = tensor_shapes(config)
    optional: dict[str, tuple[int, ...]] = {}
    if config.tie_word_embeddings:
        optional[LM_HEAD] = expected[EMBEDDING]
        if LM_HEAD in checkpoint:
            optional[EMBEDDING] = expected.pop(EMBEDDING)
    expected, places = stacked_shapes(config, expected, checkpoint.__contains__)
    checkpoint.check(expected, optional)
    return UnstackedExperts(checkpoint, places) if places else checkpoint


def _importance(
    folder: Path,
    config: ModelConfig,
    device: Device,
    dtype: torch.dtype,
    progress: HeldCount | None,
    shard: Shard | None,
) -> dict[str, Tensor]:
    """Return the importance of the inputs of every matrix, of a rank's own inputs; arguments as of `load_model`.

    A rank reads the whole model, a layer at a time: so all find the same, and none waits for another.
    """

    def still(_done: int, _total: int) -> None:
        # What is read for this is read again when it is loaded; and a start that is cancelled ends here.
        if progress is not None:
            progress.again()

    def measure() -> dict[str, Tensor]:
        weights = CheckpointWeights(
            _checked(folder, config, still),
            device,
            dtype,
            "none",
            is_tied=False,
            map_embeddings=False,
            method=device.brief_linear_method(dtype),
        )
        return measure_importance(config, weights, device)

    found = kept(folder, Path(cache_folder()) / "importance", dtype, measure)
    return found if shard is None else own_inputs(found, config, shard)


@contextmanager
def _with_both_reasons(native: str) -> Iterator[None]:
    """Put the native family's reason for a refusal, if any, before that of a StartupError of the block."""
    try:
        yield
    except StartupError as error:
        if not native:
            raise
        raise StartupError(
            f"the native family refuses: {native}; the fallback cannot run it either: {error.message}", flag=error.flag
        ) from error


def supported_model_types() -> tuple[str, ...]:
    """Values of config.json's `model_type` that load natively."""
    return tuple(FAMILIES)


__all__ = ["FAMILIES", "StartupError", "load_model", "read_model_config", "supported_model_types"]
