"""A loaded model with some weights made anew of tensors that a caller gives. Blocking: runs on a thread of its own."""

from __future__ import annotations

from dataclasses import replace

from penstock.common.errors import InvalidArgument, StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.layers.linear.base import INT4
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.loader import build_model
from penstock.generation.models.model_parts import ReplacedWeights
from penstock.generation.startup.draft_model import DraftModel, ResizedVocabulary
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.weights.checkpoint_weights import CheckpointWeights
from penstock.generation.weights.files import is_packed
from penstock.generation.weights.new_tensors import NewTensors


def fixed_because(config: GenerationServiceConfig, loaded: LoadedModel, *, of_draft: bool = False) -> str:
    """Return why the model, or its draft model, takes no new weights; empty: it takes some."""
    if of_draft:
        if loaded.weights.head is not None:
            return "it is a draft head (--draft-head), which keeps its own weights"
        return _draft_fixed_because(config, loaded.weights.draft)
    facts = loaded.weights.model.config
    if loaded.weights.ranks is not None:
        return "it runs in several processes: leave --tensor-parallel out"
    if not isinstance(loaded.weights.model, CausalLM):
        return "transformers' modules run it (--model-route)"
    if is_packed(loaded.files.folder):
        return "it was packed: serve the checkpoint that it was packed from"
    if facts.checkpoint_format:
        return f"its checkpoint is quantised ({facts.checkpoint_format}): serve one of plain tensors"
    if config.quantization == INT4:
        return "--quantization int4 rounds by what its own weights let through: use int8 or none"
    if loaded.weights.adapters.depend_on_weights:
        return "an adapter was made for its present weights: unload those that train rows of the embedding"
    return ""


def _draft_fixed_because(config: GenerationServiceConfig, draft: LanguageModel | None) -> str:
    if isinstance(draft, ResizedVocabulary):
        return "it drafts for a vocabulary of another size"
    if not isinstance(draft, CausalLM):
        return "transformers' modules run it (--model-route)"
    if draft.parts is None or draft.config.checkpoint_format:
        return "it was packed, or its checkpoint is quantised: draft by one of plain tensors"
    if config.quantization == INT4:
        return "--quantization int4 rounds by what its own weights let through: use int8 or none"
    return ""


def replace_weights(
    config: GenerationServiceConfig, loaded: LoadedModel, tensors: NewTensors, *, of_draft: bool = False
) -> LoadedModel:
    """Return `loaded` with a model, or a draft model, in which `tensors` take the place of its own.

    Other parts are the same objects.

    The parts are made as at the load, so they have the bits of a start on a checkpoint with these tensors. Nothing of
    `loaded` changes. Raises InvalidArgument naming a tensor with numbers that cannot be held.
    """
    weights = loaded.weights
    model = weights.draft if of_draft else weights.model
    # Asked before, by `fixed_because`.
    assert isinstance(model, CausalLM)
    assert model.parts is not None
    tensors.check_finite()
    facts = model.config
    fresh = CheckpointWeights(
        tensors,
        weights.device,
        model.dtype,
        config.quantization,
        is_tied=facts.tie_word_embeddings,
        map_embeddings=False,
    )
    replaced = ReplacedWeights(model.parts, model.mapped_bytes, fresh, tensors.names)
    try:
        made = build_model(facts, replaced, weights.device)
    except StartupError as error:
        # Finite in its own dtype, but not in the model's.
        raise InvalidArgument("tensors", error.message.removeprefix(f"{tensors.folder}: ")) from error
    if not of_draft:
        return replace(loaded, weights=replace(weights, model=made))
    drafts = loaded.engine.draft
    assert isinstance(drafts, DraftModel)
    engine = replace(loaded.engine, draft=replace(drafts, model=made))
    return replace(loaded, weights=replace(weights, draft=made), engine=engine)
