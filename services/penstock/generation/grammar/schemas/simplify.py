"""Turns a caller's schema into one that llguidance accepts, with documents that a model comes to the end of.

Keywords without an effect in their place are left out. Keywords that llguidance does not know are expressed by others
where that is possible. The rest is refused, with its place and keyword. An object has only the keys that its schema
names, unless the schema allows others explicitly. So every document of the result satisfies the schema, but some
documents that satisfy it are never written.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.lookaheads import without_lookaheads
from penstock.generation.grammar.schemas.combinations import rewrite_counts, subsets
from penstock.generation.grammar.schemas.disjoint import are_disjoint
from penstock.generation.grammar.schemas.document import write_json
from penstock.generation.grammar.schemas.multiples import exact_multiples, keep_multiples, only_whole
from penstock.generation.grammar.schemas.open_ends import (
    anything,
    bound_items,
    bound_keys,
    bound_names,
    bound_number,
    bound_text,
)
from penstock.generation.grammar.schemas.recursion import bound_recursion
from penstock.generation.grammar.schemas.references import References
from penstock.generation.grammar.schemas.refusal import ONE_OF, Refusal, step
from penstock.generation.grammar.schemas.refused_part import ORIGIN
from penstock.generation.grammar.schemas.shapes import check_shapes
from penstock.generation.grammar.schemas.string_formats import NATIVE, pattern_of
from penstock.generation.grammar.schemas.words import (
    ALL_TYPES,
    ASSERTIONS,
    NUMBER_WORDS,
    OBJECT_WORDS,
    TYPES_OF,
    is_of,
    levels_of,
    says_nothing,
    types_of,
)

_SCALARS = frozenset({"null", "boolean", "number", "string"})
# Words that put several schemas of an object together.
_COMPOSING = ("$ref", "allOf", "anyOf", "oneOf")
_UNSUPPORTED = ("not", "if", "then", "else", "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef")
# Annotations that llguidance does not know as such, and words that say everything by their place.
_SILENT = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$schema")


class MovedSchema(dict[str, Any]):
    """A schema that was moved, and its place in the caller's text."""

    def __init__(self, schema: dict[str, Any], path: str) -> None:
        super().__init__(schema)
        self.path = path


def simplify(
    root: dict[str, Any], *, is_strict: bool, bounds: JsonBounds, takes_any_of: bool = False
) -> dict[str, Any]:
    """Return the simple schema. Each of its definitions has its origin in a `$comment`.

    `is_strict`: objects without any named key are closed, too. `takes_any_of`: `oneOf` counts as `anyOf`. Raises
    Refusal, and RecursionError for a schema that is nested too deeply.
    """
    return _Simplifier(root, is_strict, bounds, takes_any_of).run()


