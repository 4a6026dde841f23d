"""Twenty JSON schemas of many kinds with short documents."""

from __future__ import annotations

from typing import Any


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Make the schema of an object with these properties and no others, all required unless `required` is set."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


SHORT = {"type": "string", "maxLength": 12}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat object": closed({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 130}}),
    "optional properties": closed({"a": DIGIT, "b": SHORT, "c": {"type": "boolean"}}, required=["b"]),
    "nested objects": closed({"user": closed({"id": DIGIT, "address": closed({"city": SHORT, "zip": SHORT})})}),
    "bounded array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 5},
    "array of objects": closed({"rows": {"type": "array", "items": closed({"x": DIGIT, "y": DIGIT}), "maxItems": 3}}),
    "tuple": {"type": "array", "prefixItems": [SHORT, DIGIT, {"type": "boolean"}], "items": False, "minItems": 3},
    "enum": closed({"color": {"enum": ["red", "green", "dark blue", None, 3, True]}}),
    "const": closed({"version": {"const": "1.0"}, "kind": {"const": {"deep": [1, "é"]}}}),
    "pattern": closed({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}}),
    "pattern with text around": closed({"code": {"type": "string", "pattern": "x[0-9]", "maxLength": 8}}),
    "number bounds": closed(
        {
            "ratio": {"type": "number", "minimum": 0, "maximum": 1},
            "below": {"type": "integer", "exclusiveMinimum": -50, "exclusiveMaximum": -7},
        }
    ),
    "multiples": closed({"even": {"type": "integer", "multipleOf": 2, "minimum": 10, "maximum": 5000}}),
    "anyOf": {"anyOf": [closed({"circle": DIGIT}), closed({"width": DIGIT, "height": DIGIT}), {"type": "null"}]},
    "oneOf of constants": closed({"unit": {"oneOf": [{"const": "m"}, {"const": "km"}]}, "value": DIGIT}),
    "allOf": {"allOf": [closed({"a": DIGIT, "b": DIGIT}, required=["a"]), {"required": ["b"]}]},
    "references": {
        "$defs": {"point": closed({"x": DIGIT, "y": DIGIT})},
        **closed({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "recursion": {
        "$defs": {"node": closed({"value": DIGIT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    "map": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": DIGIT},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "string lengths": closed(
        {"exact": {"type": "string", "minLength": 3, "maxLength": 3}, "long": {**SHORT, "minLength": 8}}
    ),
    "formats": closed(
        {
            "day": {"type": "string", "format": "date"},
            "at": {"type": "string", "format": "time"},
            "id": {"type": "string", "format": "uuid"},
            "host": {"type": "string", "format": "ipv4"},
        }
    ),
}
