"""Fields of a JSON body, read by name and type and turned into options of generate().

Every option of the table (`penstock_client.GenerationOptions`) is a field under its own name. Some also have OpenAI's
and vLLM's names. A field that nothing has read by the time the request is made is reported as ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from penstock_client import GenerationOptions, check_options

from penstock.common.errors import InvalidArgument
from penstock.common.hf_fields import REFUSED, is_nothing
from penstock.compat.option_names import ALIASES, VLLM_CONSTRAINTS
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.json_output import SETTING_NAMES, apply_settings, read_form, read_settings
from penstock.gateway.unread_fields import note_fields, unknown_fields
from penstock.generation.options.table import CONFIG, SECTIONS

T = TypeVar("T")
# Options by their own names, except those that a route sets itself.
_OWN_NAMES = frozenset(GenerationOptions.__optional_keys__) - {
    *("config", "model", "top_logprobs", "echo"),
    # JSON answers cannot hold tensors.
    *("output_scores", "output_logits", "output_hidden_states", "output_attentions", "scores_top_k", "tensor_steps"),
}
# Options by their other names, and the order in which these count.
_ALIAS_OF = {name: option for option, names in ALIASES.items() for name in names}
_ALIAS_ORDER = {name: number for number, name in enumerate(_ALIAS_OF)}
_TENSORS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
_TENSOR_FIELDS = frozenset(_TENSORS)
# Options that ask for sampling when nothing else says how to decode.
_SAMPLING = frozenset(name for name, spec in CONFIG.items() if spec.is_sampling_only)
# Options that choose the decoding: nothing else then asks for sampling. Drafts work with any decoding.
_MODES = frozenset(name for name, spec in CONFIG.items() if spec.chooses is not None and not spec.chooses.drafts)
# Fields of structured output.
_CONSTRAINT_FIELDS = frozenset(
    (
        *("response_format", "structured_outputs", "guided_json_object", "guided_whitespace_pattern"),
        *(f"guided_{name}" for name in VLLM_CONSTRAINTS.values()),
    )
)
_NEGATIVE = ("negative_prompt_ids", "negative_prompt")
_TOGETHER = re.compile(r"options '(\w+)' and '(\w+)' do not go together")
_NAMED = re.compile(r"option '(\w+)': (.*)", re.DOTALL)
_PARAMETERS = re.compile(r"^(tools\[\d+\]\.)parameters\b")
# Exceptions for a value that a message cannot hold.
_MISFITS = (TypeError, ValueError, OverflowError, AttributeError, KeyError, RecursionError)
_SOMEHOW_WRONG = "has a value of a wrong type, or out of range"
_OUT_OF_RANGE = "is out of range"
# Words for JSON's types.
_WORDS: Mapping[Any, str] = {
    str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip


_KINDS: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_HINTS = {name: spec.kind.hint for rows in SECTIONS.values() for name, spec in rows.items()}


def other_names() -> dict[str, str]:
    """Return the further names of options, each with the option's own."""
    return _ALIAS_OF | {f"guided_{other}": name for name, other in VLLM_CONSTRAINTS.items()}


class Fields:
    """A body; its fields are taken one by one."""

    def __init__(self, call: HttpCall) -> None:
        self._call = call
        self._body = call.body
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._body.get(name) is not None

    def present(self, names: Collection[str]) -> list[str]:
        """Return those of `names` (a set or a mapping) that the body has and that are not null, in its order."""
        return [name for name, value in self._body.items() if name in names and value is not None]

    def take_any(self, names: frozenset[str]) -> bool:
        """Take all of these seldom fields, unless the body has one: then True, and each is taken when it is read."""
        if not names.isdisjoint(self._body):
            return True
        self._taken |= names
        return False

    def raw(self, name: str) -> Any:
        """Take a field unchanged; None if it is absent or null."""
        self._taken.add(name)
        return self._body.get(name)

    def get(self, name: str, kind: type[T], default: T) -> T:
        """Take a field of a type. Raises InvalidArgument naming it."""
        value = self.raw(name)
        return default if value is None else typed(value, kind, name)

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """Take a field of a type, None if it is absent or null. Raises InvalidArgument naming it."""
        value = self.raw(name)
        return None if value is None else typed(value, kind, name)

    def done(self) -> None:
        """Report untaken fields that ask for something. Raises InvalidArgument naming one that would change the answer,
        or any one if the configuration refuses unknown fields."""
        left = [name for name, value in self._body.items() if name not in self._taken and not _is_off(name, value)]
        if not left:
            note_fields(())
            return
        known = self._taken | _OWN_NAMES | _ALIAS_OF.keys()
        note_fields(unknown_fields(left, known, refuse=self._call.config.unknown_fields == "refuse"))
        self._call.ignore(*left)


