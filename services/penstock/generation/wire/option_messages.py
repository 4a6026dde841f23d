"""Conversion of penstock.v1's GenerationConfig, StopConfig and OutputConfig to plain options and back, by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.generation.options.request_limits import DEFAULT_LIMITS, RequestLimits
from penstock.generation.options.table import CONFIG, OUTPUT, STOP, OutputOptions, RequestOptions, StopOptions
from penstock.v1 import config_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from penstock.generation.options.option_spec import OptionSpec


def to_options(config: config_pb2.GenerationConfig, limits: RequestLimits = DEFAULT_LIMITS) -> RequestOptions:
    """Return the set fields of a GenerationConfig, unchecked except for the sizes of lists and values without a plain
    form.

    Raises InvalidArgument for a list beyond its bound, an unknown enum value, an empty oneof and for
    negative_prompt_text.
    """
    return RequestOptions.of(_values(config, CONFIG, limits))


def to_stop(stop: config_pb2.StopConfig, limits: RequestLimits = DEFAULT_LIMITS) -> StopOptions:
    """Return a StopConfig as plain data. Raises InvalidArgument for a list beyond its bound."""
    return StopOptions.of(_values(stop, STOP, limits))


def to_output(output: config_pb2.OutputConfig, limits: RequestLimits = DEFAULT_LIMITS) -> OutputOptions:
    """Return an OutputConfig as plain data. Raises InvalidArgument for a list beyond its bound."""
    return OutputOptions.of(_values(output, OUTPUT, limits))


def _values(message: Message, specs: dict[str, OptionSpec], limits: RequestLimits) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        spec = specs[descriptor.name]
        plain = spec.kind.from_proto(value, spec.path, limits, spec.limit)
        if plain is not None:
            values[spec.name] = plain
    return values


def from_options(options: RequestOptions) -> config_pb2.GenerationConfig:
    """Return the message of some options: the inverse of `to_options`, except that constraints come back as
    disjunctive."""
    config = config_pb2.GenerationConfig()
    for name, value in options.items():
        CONFIG[name].kind.to_proto(config, name, value)
    return config
