"""Gemma 4 beyond logits: rows that go on alone, slots that layers share, folders of models that also see, and what
stays with the fallback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import request, run
from factories.engine.model_engine import model_engine
from factories.engine.pools import spoil
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.model_types import greedy_ids, reference_of, tiny_model_type
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.run_kernels import cpu_device
from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.cache_layout import CacheLayout, LayerSight, layout_of
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.core.media_ids import MediaIds
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model, read_model_config
from safetensors.torch import load_file, save_file
from torch import Tensor

FAMILY, WEIGHTS = "gemma4_text", "model.safetensors"
# Ids of what is no text, in small vocabularies.
IMAGE, VIDEO, AUDIO = 150, 151, 152
BLOCK = 4


def load(folder: Path, **options: Any) -> CausalLM:
    model = load_model(folder, device=cpu_device(), **options)
    assert isinstance(model, CausalLM)
    return model


def seeing_folder(folder: Path, model_type: str) -> Path:
    """Write a random model that also sees, with ids of images that its vocabulary has, and return `folder`."""
    tiny_model_type(folder, model_type)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}
    values["text_config"]["pad_token_id"] = 2
    path.write_text(json.dumps({**values, **ids}))
    return folder


def layout_for(model: CausalLM) -> CacheLayout:
    return layout_of(model.sights, model.config.kv_widths)


class Steps:
    """Steps of two sequences over a pool with the layout that a start makes."""

    def __init__(self, model: CausalLM, lengths: list[int], kv_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.layout = layout = layout_for(model)
        each = -(-max(lengths) // BLOCK)
        requested = "int8" if kv_dtype is torch.int8 else "auto"
        shape = KVShape.of(model.config, model.dtype, BLOCK, requested=requested, num_layers=layout.layers_a_block)
        self.kv = shape.pool(each * len(lengths) * layout.bundle_blocks, model.device, layout=layout)
        spoil(self.kv)
        draw = random.Random(3)
        self.ids = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
        blocks = torch.randperm(each * len(lengths) * layout.bundle_blocks, generator=torch.Generator().manual_seed(5))
        self.tables = blocks.view(layout.bundle_blocks, len(lengths), each).int()

    def step(self, starts: list[int], ends: list[int], rows: list[int] | None) -> Tensor:
        """Return the hidden states of `rows` (None: all) of a step with tokens [start, end) of each sequence."""
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        metadata, positions = AttentionMetadata.build(counts, ends, self.tables, BLOCK)
        ids = [token for own, start, end in zip(self.ids, starts, ends, strict=True) for token in own[start:end]]
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        return self.model.forward(torch.tensor(ids), positions, metadata, self.kv, wanted).clone()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["plain", "int8"])
def test_slots_that_layers_share_give_the_numbers_of_places_of_their_own(
    tmp_path: Path, kv_dtype: torch.dtype | None
) -> None:
    model = load(tiny_checkpoint(tmp_path, FAMILY))
    steps = Steps(model, [29, 17], kv_dtype)
    # Two layers with windows beside each other, and one that reads everything: of five layers three have keys.
    assert (steps.layout.bundle_blocks, steps.layout.layers_a_block) == (2, 1)
    assert steps.layout.columns == (0, 0, 32)
    found = [steps.step([0, 0], [20, 11], None), steps.step([20, 11], [29, 17], None)]
    driver = PagedDriver(model, num_blocks=40, block_size=BLOCK, kv_dtype=kv_dtype)
    sequences = [PagedSequence(list(ids)) for ids in steps.ids]
    driver.step([(sequences[0], 20), (sequences[1], 11)])
    driver.step([(sequences[0], 9), (sequences[1], 6)])
    logits = [model.compute_logits(hidden) for hidden in found]
    own = [torch.cat((logits[0][:20], logits[1][:9])), torch.cat((logits[0][20:], logits[1][9:]))]
    for sequence, expected in zip(sequences, own, strict=True):
        assert torch.equal(torch.stack(sequence.logits), expected)


# The last rows of both; of one alone; some that are not the newest; none.
@pytest.mark.parametrize("rows", [[19, 30], [18, 19], [17, 18, 19, 29, 30], [30], [5, 30], [19, 29], []])
def test_wanted_rows_get_the_bits_that_they_have_among_all(tmp_path: Path, rows: list[int]) -> None:
    model = load(tiny_checkpoint(tmp_path, FAMILY))
    every = Steps(model, [29, 17]).step([0, 0], [20, 11], None)
    steps = Steps(model, [29, 17])
    assert torch.equal(steps.step([0, 0], [20, 11], rows), every[rows])
    # What the others left in the pool is whole, too.
    again = Steps(model, [29, 17])
    again.step([0, 0], [20, 11], None)
    assert torch.equal(steps.step([20, 11], [29, 17], [8, 14]), again.step([20, 11], [29, 17], None)[[8, 14]])


def test_layers_that_read_others_keys_take_no_memory() -> None:
    """The numbers of Gemma 4 E2B, by which 15 of 35 layers have keys, and two windows share a slot."""
    kinds = [LayerSight(512, align=64)] * 4 + [LayerSight()]
    layout = layout_of(kinds * 3, ([256] * 4 + [512]) * 3)
    assert [group.num_blocks for group in layout.groups] == [1, 2]
    assert layout.layers_a_block == 3
    assert layout.columns == (0, 256, 0, 256, 0) * 3
    # A token's keys and values of all layers, while its context is shorter than the window.
    assert layout.bundle_blocks * layout.layers_a_block * 512 == 12 * 256 + 3 * 512


@pytest.mark.parametrize("family", [FAMILY, "gemma4_unified_text"])
def test_a_folder_of_a_model_that_also_sees_starts_with_its_text_part(tmp_path: Path, family: str) -> None:
    folder = tiny_checkpoint(tmp_path, family, tie_word_embeddings=True)
    ids = [[5, 9, 7, 200]]

    def logits() -> Tensor:
        driver = PagedDriver(load(folder), num_blocks=9, block_size=BLOCK)
        sequence = PagedSequence(list(ids[0]))
        driver.prefill([sequence], 9)
        return torch.stack(sequence.logits)

    expected = logits()
    text = json.loads((folder / "config.json").read_text())
    whole_type = family.removesuffix("_text")
    # The text part may say otherwise, as transformers' own class does where it is told nothing: the whole's counts.
    text["tie_word_embeddings"] = False
    whole = {"model_type": whole_type, "tie_word_embeddings": True, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value for name, value in load_file(folder / WEIGHTS).items()
    }
    others = {"model.vision_tower.a": torch.zeros(2), "model.embed_vision.b": torch.zeros(3)}
    save_file(tensors | others, folder / WEIGHTS)
    assert read_model_config(folder).model_type == family
    assert torch.equal(logits(), expected)


# The beginning, amid others, and several at the end.
@pytest.mark.parametrize("prompt", [[IMAGE, 5, 7], [5, 9, IMAGE, VIDEO, 7], [8, AUDIO, IMAGE, IMAGE]])
@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_the_id_of_an_image_is_read_as_by_generate(tmp_path: Path, model_type: str, prompt: list[int]) -> None:
    """Without an image. Wide weights make another token of it, which the padding id is not."""
    folder = seeing_folder(tmp_path, model_type)
    # In the prompt and in steps of one token: these ids are drawn, too.
    ids = [*prompt, 3, AUDIO, 4, IMAGE]
    with torch.no_grad():
        expected = reference_of(folder)(torch.tensor([ids])).logits[0]
    driver = PagedDriver(load(folder), num_blocks=9, block_size=BLOCK)
    sequence = PagedSequence(list(prompt))
    driver.prefill([sequence], len(prompt))
    for token in ids[len(prompt) :]:
        sequence.token_ids.append(token)
        driver.step([(sequence, 1)])
    assert (torch.stack(sequence.logits) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_drawn_ids_after_that_of_an_image_are_those_of_generate(tmp_path: Path, model_type: str) -> None:
    folder = seeing_folder(tmp_path, model_type)
    prompts = [[5, 9, AUDIO], [IMAGE], [8, VIDEO, 3, VIDEO]]
    wanted = [greedy_ids(reference_of(folder), prompt, 8) for prompt in prompts]
    engine = model_engine(load(folder, dtype="float32"))
    asked = [request(one, request_id=str(place), max_new_tokens=8) for place, one in enumerate(prompts)]
    found = run(engine, *asked)
    assert [found[str(place)].ids[0] for place in range(len(prompts))] == wanted


@pytest.mark.parametrize(
    ("whole", "text", "expected"),
    [
        ({}, {}, None),
        ({"image_token_id": IMAGE}, {}, MediaIds((IMAGE,), 0)),
        ({"image_token_id": IMAGE, "audio_token_id": None}, {"pad_token_id": 3}, MediaIds((IMAGE,), 3)),
        ({"image_token_id": IMAGE}, {"pad_token_id": None}, None),
        ({"image_token_id": IMAGE}, {"pad_token_id": -1}, None),
        ({}, {"vocab_size": 262_144}, MediaIds((258_880, 258_881, 258_884), 0)),
    ],
)
def test_ids_of_images_are_known_by_the_configuration_of_the_whole(
    tmp_path: Path, whole: dict[str, Any], text: dict[str, Any], expected: MediaIds | None
) -> None:
    folder = tiny_checkpoint(tmp_path, FAMILY)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    # A text model's own fields of that name mean nothing.
    path.write_text(json.dumps({**values, "image_token_id": IMAGE}))
    assert read_model_config(folder).media_ids is None
    del values["pad_token_id"]
    path.write_text(json.dumps({"model_type": "gemma4", **whole, "text_config": {**values, **text}}))
    assert read_model_config(folder).media_ids == expected


def test_a_padding_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, FAMILY)
    path = folder / "config.json"
    text = {**json.loads(path.read_text()), "pad_token_id": 999_999}
    path.write_text(json.dumps({"model_type": "gemma4", "image_token_id": IMAGE, "text_config": text}))
    with pytest.raises(StartupError, match=r"text_config\.pad_token_id \(999999\) is not in the vocabulary"):
        read_model_config(folder)


def test_products_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    """Published ones have products of keys and values in layers that read others'."""
    folder = tiny_checkpoint(tmp_path, FAMILY)
    tensors = load_file(folder / WEIGHTS)
    unread = {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.full((3, 3), torch.nan)
        for layer in (3, 4)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    save_file(tensors | unread, folder / WEIGHTS)
    driver = PagedDriver(load(folder), num_blocks=9, block_size=BLOCK)
    sequence = PagedSequence([3, 5, 7])
    driver.prefill([sequence], 9)
    with torch.no_grad():
        expected = reference_model(folder)(torch.tensor([[3, 5, 7]])).logits[0]
    assert (torch.stack(sequence.logits) - expected).abs().max() < 1e-4


def test_fields_of_the_hub_mean_the_same(tmp_path: Path) -> None:
    """Before transformers 5.20 a layer's own sizes were fields of the whole."""
    folder = tiny_checkpoint(tmp_path, FAMILY, attention_k_eq_v=True, num_global_key_value_heads=1)
    expected = read_model_config(folder)
    values = json.loads((folder / "config.json").read_text())
    del values["per_layer_config"]
    (folder / "config.json").write_text(json.dumps({**values, "global_head_dim": 32, "num_global_key_value_heads": 1}))
    assert read_model_config(folder) == expected
    assert {(shape.num_kv_heads, shape.head_dim) for shape in expected.layer_shapes} == {(2, 16), (1, 32)}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        (
            {"per_layer_config": {"1": {"intermediate_size": 8}}},
            "per_layer_config.1.intermediate_size is not supported",
        ),
        ({"num_kv_shared_layers": 5}, r"num_kv_shared_layers \(5\) leaves sliding_attention nothing to read"),
    ],
)
def test_what_the_family_does_not_have_is_named(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    from penstock.generation.core.model_config import ModelRoute, UnsupportedField

    folder = tiny_checkpoint(tmp_path, FAMILY)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | fields))
    with pytest.raises(UnsupportedField, match=reason):
        read_model_config(folder, ModelRoute("native"))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_layers_stay_near(tmp_path: Path, quantization: str) -> None:
    folder = tiny_checkpoint(tmp_path, FAMILY, hidden_size=64, intermediate_size=96, hidden_size_per_layer_input=32)
    found = []
    for format in ("none", quantization):
        driver = PagedDriver(load(folder, quantization=format), num_blocks=9, block_size=BLOCK)
        sequence = PagedSequence([3, 5, 7, 11])
        driver.prefill([sequence], 9)
        found.append(torch.stack(sequence.logits))
    exact, rounded = found
    assert not torch.equal(exact, rounded)
    assert (rounded - exact).abs().mean() < (0.1 if quantization == "int8" else 0.6) * exact.abs().mean()
