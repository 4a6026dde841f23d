"""An option that is added while the tests run goes all the way: a field of a proto, a row, a parameter, a warper."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories.engine.sequences import sequence
from factories.models.run_kernels import new_sampler
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from penstock.cli.client import sampling as command_line
from penstock.common.errors import InvalidArgument, StartupError
from penstock.common.options import options_of
from penstock.generation.core.decoding_mode import Scope
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options import resolve as resolving
from penstock.generation.options.hf_json import load_defaults
from penstock.generation.options.kinds import INTEGER, SIZE
from penstock.generation.options.option_spec import OptionSpec
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import Resolved, resolve
from penstock.generation.options.table import SECTIONS, OutputOptions, RequestOptions, StopOptions
from penstock.generation.options.validate import validate
from penstock.generation.sampling import batch, row_plan
from penstock.generation.sampling.draw_context import DrawContext
from penstock.generation.sampling.processors import PROCESSORS
from penstock.generation.sampling.processors.base import Processor, Stage, params_by_row
from penstock.generation.wire import option_messages as wire
from penstock.v1 import common_pb2, config_pb2

from tools import option_tables

MODEL = ModelFacts("tiny", vocab_size=50, max_context_tokens=100)
LIMITS = RequestLimits()
NAME = "first_ids"
DOC = "Sample among so many of the first ids; 0 is off."
# Section -> its message, its options and its converter.
PARTS: dict[str, tuple[str, Any, Any]] = {
    "config": ("GenerationConfig", RequestOptions, wire.to_options),
    "stop": ("StopConfig", StopOptions, wire.to_stop),
    "output": ("OutputConfig", OutputOptions, wire.to_output),
}
Params: Any = make_dataclass(
    "Params", [("first_ids", int, field(default=0))], bases=(SamplingParams,), frozen=True, slots=True
)


class FirstIds(Processor):
    """Drops all but the first ids."""

    stage = Stage.WARP

    def __init__(self, rows: Any, states: Any, device: torch.device) -> None:
        self._rows: Any = params_by_row(rows, states)

    @staticmethod
    def wants(params: Any) -> bool:
        return bool(params.first_ids > 0)

    def apply(self, scores_RV: torch.Tensor, context: DrawContext) -> None:
        for place, params in context.picked(self._rows):
            scores_RV[place, params.first_ids :] = -torch.inf


def row_of(section: str) -> OptionSpec:
    return OptionSpec(
        name=NAME, section=section, kind=INTEGER, doc=DOC, bounds=SIZE, limit="max_ngram", scopes=(Scope.SAMPLING,),
        silent=(0,), param="first_ids", flags="Generation", default=0, in_file=section == "config",
    )  # fmt: skip


def with_the_field(section: str) -> dict[str, Any]:
    """Section -> message of a proto in which the one of `section` has `first_ids` too."""
    common, config = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    common_pb2.DESCRIPTOR.CopyToProto(common)
    config_pb2.DESCRIPTOR.CopyToProto(config)
    message = next(one for one in config.message_type if one.name == PARTS[section][0])
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
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"penstock.v1.{message_name}"))
        for name, (message_name, _, _) in PARTS.items()
    }


@dataclass
class Added:
    """The option, in one of the sections."""

    section: str
    messages: dict[str, Any]

    @property
    def path(self) -> str:
        return f"{self.section}.{NAME}"

    def resolved(self, value: int | None, defaults: ModelDefaults | None = None, **config: Any) -> Resolved:
        """Parameters that the service makes of the bytes of a request that sets the option (None: does not)."""
        fields = {name: {} for name in PARTS} | {"config": config}
        if value is not None:
            fields[self.section] = {**fields[self.section], NAME: value}
        parts = {}
        for name, (_, _, convert) in PARTS.items():
            told = self.messages[name](**fields[name]).SerializeToString()
            parts[name] = convert(self.messages[name].FromString(told))
        request = GenerateOptions(
            prompt_token_ids=[1, 2], options=parts["config"], stop=parts["stop"], output=parts["output"], seed=1
        )
        validate(request, MODEL, LIMITS)
        return resolve(request, defaults or ModelDefaults(eos_token_ids=(3,)), MODEL, LIMITS)


@pytest.fixture(params=PARTS)
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Added:
    """The option is there."""
    section: str = request.param
    messages = with_the_field(section)
    monkeypatch.setitem(SECTIONS[section], NAME, row_of(section))
    monkeypatch.setattr(PARTS[section][1], NAME, None, raising=False)
    monkeypatch.setattr(wire, "config_pb2", SimpleNamespace(GenerationConfig=messages["config"]))
    monkeypatch.setattr(resolving, "SamplingParams", Params)
    for module in (batch, row_plan):
        monkeypatch.setattr(module, "PROCESSORS", (*PROCESSORS, FirstIds))
    return Added(section, messages)


def params_of(resolved: Resolved) -> Any:
    return resolved.params


def drawn(params: SamplingParams) -> set[int]:
    """Tokens of many draws from even scores."""
    many = [sequence([1, 2], params, seq_id=number, output=[5] * number) for number in range(40)]
    return {token.token_id for token in new_sampler().sample(torch.zeros(40, MODEL.vocab_size), many)}


def test_it_decides_what_is_drawn(added: Added) -> None:
    config = {"do_sample": True, "top_k": 0, "max_new_tokens": 50}
    assert drawn(added.resolved(4, **config).params) == {0, 1, 2, 3}
    assert len(drawn(added.resolved(0, **config).params)) > 10


def test_it_is_checked_and_bounded(added: Added) -> None:
    with pytest.raises(InvalidArgument, match=rf"{added.section}\.first_ids: must be at most 256"):
        added.resolved(257)
    part = {"config": "options"}.get(added.section, added.section)
    wrong = GenerateOptions(prompt_token_ids=[1], **{part: PARTS[added.section][1](first_ids=-1)})
    with pytest.raises(InvalidArgument, match=rf"{added.section}\.first_ids: must be finite and >= 0"):
        validate(wrong, MODEL, LIMITS)


def test_it_is_warned_about_where_nothing_is_sampled(added: Added) -> None:
    told = added.resolved(4, max_new_tokens=5)
    assert f"{added.path} has no effect: nothing is sampled, set config.do_sample to sample" in told.warnings
    assert params_of(told).first_ids == 0
    assert added.resolved(0, max_new_tokens=5).warnings == ()


def test_a_models_file_sets_it_and_a_request_goes_over_it(added: Added, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "first_ids": 7}))
    loaded = load_defaults(tmp_path, (3,), MODEL.vocab_size)
    if added.section != "config":
        # The file is a GenerationConfig: it sets nothing else, and says so.
        assert loaded.ignored == (NAME,)
        assert params_of(added.resolved(None, loaded.defaults)).first_ids == 0
        return
    assert loaded.ignored == ()
    assert wire.from_options(loaded.defaults.options) == added.messages["config"](do_sample=True, first_ids=7)
    assert params_of(added.resolved(None, loaded.defaults)).first_ids == 7
    assert params_of(added.resolved(2, loaded.defaults)).first_ids == 2
    file.write_text(json.dumps({"first_ids": "seven"}))
    with pytest.raises(StartupError, match="has first_ids that is not a number"):
        load_defaults(tmp_path, (3,), MODEL.vocab_size)


def test_it_is_told_of_everywhere(added: Added) -> None:
    page = option_tables.page()
    assert "| `first_ids` | 0 | ≥ 0; at most `--max-ngram` | Sample among so many" in page
    assert f"{DOC} | sampling |" in page
    assert (
        "    # Sample among so many of the first ids; 0 is off.\n    first_ids: int\n" in option_tables.python_table()
    )
    assert '  first_ids: "plain",' in option_tables.node_table()
    assert NAME in [name for name, _, _ in command_line.flags_of_the_table()]
    name, kind, flag = command_line._flag(SECTIONS[added.section][NAME])
    config = make_dataclass("Config", [(name, kind, flag)], frozen=True)
    (bound,) = options_of(config)
    assert (bound.flag, bound.settings.help, bound.parse("5")) == ("--first-ids", DOC, 5)


@pytest.mark.parametrize("section", ["stop", "output"])
def test_no_row_promises_a_models_file_what_it_does_not_read(section: str) -> None:
    with pytest.raises(ValueError, match=rf"{section}\.first_ids: .* sets options of config only"):
        OptionSpec(name=NAME, section=section, kind=INTEGER, doc=DOC)


def test_without_its_row_nobody_knows_it() -> None:
    with pytest.raises(KeyError):
        RequestOptions(first_ids=4)