def _is_off(name: str, value: Any) -> bool:
    """True for null, and for a refused field with a value that asks for nothing, as in process."""
    return value is None or (name in REFUSED and (is_nothing(value) or value == ""))


def typed(value: Any, kind: type[T], name: str) -> T:
    """Return `value`, which must be of a JSON type. Raises InvalidArgument naming the field."""
    is_bool = isinstance(value, bool)
    if kind is float and isinstance(value, int) and not is_bool:
        try:
            return float(value)  # type: ignore[return-value]
        except OverflowError:
            raise InvalidArgument(name, _OUT_OF_RANGE) from None
    if not isinstance(value, kind) or (is_bool and kind is not bool):
        raise InvalidArgument(name, f"must be {_WORDS[kind]}")
    return value


def options_of(fields: Fields, call: HttpCall) -> dict[str, Any]:
    """Take the options of generate() from a body. Raises InvalidArgument naming a field."""
    options: dict[str, Any] = {}

    def put(option: str, name: str, value: Any) -> None:
        if value is not None and options.get(option) is None:
            options[option], call.names[option] = value, name

    # The first of an option's names counts.
    for name in sorted(fields.present(_ALIAS_OF), key=_ALIAS_ORDER.__getitem__):
        put(_ALIAS_OF[name], name, fields.raw(name))
    for name in fields.present(_OWN_NAMES):
        put(name, name, fields.raw(name))
    if fields.take_any(_TENSOR_FIELDS):
        for name in _TENSORS:
            if fields.raw(name):
                raise InvalidArgument(name, "tensors are not available over HTTP: use the gRPC service")
    for name in _NEGATIVE:
        if name in call.names:
            # Its type decides between two fields.
            call.names.update(dict.fromkeys(("negative_prompt_text", "negative_prompt_ids"), name))
    if options.get("top_k") == -1:
        # vLLM's value for off.
        options["top_k"] = 0
    _take_constraints(fields, put, options, call.names)
    _take_beams(fields, put)
    _choose_sampling(options)
    return options


def _take_constraints(
    fields: Fields, put: Callable[[str, str, Any], None], options: dict[str, Any], names: dict[str, str]
) -> None:
    """Take response_format, structured_outputs and guided_*."""
    if not fields.take_any(_CONSTRAINT_FIELDS):
        return
    form = fields.maybe("response_format", dict)
    if form is not None and (found := read_form(form, "response_format", nested=True)) is not None:
        put(*found)
    outputs = fields.maybe("structured_outputs", dict) or {}
    for option, name in VLLM_CONSTRAINTS.items():
        put(option, f"structured_outputs.{name}", outputs.get(name))
        put(option, f"guided_{name}", fields.raw(f"guided_{name}"))
    if outputs.get("json_object"):
        put("json_object", "structured_outputs.json_object", True)
    if fields.raw("guided_json_object"):
        put("json_object", "guided_json_object", True)
    apply_settings(options, names, read_settings(outputs, fields.raw("guided_whitespace_pattern")))
    unknown = outputs.keys() - {*VLLM_CONSTRAINTS.values()} - SETTING_NAMES - {"json_object"}
    if any(outputs[name] is not None for name in unknown):
        raise InvalidArgument(
            "structured_outputs", "takes json, regex, choice, grammar or json_object, and settings of JSON"
        )


def _take_beams(fields: Fields, put: Callable[[str, str, Any], None]) -> None:
    """Take vLLM's use_beam_search, which returns all `n` beams."""
    if fields.maybe("use_beam_search", bool):
        put("num_beams", "use_beam_search", fields.raw("best_of") or fields.raw("n") or 1)
        put("do_sample", "use_beam_search", False)


def _choose_sampling(options: dict[str, Any]) -> None:
    """Set do_sample as OpenAI's clients expect: a temperature above 0, or several answers, ask for sampling.

    If none of these is set, the model's generation_config.json decides, as with generate().
    """
    # No option among them is None.
    if not _MODES.isdisjoint(options):
        return
    if options.get("temperature") == 0:
        # Several answers are then equal.
        options["do_sample"] = False
    elif not _SAMPLING.isdisjoint(options) or (options.get("num_return_sequences") or 1) != 1:
        options["do_sample"] = True


