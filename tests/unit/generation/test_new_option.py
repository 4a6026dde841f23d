"""An option that is added while the tests run goes all the way: a field of a proto, a row, a parameter, a warper."""

from __future__ import annotations

import json
from dataclasses import field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories.run_kernels import new_sampler
from factories.sequences import sequence
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from penstock.cli.client import sampling as command_line
from penstock.common.errors import InvalidArgument, StartupError
from penstock.common.options import options_of
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options import resolve as resolving
from penstock.generation.options.hf_json import load_defaults
from penstock.generation.options.kinds import INTEGER, SIZE
from penstock.generation.options.limits import RequestLimits
from penstock.generation.options.option_spec import OptionSpec, Scope
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import Resolved, resolve
from penstock.generation.options.table import CONFIG, RequestOptions
from penstock.generation.options.validate import validate
from penstock.generation.sampling import batch, row_plan
from penstock.generation.sampling.processors import OTHER_WARPERS, WARPERS
from penstock.generation.sampling.processors.base import Warper
from penstock.generation.wire import options as wire
from penstock.v1 import common_pb2, config_pb2

from tools import option_tables

MODEL = ModelFacts("tiny", vocab_size=50, max_context_tokens=100)
LIMITS = RequestLimits()
ROW = OptionSpec(
    name="first_ids", section="config", kind=INTEGER, doc="Sample among so many of the first ids; 0 is off.",
    bounds=SIZE, limit="max_ngram", scope=Scope.SAMPLING, silent=(0,), param="first_ids", flags="Generation",
    default=0,
)  # fmt: skip
Params: Any = make_dataclass(
    "Params", [("first_ids", int, field(default=0))], bases=(SamplingParams,), frozen=True, slots=True
)


class FirstIds(Warper):
    """Drops all but the first ids."""

    def __init__(self, params: Any, device: torch.device) -> None:
        self._counts = [p.first_ids for p in params]

    @staticmethod
    def wants(params: Any) -> bool:
        return bool(params.first_ids > 0)

    def apply(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        for scores_V, place in zip(scores_RV, rows_R.tolist(), strict=True):
            if self._counts[place] > 0:
                scores_V[self._counts[place] :] = -torch.inf


def with_the_field() -> Any:
    """GenerationConfig of a proto that has `first_ids` too."""
    common, config = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    common_pb2.DESCRIPTOR.CopyToProto(common)
    config_pb2.DESCRIPTOR.CopyToProto(config)
    message = next(one for one in config.message_type if one.name == "GenerationConfig")
    message.field.add(
        name="first_ids", number=500, type=descriptor_pb2.FieldDescriptorProto.TYPE_UINT32, label=1,
        proto3_optional=True, oneof_index=len(message.oneof_decl),
    )  # fmt: skip
    message.oneof_decl.add(name="_first_ids")
    pool = descriptor_pool.DescriptorPool()
    for dependency in common_pb2.DESCRIPTOR.dependencies:
        pool.AddSerializedFile(dependency.serialized_pb)
    pool.Add(common)
    pool.Add(config)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.v1.GenerationConfig"))


@pytest.fixture
def message(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The option is there; the message class that has it."""
    made = with_the_field()
    monkeypatch.setitem(CONFIG, ROW.name, ROW)
    monkeypatch.setattr(RequestOptions, ROW.name, None, raising=False)
    monkeypatch.setattr(wire, "config_pb2", SimpleNamespace(GenerationConfig=made))
    monkeypatch.setattr(resolving, "SamplingParams", Params)
    monkeypatch.setattr(batch, "WARPERS", (FirstIds, *WARPERS))
    monkeypatch.setattr(row_plan, "OTHER_WARPERS", (FirstIds, *OTHER_WARPERS))
    return made


def resolved(config: Any, defaults: ModelDefaults | None = None) -> Resolved:
    """What the service makes of the bytes of a request's config."""
    options = wire.to_options(type(config).FromString(config.SerializeToString()))
    request = GenerateOptions(prompt_token_ids=[1, 2], options=options, seed=1)
    validate(request, MODEL, LIMITS)
    return resolve(request, defaults or ModelDefaults(eos_token_ids=(3,)), MODEL, LIMITS)


def params_of(resolved: Resolved) -> Any:
    return resolved.params


def drawn(params: SamplingParams) -> set[int]:
    """Tokens of many draws from even scores."""
    many = [sequence([1, 2], params, seq_id=number, output=[5] * number) for number in range(40)]
    return {token.token_id for token in new_sampler().sample(torch.zeros(40, MODEL.vocab_size), many)}


def test_it_decides_what_is_drawn(message: Any) -> None:
    config = message(do_sample=True, top_k=0, max_new_tokens=50, first_ids=4)
    assert drawn(resolved(config).params) == {0, 1, 2, 3}
    config.first_ids = 0
    assert len(drawn(resolved(config).params)) > 10


def test_it_is_checked_and_bounded(message: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.first_ids: must be at most 256"):
        resolved(message(first_ids=257))
    with pytest.raises(InvalidArgument, match=r"config\.first_ids: must be finite and >= 0"):
        validate(GenerateOptions(prompt_token_ids=[1], options=RequestOptions(first_ids=-1)), MODEL, LIMITS)


def test_it_is_warned_about_where_nothing_is_sampled(message: Any) -> None:
    told = resolved(message(first_ids=4, max_new_tokens=5))
    assert "config.first_ids has no effect: nothing is sampled, set config.do_sample to sample" in told.warnings
    assert params_of(told).first_ids == 0
    assert resolved(message(first_ids=0, max_new_tokens=5)).warnings == ()


def test_a_models_file_sets_it_and_a_request_goes_over_it(message: Any, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "first_ids": 7}))
    loaded = load_defaults(tmp_path, (3,), MODEL.vocab_size)
    assert loaded.ignored == ()
    assert wire.from_options(loaded.defaults.options) == message(do_sample=True, first_ids=7)
    assert params_of(resolved(message(), loaded.defaults)).first_ids == 7
    assert params_of(resolved(message(first_ids=2), loaded.defaults)).first_ids == 2
    file.write_text(json.dumps({"first_ids": "seven"}))
    with pytest.raises(StartupError, match="has first_ids that is not a number"):
        load_defaults(tmp_path, (3,), MODEL.vocab_size)


def test_it_is_told_of_everywhere(message: Any) -> None:
    assert "| `first_ids` | 0 | ≥ 0; at most `--max-ngram` | Sample among so many" in option_tables.page()
    assert (
        "    # Sample among so many of the first ids; 0 is off.\n    first_ids: int\n" in option_tables.python_table()
    )
    assert '  first_ids: "plain",' in option_tables.node_table()
    name, kind, flag = command_line._flag(ROW)
    config = make_dataclass("Config", [(name, kind, flag)], frozen=True)
    (bound,) = options_of(config)
    assert (bound.flag, bound.settings.help, bound.parse("5")) == ("--first-ids", ROW.doc, 5)


def test_without_its_row_nobody_knows_it() -> None:
    with pytest.raises(KeyError):
        RequestOptions(first_ids=4)
