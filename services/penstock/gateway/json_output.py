"""JSON output as callers request it: the forms of response_format and text.format, and settings of its layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.gateway.closed_objects import close_objects

# Member of a schema with settings of structured output.
_SETTINGS = "x-guidance"
# vLLM's names of settings, and their names here.
_FLAGS = {"disable_any_whitespace": "compact", "disable_additional_properties": "strict"}


def read_form(form: Mapping[str, Any], at: str, *, nested: bool) -> tuple[str, str, Any] | None:
    """Return the (option, field, value) that a form asks for, None for plain text. Raises InvalidArgument.

    `at`: name of the form in the request. `nested`: a schema is in `json_schema`, as in chat completions; in responses
    it is in the form itself. A json_object may also have a schema, as on other servers: then the schema holds. `strict`
    closes objects.
    """
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if form.get("schema") is None:
            return "json_object", at, True
        return "json_schema", f"{at}.schema", _strict(form, at)
    if kind != "json_schema":
        raise InvalidArgument(f"{at}.type", "must be text, json_object or json_schema")
    if nested and form.get("json_schema") is not None:
        form = form["json_schema"] if isinstance(form["json_schema"], dict) else {}
        at = f"{at}.json_schema"
    elif nested and "schema" not in form:
        at = f"{at}.json_schema"
    return "json_schema", f"{at}.schema", _strict(form, at)


def read_settings(outputs: Mapping[str, Any], pattern: Any) -> dict[str, Any]:
    """Return the settings among vLLM's `structured_outputs`; `pattern` is its older name for one.

    Raises InvalidArgument.
    """
    found: dict[str, Any] = {}
    for name, word in _FLAGS.items():
        flag = outputs.get(name)
        if flag is not None and not isinstance(flag, bool):
            raise InvalidArgument(f"structured_outputs.{name}", "must be true or false")
        if flag:
            found[word] = True
    for field, given in (
        ("structured_outputs.whitespace_pattern", outputs.get("whitespace_pattern")),
        ("guided_whitespace_pattern", pattern),
    ):
        if given is not None and not isinstance(given, str):
            raise InvalidArgument(field, "must be a text")
        if given is not None:
            found.setdefault("whitespace_pattern", given)
    return found


def with_settings(schema: Any, settings: Mapping[str, Any]) -> Any:
    """Return a schema with settings, which precede its own. Anything but a schema stays unchanged, to be refused later.

    `strict` is handled here, as far as keywords of JSON Schema allow: generation services of earlier releases refuse
    it.
    """
    if not settings:
        return schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return schema
    if schema is True and set(settings) - {"strict"}:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    if settings.get("strict"):
        schema, is_done = close_objects(schema)
        settings = {word: value for word, value in settings.items() if word != "strict" or not is_done}
        if not settings:
            return schema
    own = schema.get(_SETTINGS)
    return {**schema, _SETTINGS: {**(own if isinstance(own, dict) else {}), **settings}}


def apply_settings(options: dict[str, Any], names: dict[str, str], settings: Mapping[str, Any]) -> None:
    """Put the settings into the schema among the options. For any JSON object, make a schema."""
    if not settings:
        return
    if options.get("json_schema") is not None:
        options["json_schema"] = with_settings(options["json_schema"], settings)
    elif options.get("json_object") is True:
        del options["json_object"]
        options["json_schema"] = with_settings({"type": "object"}, settings)
        names["json_schema"] = names["json_object"]


SETTING_NAMES = frozenset({*_FLAGS, "whitespace_pattern", "disable_fallback"})


def _schema(form: Mapping[str, Any], name: str) -> Any:
    schema = form.get("schema")
    if not isinstance(schema, dict | bool):
        raise InvalidArgument(name, "must be a JSON Schema")
    return schema


def _strict(form: Mapping[str, Any], at: str) -> Any:
    schema, strict = _schema(form, f"{at}.schema"), form.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidArgument(f"{at}.strict", "must be true or false")
    return with_settings(schema, {"strict": True} if strict else {})
