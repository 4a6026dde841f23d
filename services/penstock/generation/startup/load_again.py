"""A loaded model read from its files again, for a Reload. Blocking: runs on a thread of its own."""

from __future__ import annotations

from dataclasses import replace

from penstock.common.checkpoint import OWN_HEAD
from penstock.common.errors import StartupError
from penstock.common.heap import trim_heap
from penstock.common.progress import CountBytes
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.device_registry import open_device
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.mtp import load_mtp
from penstock.generation.models.registry import read_model_config
from penstock.generation.startup.load_head import HeadDraft
from penstock.generation.startup.load_weights import check_room
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.startup.read_model import read_model
from penstock.generation.weights.sharding import FLAG

# Fields of ModelConfig that loading sets, and those that it sets in the fallback.
_LOADED = ("dtype", "num_parameters", "weight_forms")
_RECORDED = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "index")


def load_again(config: GenerationServiceConfig, loaded: LoadedModel, count: CountBytes) -> LoadedModel:
    """Return `loaded` with weights, device and runner made anew; the KV pool and all else are the same. So is a draft
    model, and a draft head but one that the checkpoint carries.

    Both models are in memory until the caller lets the old one go. `count` gets the bytes and may raise to give up.
    Raises StartupError when the folder cannot be read, holds another model or tokenizer, or memory is short.
    """
    files, weights = loaded.files, loaded.weights
    if weights.ranks is not None:
        raise StartupError(f"a model of several processes is not read again: start anew ({FLAG})", flag=FLAG)
    old = weights.model.config
    # The loader sets these.
    known = {name: getattr(old, name) for name in (*_LOADED, *(_RECORDED if old.route == "fallback" else ()))}
    found = replace(read_model_config(files.folder, config.route), **known)
    if found != old or files.tokenizer_fingerprint() != loaded.served.tokenizer_fingerprint:
        raise StartupError("MODEL's folder holds another model or tokenizer: start a process for it", flag="MODEL")
    device = open_device(config.device)
    device.start(num_threads=config.threads, kernels=config.kernels, compact_weights=config.compact_weights)
    check_room(config, replace(files, config=found), device, None, device.memory().available)
    model = read_model(config, files.folder, device, count)
    if model.config != old:
        raise StartupError("MODEL's weights have another number format: start a process for them", flag="MODEL")
    head, draft = weights.head, loaded.engine.draft
    if config.draft_head == OWN_HEAD:
        assert isinstance(model, CausalLM), "a head drafts for a native model"
        assert isinstance(draft, HeadDraft)
        head = load_mtp(files.folder, model, device, config.quantization, count)
        draft = replace(draft, head=head)
    trim_heap()
    return replace(
        loaded,
        weights=replace(weights, model=model, head=head, device=device),
        engine=replace(loaded.engine, runner=loaded.engine.runner.over(model), draft=draft),
    )