def checked(options: Mapping[str, Any], make: Callable[[], T], *, schema: str = "function.parameters") -> T:
    """Return `make()`, which makes a request from the options. Raises InvalidArgument for a value of a wrong type.

    `schema`: the request's name for the parameters of a tool.
    """
    try:
        return make()
    except InvalidArgument as error:
        raise _in_tool(error, schema) from None
    except _MISFITS as error:
        raise _named(error, options) from None


async def checked_call(work: Any, *, schema: str = "function.parameters", number: str = "body") -> Any:
    """Await a call of the client. Raises InvalidArgument for a value that its message cannot hold.

    `number`: name of the only field that may have such a value.
    """
    try:
        return await work
    except InvalidArgument as error:
        raise _in_tool(error, schema) from None
    except _MISFITS:
        raise InvalidArgument(number, "has a value of a wrong type, or out of range") from None


def _in_tool(error: InvalidArgument, schema: str) -> InvalidArgument:
    """Return the error with the request's name for a tool's parameters."""
    field = _PARAMETERS.sub(rf"\1{schema}", error.field or "")
    return error if field == error.field else InvalidArgument(field, error.description, reason=error.reason)


def _named(error: Exception, options: Mapping[str, Any]) -> InvalidArgument:
    """Return the error that names the option with a value that cannot be sent."""
    if (pair := _TOGETHER.match(str(error))) is not None:
        return InvalidArgument(pair[1], f"does not go together with {pair[2]}")
    found = _NAMED.match(str(error))
    if found is not None:
        is_ours = found[2].startswith(("must ", "is for ", "unknown"))
        # The value found instead is the caller's.
        words = found[2].rpartition(", found ")[0] or found[2]
        wrong = _wrong(found[1], options.get(found[1]))
        return InvalidArgument(found[1], words if is_ours and wrong in (_SOMEHOW_WRONG, _OUT_OF_RANGE) else wrong)
    for name, value in options.items():
        try:
            check_options(**{name: value})
        except _MISFITS:
            return InvalidArgument(name, _wrong(name, value))
    return InvalidArgument("body", _SOMEHOW_WRONG)


def _wrong(name: str, value: Any) -> str:
    """Description of a value that protobuf refused; protobuf's own words, and Python's, may repeat the value."""
    kind = _KINDS.get(_HINTS.get(name, ""))
    if kind is None:
        return _SOMEHOW_WRONG
    try:
        typed(value, kind, name)
    except InvalidArgument as error:
        return error.description
    return _OUT_OF_RANGE


def token_lists(value: Any, name: str) -> list[str | list[int]]:
    """Return prompts: a text, ids, or a list of either. Raises InvalidArgument naming the entry."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidArgument(name, "must be a text, a list of token ids, or a list of either")
    if _is_id(value[0]):
        return [ids_of(value, name)]
    return [
        entry if isinstance(entry, str) else ids_of(entry, f"{name}[{number}]") for number, entry in enumerate(value)
    ]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def ids_of(value: Any, name: str) -> list[int]:
    """Return token ids. Raises InvalidArgument naming the field."""
    if not isinstance(value, list) or not all(_is_id(each) and 0 <= each < 1 << 32 for each in value):
        raise InvalidArgument(name, "must be a text or a list of token ids")
    return value


def tools_of(value: Any) -> Sequence[Mapping[str, Any]]:
    """Return tools in the client's form. Raises InvalidArgument naming tool and field."""
    tools = typed(value, list, "tools") if value is not None else []
    return [function_of(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def function_of(tool: Any, at: str) -> Mapping[str, Any]:
    """Return a tool's function in the client's form. Raises InvalidArgument naming the field."""
    if typed(tool, dict, at).get("type", "function") != "function":
        raise InvalidArgument(f"{at}.type", "must be function")
    return function_at(tool.get("function"), f"{at}.function")


def function_at(given: Any, at: str) -> Mapping[str, Any]:
    """Return a function in the client's form. Raises InvalidArgument naming the field."""
    function = typed(given, dict, at)
    typed(function.get("name"), str, f"{at}.name")
    typed(function.get("description") or "", str, f"{at}.description")
    typed(function.get("parameters") or {}, dict, f"{at}.parameters")
    typed(function.get("strict") or False, bool, f"{at}.strict")
    return {name: given for name, given in function.items() if given is not None}
