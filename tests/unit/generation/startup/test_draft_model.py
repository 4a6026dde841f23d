"""A model under a vocabulary of another size: the same model, and nothing likely beyond its own ids."""

from __future__ import annotations

import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from penstock.generation.models.decoder import CausalLM
from penstock.generation.startup.draft_model import ResizedVocabulary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model")))


def test_logits_are_the_models_with_nothing_behind_them(model: CausalLM) -> None:
    hidden = torch.randn(3, model.config.hidden_size)
    own = model.compute_logits(hidden)
    larger = ResizedVocabulary(model, VOCAB_SIZE + 5).compute_logits(hidden)
    assert torch.equal(larger[:, :VOCAB_SIZE], own)
    assert larger.shape == (3, VOCAB_SIZE + 5)
    assert bool((larger[:, VOCAB_SIZE:] == -torch.inf).all())
    smaller = ResizedVocabulary(model, VOCAB_SIZE - 7).compute_logits(hidden)
    assert torch.equal(smaller, own[:, :-7])
    assert smaller.is_contiguous()


def test_an_id_that_it_has_not_is_read_as_its_last(model: CausalLM) -> None:
    larger = ResizedVocabulary(model, VOCAB_SIZE + 5)
    ids = torch.tensor([3, VOCAB_SIZE - 1, VOCAB_SIZE + 4])
    assert torch.equal(larger.embed(ids), model.embed(torch.tensor([3, VOCAB_SIZE - 1, VOCAB_SIZE - 1])))
