"""Bits by cost: what rounding changes in a layer's output decides, and a mean number of bits is the bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.quantise.bit_plan import Unit, forms_within, unit_costs
from penstock.generation.quantise.grid import GridSettings, round_to_nearest
from penstock.generation.quantise.layer_stream import LayerStream
from penstock.generation.weights.safetensors_folder import Checkpoint

FORMS = [GridSettings(64, 4, torch.bfloat16), GridSettings(32, 4, torch.bfloat16)]
NAMES = {
    "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "o": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


def stream(tmp_path: Path, family: str = "llama") -> LayerStream:
    tiny_checkpoint(tmp_path / "model", family, num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    documents = torch.arange(5, 37).view(2, 16)
    return LayerStream(tmp_path / "model", Checkpoint(tmp_path / "model"), documents)


def test_units_with_the_largest_cost_for_a_weight_come_first_and_fill_what_is_spare() -> None:
    units = [
        Unit(("a",), 100, (5.0,)),
        Unit(("b",), 100, (4.0,)),
        Unit(("c",), 700, (21.0,)),
        Unit(("d",), 100, (1.0,)),
    ]
    # 4 bits each are 4000; 5.2 in the mean leave 1200: c would take 2800.
    assert forms_within(units, (4.0, 8.0), 5.2) == [1, 1, 0, 1]
    assert forms_within(units, (4.0, 8.0), 4.4) == [1, 0, 0, 0]
    assert forms_within(units, (4.0, 8.0), 4.0) == [0, 0, 0, 0]
    assert forms_within(units, (4.0, 8.0), 8.0) == [1, 1, 1, 1]


def test_a_form_between_is_taken_where_it_saves_more_for_a_bit_and_left_where_bits_are_spare() -> None:
    units = [Unit(("a",), 100, (40.0, 34.0)), Unit(("b",), 100, (8.0, 6.0)), Unit(("c",), 100, (2.0, 2.0))]
    bits = (4.0, 4.5, 8.0)
    # Of a: 12 a bit to the next form, 10 to the last, from the next to the last 9.7. Of b: 4, 2, 1.7. Of c: 0.5 to the
    # last.
    assert forms_within(units, bits, 4.0 + 51 / 300) == [1, 0, 0]
    assert forms_within(units, bits, 4.0 + 401 / 300) == [2, 0, 0]
    assert forms_within(units, bits, 4.0 + 451 / 300) == [2, 1, 0]
    assert forms_within(units, bits, 4.0 + 801 / 300) == [2, 2, 0]
    assert forms_within(units, bits, 8.0) == [2, 2, 2]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_cost_is_the_change_of_the_layers_output(tmp_path: Path, family: str) -> None:
    with torch.inference_mode():
        found = stream(tmp_path, family)
        before, done = found.states.clone(), []
        units = unit_costs(found, lambda _: list(NAMES.values()), FORMS, done.append)
        assert torch.equal(found.states, before)
        assert done == [1, 2]
        assert [unit.modules for unit in units[4:]] == [
            tuple(f"model.layers.1.{name}" for name in names) for names in NAMES.values()
        ]
        # By hand: the second layer, its down_proj rounded.
        found.load(0)
        states = list(found.outputs(0, found.states))
        layer = found.load(1)
        exact = torch.stack(list(found.outputs(1, states)))
        weight = layer.get_submodule("mlp.down_proj").get_parameter("weight")
        costs = []
        for form in FORMS:
            whole = weight.clone()
            weight.copy_(round_to_nearest(weight, form))
            changed = torch.stack(list(found.outputs(1, states)))
            weight.copy_(whole)
            costs.append(float(((changed - exact).square().sum(-1) / exact.square().sum(-1)).mean()))
    assert units[7].weights == weight.numel()
    assert units[7].costs == pytest.approx(costs, rel=1e-4)
    assert all(min(unit.costs) > 0.0 for unit in units)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_matrices_with_one_input_are_a_unit(tmp_path: Path, family: str) -> None:
    with torch.inference_mode():
        found = stream(tmp_path, family)
        found.load(0)
        names = [name for names in NAMES.values() for name in names]
        assert found.shared_inputs(0, names) == list(NAMES.values())