class _Simplifier:
    def __init__(self, root: dict[str, Any], is_strict: bool, bounds: JsonBounds, takes_any_of: bool) -> None:
        self._root = root
        self._bounds = bounds
        self._has_any = False
        # Within a schema that lists its objects or arrays: its own list wins over any bound of ours.
        self._is_listed = False
        # Values within values of these.
        self._deepest = 0
        self._common: dict[str, tuple[str, dict[str, Any]]] = {}
        self._is_strict = is_strict
        self._takes_any_of = takes_any_of
        self._references = References(root)

    def run(self) -> dict[str, Any]:
        references = self._references
        made = self._node(self._root, "#", is_part=False)
        if not isinstance(made, dict):
            return {} if made else {"enum": []}
        if "$schema" in self._root:
            made["$schema"] = self._root["$schema"]
        if not references.are_plain:
            return made
        definitions: dict[str, Any] = {}
        listed: set[str] = set()
        while references.waiting:
            asked = references.waiting.pop()
            self._is_listed = asked.is_listed
            target = self._node(references.target(asked.place), asked.place, asked.is_part)
            name = references.name_of(*asked)
            definitions[name] = {**target, ORIGIN: asked.place} if isinstance(target, dict) else target
            if asked.is_listed:
                listed.add(name)
        if self._has_any:
            definitions |= {f"any{at}": anything(at, self._bounds) for at in range(self._bounds.max_json_depth + 1)}
        definitions |= dict(self._common.values())
        depths = dict.fromkeys(listed, max(self._bounds.max_json_depth, self._deepest))
        return bound_recursion(
            made | ({"$defs": definitions} if definitions else {}), self._bounds.max_json_depth, depths
        )

    def _node(self, schema: Any, path: str, is_part: bool) -> Any:
        """Return a simplified schema. `is_part`: another one is combined with it, and closes the object."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Refusal(path, "", "must be an object, or true or false")
        path = schema.path if isinstance(schema, MovedSchema) else path
        check_shapes(schema, path)
        made = {word: value for word, value in schema.items() if word in ASSERTIONS or word.startswith("$")}
        for word in _SILENT:
            made.pop(word, None)
        types = types_of(made)
        for word in [word for word in made if TYPES_OF.get(word, next(iter(types), "")) not in types]:
            del made[word]
        self._drop_silent(made, types)
        self._rewrite_unevaluated(made, path)
        self._rewrite_pattern(made)
        self._rewrite_format(made)
        self._rewrite_dependencies(made, path)
        self._rewrite_names(made, path)
        self._refuse(made, path)
        if (split := self._split_numbers(made, types, path)) is not None:
            return self._node(split, path, is_part)
        if made.get("uniqueItems"):
            return self._unique(made, path, types)
        if not is_part and says_nothing(made):
            return self._any(made)
        was_listed = self._is_listed
        self._is_listed = was_listed or self._lists_values(made, set())
        try:
            made = self._with_ends(made, path, is_part)
        finally:
            self._is_listed = was_listed
        return self._shared(made) if not is_part and self._is_common(schema, types) else made

    def _lists_values(self, made: dict[str, Any], seen: set[int]) -> bool:
        """True when objects or arrays are listed, here or in another schema of the same value."""
        listed = [made["const"]] if "const" in made else made.get("enum")
        if isinstance(listed, list) and any(isinstance(value, dict | list) for value in listed):
            self._deepest = max(self._deepest, levels_of(listed))
            return True
        others = [made] if "$ref" in made else []
        others += [one for word in ("allOf", "anyOf", "oneOf") for one in made.get(word) or ()]
        if id(made) in seen or not self._is_composed(made):
            return False
        seen.add(id(made))
        resolved = map(self._target_of, others)
        return any(isinstance(one, dict) and self._lists_values(one, seen) for one in resolved)

    def _target_of(self, schema: Any) -> Any:
        try:
            return self._references.target(schema["$ref"]) if isinstance(schema, dict) and "$ref" in schema else schema
        except LookupError:
            return schema

    def _with_ends(self, made: dict[str, Any], path: str, is_part: bool) -> dict[str, Any]:
        """Return a schema of simple parts, with bounds for everything that it leaves open."""
        is_own = not is_part and not self._is_listed
        names = self._closed_names(made) if is_own and self._references.are_plain else None
        is_composed = names is not None and self._is_composed(made)
        if names is not None and not is_composed:
            made["additionalProperties"] = False
            if names.get("properties"):
                made["properties"] = {**names["properties"], **made.get("properties", {})}
        is_joined = is_part or self._is_composed(made)
        if is_own and not is_joined:
            self._bound(made)
        self._parts(made, path, is_part=is_joined)
        rewrite_counts(made, path)
        if is_own and not is_joined and not made.keys() & {"const", "enum", *_COMPOSING}:
            # Not before: the schema itself does not ask to count this bound.
            bound_keys(made, self._bounds)
            bound_names(made, self._bounds)
        if is_composed and names is not None:
            made["allOf"] = [*made.get("allOf", ()), names]
        return made

    def _is_common(self, schema: dict[str, Any], types: frozenset[str]) -> bool:
        """True for a number, or a text of a format, without further keywords: these are common."""
        words = {word for word in schema if word in ASSERTIONS or word.startswith("$")}
        return (
            self._references.are_plain
            and types <= _SCALARS
            and (words == {"type", "format"} or (words == {"type"} and "number" in types))
        )

    def _shared(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return a reference to the one definition of equal schemas: llguidance makes one automaton of it."""
        return {"$ref": f"#/$defs/{self._common.setdefault(write_json(made), (f'common{len(self._common)}', made))[0]}"}

    # -- open ends

    def _any(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of anything, of bounded depth."""
        if not self._bounds.max_json_depth or not self._references.are_plain or self._is_listed:
            return made
        self._has_any = True
        return {"$ref": f"#/$defs/any{self._bounds.max_json_depth}"}

    def _bound(self, made: dict[str, Any]) -> None:
        """Add bounds to a schema that stands alone. A schema combined with it could need more."""
        if made.keys() & {"const", "enum", *_COMPOSING}:
            return
        for bound in (bound_number, bound_text, bound_items):
            bound(made, self._bounds)
        if not self._references.are_plain or not self._bounds.max_json_depth:
            return
        types = types_of(made) if "type" in made else frozenset()
        for kind, word in (("object", "additionalProperties"), ("array", "items")):
            if kind in types and made.get(word, True) is True:
                made[word] = {}

    # -- parts

    def _parts(self, made: dict[str, Any], path: str, is_part: bool) -> None:
        for word in ("additionalProperties", "additionalItems", "items"):
            if word in made and not isinstance(made[word], list):
                made[word] = self._part(made[word], step(path, word))
        for word in ("prefixItems", "items"):
            if isinstance(made.get(word), list):
                made[word] = [self._part(one, step(path, word, at)) for at, one in enumerate(made[word])]
        if not self._references.are_plain:
            self._definitions(made, path)
        for word in ("properties", "patternProperties"):
            if isinstance(made.get(word), dict):
                made[word] = {name: self._part(one, step(path, word, name)) for name, one in made[word].items()}
        if self._references.are_plain:
            made.pop("$id", None)
            made.pop("$defs", None)
            made.pop("definitions", None)
            if "$ref" in made:
                made["$ref"] = self._reference(made["$ref"], path, is_part)
        for word in ("allOf", "anyOf", "oneOf"):
            if isinstance(made.get(word), list):
                self._choose(made, word, path, is_part)

    def _part(self, schema: Any, path: str) -> Any:
        """Return a simplified schema of a separate value: `true` is anything, of bounded depth."""
        return self._node({} if schema is True else schema, path, is_part=False)

    def _definitions(self, made: dict[str, Any], path: str) -> None:
        """Simplify definitions in place. One that cannot be simplified matters only if something refers to it."""
        for word in ("$defs", "definitions"):
            for name, one in made[word].items() if isinstance(made.get(word), dict) else ():
                with contextlib.suppress(Refusal):
                    made[word] = {**made[word], name: self._node(one, step(path, word, name), False)}

    def _choose(self, made: dict[str, Any], word: str, path: str, is_part: bool) -> None:
        options = made[word]
        resolve = self._references.resolve
        if word == "oneOf":
            # Closed or bounded schemas would seem to have nothing in common: test this first.
            if not self._takes_any_of and not all(
                are_disjoint(one, other, resolve) for at, one in enumerate(options) for other in options[at + 1 :]
            ):
                raise Refusal(path, word, ONE_OF)
            del made["oneOf"]
            made_options = [self._node(one, step(path, word, at), is_part) for at, one in enumerate(options)]
            if "anyOf" in made:
                made["allOf"] = [*made.get("allOf", ()), {"anyOf": made_options}]
            else:
                made["anyOf"] = made_options
            return
        made[word] = [self._node(one, step(path, word, at), is_part) for at, one in enumerate(options)]

    def _reference(self, reference: Any, path: str, is_part: bool) -> str:
        try:
            self._references.target(reference)
        except LookupError as error:
            raise Refusal(path, "$ref", str(error)) from None
        return f"#/$defs/{self._references.name_of(reference, is_part, self._is_listed)}"

    # -- keywords without an effect

    def _drop_silent(self, made: dict[str, Any], types: frozenset[str]) -> None:
        empty: dict[str, Callable[[Any], bool]] = {
            "propertyNames": lambda value: says_nothing(value) or value == {"type": "string"},
            "uniqueItems": lambda value: value is False or _at_most_one(made),
            "minContains": lambda value: "contains" not in made or (value == 0 and "maxContains" not in made),
            "maxContains": lambda value: "contains" not in made,
            "unevaluatedProperties": says_nothing,
            "unevaluatedItems": says_nothing,
            "additionalItems": lambda value: not isinstance(made.get("items"), list),
            "dependentRequired": lambda value: value == {},
            "dependentSchemas": lambda value: value == {},
            "dependencies": lambda value: value == {},
            "not": lambda value: value is False or (_is_type_only(value) and not types_of(value) & types),
            "if": lambda value: says_nothing(made.get("then", True)) and says_nothing(made.get("else", True)),
            "then": lambda value: "if" not in made,
            "else": lambda value: "if" not in made,
        }
        if made.get("minContains") == 0 and "maxContains" not in made:
            made.pop("contains", None)
        for word, is_empty in empty.items():
            if word in made and is_empty(made[word]):
                del made[word]
        if isinstance(made.get("if"), bool):
            rest = made.pop("then" if made.pop("if") else "else", True)
            made.pop("then", None)
            made.pop("else", None)
            made["allOf"] = [*made.get("allOf", ()), rest]
        if "not" in made and _is_type_only(made["not"]) and "integer" not in str(made["not"]["type"]):
            left = types - types_of(made.pop("not"))
            is_whole = "integer" in (made.get("type"), *(made["type"] if isinstance(made.get("type"), list) else ()))
            made["type"] = sorted("integer" if is_whole and each == "number" else each for each in left)
        if "contains" in made and says_nothing(made["contains"]):
            del made["contains"]
            made["minItems"] = max(made.get("minItems", 0), made.pop("minContains", 1))
            if "maxContains" in made:
                made["maxItems"] = min(made.get("maxItems", made["maxContains"]), made.pop("maxContains"))
        if _asks_only_for_an_item(made):
            del made["contains"]
            made["minItems"] = max(made.get("minItems", 0), made.pop("minContains", 1))

    def _refuse(self, made: dict[str, Any], path: str) -> None:
        """Raise Refusal for a keyword that matters and cannot be expressed."""
        for word in _UNSUPPORTED:
            if word in made:
                raise Refusal(
                    path, word, "is not supported, and cannot be left out: it may forbid what the rest allows"
                )

    # -- keywords that others can express

    def _rewrite_unevaluated(self, made: dict[str, Any], path: str) -> None:
        """Express `unevaluated…` keywords, if no other schema is about the same value. Raises Refusal."""
        for word in ("unevaluatedProperties", "unevaluatedItems"):
            if word in made:
                other = "additionalProperties" if word == "unevaluatedProperties" else "items"
                if other == "items" and isinstance(made.get("items"), list):
                    # The list is about the first items, as in drafts before 2020-12.
                    other = "additionalItems"
                if made.keys() & {*_COMPOSING, "dependentSchemas", "dependencies", "contains", "if"}:
                    raise Refusal(path, word, "is not supported beside other schemas of the same value")
                made.setdefault(other, made[word])
                del made[word]

    def _rewrite_pattern(self, made: dict[str, Any]) -> None:
        """Express look-aheads by patterns beside the rest."""
        patterns = without_lookaheads(made["pattern"]) if isinstance(made.get("pattern"), str) else None
        if patterns is not None:
            made["pattern"] = patterns[0]
            made["allOf"] = [*made.get("allOf", ()), *({"pattern": one} for one in patterns[1:])]

    def _rewrite_format(self, made: dict[str, Any]) -> None:
        name = made.get("format")
        if "format" not in made or name in NATIVE:
            return
        del made["format"]
        pattern = pattern_of(name)
        if pattern is None:
            return
        if "pattern" in made:
            made["allOf"] = [*made.get("allOf", ()), {"pattern": pattern}]
        else:
            made["pattern"] = pattern

    def _rewrite_dependencies(self, made: dict[str, Any], path: str) -> None:
        """Express the dependencies of a key: it is absent, or its dependencies hold."""
        for word in ("dependentRequired", "dependentSchemas", "dependencies"):
            asked = made.pop(word, None)
            if asked is None:
                continue
            for name, then in asked.items():
                then = {"required": then} if isinstance(then, list) else then
                if not says_nothing(then) and then != {"required": []}:
                    placed = MovedSchema(then, step(path, word, name)) if isinstance(then, dict) else then
                    one = {"anyOf": [{"properties": {name: False}}, {"allOf": [placed, {"required": [name]}]}]}
                    made["allOf"] = [*made.get("allOf", ()), one]

    def _rewrite_names(self, made: dict[str, Any], path: str) -> None:
        """Express `propertyNames` by its listed keys, or by a pattern of the others."""
        if "propertyNames" not in made:
            return
        rule = self._references.resolve(made["propertyNames"])
        values = made.get("additionalProperties", True)
        known = made.get("properties") or {}
        if made.get("patternProperties") or not isinstance(rule, dict) or not isinstance(known, dict):
            raise Refusal(path, "propertyNames", "is not supported here")
        check_shapes(rule, step(path, "propertyNames"))
        words = rule.keys() & ASSERTIONS
        if "string" not in types_of(rule) or (words & {"enum", "const"} and len(words - {"type"}) > 1):
            raise Refusal(path, "propertyNames", _NAMES)
        listed = [rule["const"]] if "const" in rule else rule.get("enum")
        if isinstance(listed, list):
            names = [name for name in listed if isinstance(name, str)]
            fits: Callable[[str], bool] = names.__contains__
        else:
            names, pattern = [], _name_pattern(rule)
            if pattern is None:
                raise Refusal(path, "propertyNames", _NAMES)
            fits = _searcher(pattern, path)
            if values is not False and not (known and "additionalProperties" not in made):
                if any(map(fits, known)) and not says_nothing(values):
                    # A pattern's schema is about the named keys, too.
                    reason = "of a pattern is not supported with named keys and a schema of the others"
                    raise Refusal(path, "propertyNames", reason)
                made["patternProperties"] = {pattern: values}
        del made["propertyNames"]
        made["properties"] = {name: one if fits(name) else False for name, one in known.items()}
        if values is not False:
            made["properties"] |= {name: values for name in names if name not in known}
        if not all(fits(name) for name in made.get("required", ()) if isinstance(name, str)):
            raise Refusal(path, "propertyNames", "allows no object: a required key is not among the names")
        made["additionalProperties"] = False

    def _split_numbers(self, made: dict[str, Any], types: frozenset[str], path: str) -> dict[str, Any] | None:
        """Split the schema into one for numbers and one for the rest, if `multipleOf` needs other keywords."""
        if "number" not in types or "multipleOf" not in made:
            return None
        if made.keys() & {"enum", "const"}:
            kept = keep_multiples([made["const"]] if "const" in made else made["enum"], made["multipleOf"])
            rest = {word: value for word, value in made.items() if word not in ("multipleOf", "enum", "const")}
            return None if kept is None else {**rest, "enum": kept}
        exact = exact_multiples(made, path)
        if exact is None:
            return None
        rest = {word: value for word, value in made.items() if word not in NUMBER_WORDS}
        kind = "integer" if only_whole(made) else "number"
        number: dict[str, Any] = exact if "anyOf" in exact else {"type": kind, **exact}
        others = {"type": sorted(types - {"number"})}
        alternative = number if len(types) == 1 else {"anyOf": [number, others]}
        rest.pop("type", None)
        if not rest:
            return alternative
        rest["allOf"] = [*rest.get("allOf", ()), alternative]
        return rest

    def _unique(self, made: dict[str, Any], path: str, types: frozenset[str]) -> Any:
        """Express `uniqueItems` of a few values by the list of all arrays. Raises Refusal."""
        item = self._references.resolve(made.get("items", True))
        values = None
        if isinstance(item, dict):
            check_shapes(item, step(path, "items"))
            words = item.keys() & ASSERTIONS
            # Other keywords would have to hold, too. A type only repeats the types of the values.
            if words <= {"const", "type"} or words <= {"enum", "type"}:
                values = [item["const"]] if "const" in item else item.get("enum")
            if words == {"type"} and item["type"] in ("boolean", ["boolean"]):
                values = [False, True]
            if values is not None and "type" in item:
                values = [value for value in values if is_of(value, item["type"])]
        least, most = int(made.get("minItems", 0)), made.get("maxItems")
        is_plain = made.keys() & ASSERTIONS <= {"type", "items", "minItems", "maxItems", "uniqueItems"}
        if types == {"array"} and is_plain and values is not None:
            found = subsets(values, least, None if most is None else int(most))
            if found is not None:
                return {"anyOf": found}
        reason = (
            "is not supported but for items of an enum of up to ten values, and cannot be left out: an item may come "
            "twice"
        )
        raise Refusal(path, "uniqueItems", reason)

    # -- other keys

    def _is_composed(self, made: dict[str, Any]) -> bool:
        """True when several schemas are about one object: none of them may be closed without the others' keys."""
        joined = made.get("allOf") or ()
        if len(joined) > 1 or (joined and not _is_reference(joined[0])):
            return True
        composing = [word for word in _COMPOSING if made.get(word)]
        return len(composing) > 1 or bool(composing and made.keys() & OBJECT_WORDS)

    def _closed_names(self, made: dict[str, Any]) -> dict[str, Any] | None:
        """Return a schema of the named keys only; None: other keys are mentioned, or no key is named."""
        found: dict[str, Any] = {"properties": {}, "patternProperties": {}}
        if "object" not in types_of(made) or not self._collect(made, found, set()):
            return None
        if not self._is_composed(made) and any(word in made for word in _COMPOSING):
            return None
        if (
            not found["properties"]
            and not found["patternProperties"]
            and not (self._is_strict and self._is_object(made))
        ):
            return None
        return {word: names for word, names in found.items() if names} | {"additionalProperties": False}

    def _is_object(self, made: dict[str, Any]) -> bool:
        return types_of(made) == {"object"} and not any(word in made for word in _COMPOSING)

    def _collect(self, schema: Any, found: dict[str, Any], seen: set[str]) -> bool:
        """Add the keys that a schema and its parts name; False: one of them mentions other keys."""
        if not isinstance(schema, dict):
            return True
        if schema.keys() & {"additionalProperties", "unevaluatedProperties"}:
            return False
        for word in ("properties", "patternProperties"):
            if isinstance(schema.get(word), dict):
                found[word] |= dict.fromkeys(schema[word], True)
        if isinstance(schema.get("required"), list):
            found["properties"] |= {name: True for name in schema["required"] if isinstance(name, str)}
        listed = [part for word in ("allOf", "anyOf", "oneOf") for part in schema.get(word, ()) or ()]
        if isinstance(schema.get("$ref"), str) and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            try:
                listed.append(self._references.target(schema["$ref"]))
            except LookupError:
                return False
        found_all = [self._collect(part, found, seen) for part in listed]
        return all(found_all)


def _asks_only_for_an_item(schema: dict[str, Any]) -> bool:
    """True when `contains` equals the schema of every item: by text, since 1 equals true in Python."""
    if "contains" not in schema or "items" not in schema or schema.keys() & {"prefixItems", "maxContains"}:
        return False
    return write_json(schema["contains"]) == write_json(schema["items"])


def _at_most_one(schema: dict[str, Any]) -> bool:
    return schema.get("maxItems") in (0, 1)


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() & ASSERTIONS == {"$ref"}


def _is_type_only(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() & ASSERTIONS == {"type"} and types_of(schema) != ALL_TYPES


def _name_pattern(rule: dict[str, Any]) -> str | None:
    """Return the pattern of keys for a schema of strings; None: a pattern cannot express all of its keywords."""
    words = rule.keys() & (ASSERTIONS - {"type"})
    if "string" not in types_of(rule):
        return None
    if words == {"pattern"} and isinstance(rule["pattern"], str):
        return rule["pattern"]
    if words == {"format"}:
        return pattern_of(rule["format"]) or (
            _ANY if rule["format"] not in NATIVE else _NATIVE_NAMES.get(rule["format"])
        )
    if words and words <= {"minLength", "maxLength"}:
        most = rule.get("maxLength", "")
        return f"^(?s:.){{{rule.get('minLength', 0)},{most}}}$"
    return None


_ANY = "^(?s:.)*$"
_NAMES = "is supported for one of enum, const, pattern, format and lengths"
_HEX = "[0-9a-fA-F]"
_NATIVE_NAMES = {"uuid": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$"}


def _searcher(pattern: str, path: str) -> Callable[[str], bool]:
    try:
        found = re.compile(pattern)
    except re.error:
        raise Refusal(path, "propertyNames", "has a pattern that is not a regular expression") from None
    return lambda name: found.search(name) is not None
