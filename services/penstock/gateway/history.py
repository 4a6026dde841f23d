"""Contents of messages from clients, new ones or history: parts, blocks and items as text.

A model's own turns and the results of its tools are history that a caller cannot change: content other than text leaves
a placeholder there. A user's image is refused, since an answer without it would be about something else.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.gateway.endpoint import HttpCall

# Types of parts -> the fields that may hold their text.
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "input_text": ("text",),
    "output_text": ("text",),
    "refusal": ("refusal", "text"),
}
_THOUGHTS: Mapping[str, tuple[str, ...]] = {
    "thinking": ("thinking", "text"),
    "reasoning": ("text", "reasoning", "content", "summary"),
    "reasoning_text": ("text",),
    "summary_text": ("text",),
    # OpenRouter's.
    "reasoning.text": ("text",),
    "reasoning.summary": ("summary",),
}
# Types of parts that are calls, besides OpenAI's own field for them.
_CALLS = ("tool_use", "tool_call", "function_call")
# Encrypted by another server for itself.
_SEALED = ("redacted_thinking", "reasoning.encrypted", "compaction", "encrypted_content")
# Roles with messages that a caller cannot change. A caller writes all others itself.
HISTORY = ("assistant", "tool")
_MOST_NAME = 80
_PLACE = re.compile(r"\[\d+\]")
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")


@dataclass(slots=True)
class Said:
    """A parsed content."""

    # Joined once: there may be thousands of parts.
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """All thoughts."""
        return "".join(self.thoughts)


def read_content(content: Any, where: str, role: str, call: HttpCall, *, word: str = "parts") -> Said:
    """Parse a content: a text, nothing, or parts, in any of the three APIs' forms.

    `word`: the API's word for parts. Raises InvalidArgument naming the part.
    """
    said = Said()
    if isinstance(content, str) or (content is None and role in HISTORY):
        said.texts.append(content or "")
    elif isinstance(content, list):
        for number, part in enumerate(content):
            _take(said, part, f"{where}[{number}]", role, call, word)
    elif role == "tool":
        # Results are often sent without conversion.
        said.texts.append(json.dumps(content, ensure_ascii=False))
    else:
        raise InvalidArgument(where, f"must be a text or a list of {word}")
    return said


def read_block(part: Any, where: str, role: str, call: HttpCall, *, word: str = "parts") -> Said:
    """Parse one part. Raises InvalidArgument naming it."""
    said = Said()
    _take(said, part, where, role, call, word)
    return said


def arguments_of(given: Any) -> str:
    """Return a call's arguments as text, even if they were cut or are not JSON: the model wrote them."""
    if given is None:
        return "{}"
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def call_of(given: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return a call in the client's form. Raises InvalidArgument if it has no name."""
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{where}.name", "must be a text")
    number = given.get("id") or given.get("call_id") or ""
    if not isinstance(number, str):
        raise InvalidArgument(f"{where}.id", "must be a text")
    arguments = next((given[key] for key in ("arguments", "input", "args") if given.get(key) is not None), None)
    return {"id": number, "name": name, "arguments": arguments_of(arguments)}


def _take(said: Said, part: Any, where: str, role: str, call: HttpCall, word: str) -> None:
    """Add a part to a content."""
    if isinstance(part, str):
        said.texts.append(part)
        return
    if not isinstance(part, dict):
        raise InvalidArgument(where, "must be an object")
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise InvalidArgument(f"{where}.type", "must be a text")
    if kind in _TEXTS:
        said.texts.append(_text(part, _TEXTS[kind], where, role))
    elif kind in _THOUGHTS and role in HISTORY:
        said.thoughts.append(_text(part, _THOUGHTS[kind], where, role))
    elif kind in _CALLS and role == "assistant":
        said.calls.append(call_of(part, where))
    elif kind in _SEALED and role in HISTORY:
        _list_ignored(call, where, kind)
    elif (text := _document(part, kind)) is not None:
        said.texts.append(text)
    elif role not in HISTORY:
        raise InvalidArgument(where, f"{kind[:64]} {word} are not supported: Penstock's models read text")
    else:
        _list_ignored(call, where, kind)
        said.texts.append(_placeholder(part, kind))


def _list_ignored(call: HttpCall, where: str, kind: str) -> None:
    """List a kind of part as ignored, once for all its places."""
    call.ignore(f"{_PLACE.sub('[]', where)}.{kind}")


def _text(part: Mapping[str, Any], names: tuple[str, ...], where: str, role: str) -> str:
    """Return the text of a part, which may be a list of texts. Raises InvalidArgument if a caller left it out."""
    found = next((part[name] for name in names if part.get(name)), None)
    if isinstance(found, list):
        return "".join(str(one.get("text") or "") if isinstance(one, dict) else str(one) for one in found)
    if isinstance(found, str):
        return found
    if found is None and (role in HISTORY or any(part.get(name) == "" for name in names)):
        return ""
    raise InvalidArgument(f"{where}.{names[0]}", "must be a text")


def _document(part: Mapping[str, Any], kind: str) -> str | None:
    """Return the text of a document or search result, its title first; None for any other part."""
    read = _DOCUMENTS.get(kind)
    if read is None or (found := read(part)) is None:
        return None
    heads = [part.get(name) for name in ("title", "source", "context", "filename")]
    head = [one for one in heads if isinstance(one, str) and one]
    return "\n".join([*head, found]) + "\n\n"


def _of_document(part: Mapping[str, Any]) -> str | None:
    """Text of Anthropic's document: plain, in blocks of text, or a file of text in base64."""
    source = part.get("source")
    if not isinstance(source, dict):
        return None
    kind, data = source.get("type"), source.get("data")
    if kind == "text" and isinstance(data, str):
        return data
    if kind == "content":
        return _texts(source.get("content"))
    if kind == "base64" and isinstance(data, str):
        return _decoded(data, source.get("media_type"))
    return None


def _of_file(part: Mapping[str, Any]) -> str | None:
    """Text of OpenAI's file; its data is a URL with the type."""
    within = part.get("file")
    file = within if isinstance(within, dict) else part
    data = file.get("file_data")
    if not isinstance(data, str) or not data.startswith("data:"):
        return None
    head, _, body = data[5:].partition(",")
    media_type, _, form = head.partition(";")
    return _decoded(body, media_type) if form.endswith("base64") else None


def _of_resource(part: Mapping[str, Any]) -> str | None:
    """Text of an MCP server's resource."""
    resource = part.get("resource")
    text = resource.get("text") if isinstance(resource, dict) else None
    return text if isinstance(text, str) else None


_DOCUMENTS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "document": _of_document,
    "search_result": lambda part: _texts(part.get("content")),
    "file": _of_file,
    "input_file": _of_file,
    "resource": _of_resource,
}


def _texts(content: Any) -> str | None:
    """Join the texts of blocks; None if one is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    given = [one.get("text") if isinstance(one, dict) else one for one in content]
    found = [one for one in given if isinstance(one, str)]
    return "\n".join(found) if len(found) == len(given) else None


def _decoded(data: str, media_type: Any) -> str | None:
    """Return the text in base64; None if its type or its bytes are not text."""
    if not isinstance(media_type, str) or not media_type.startswith(_TEXT_TYPES):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _placeholder(part: Mapping[str, Any], kind: str) -> str:
    """Name content that is not text, in its place: its type, and its name or kind of file if it has one."""
    source = part.get("source")
    within = source if isinstance(source, dict) else part.get("image_url")
    named = {**(within if isinstance(within, dict) else {}), **part}
    names = ("tool_name", "title", "filename", "name", "uri", "media_type", "mimeType", "mime_type", "url", "file_id")
    shown = next((named[name] for name in names if isinstance(named.get(name), str) and _is_short(named[name])), "")
    return f"[left out: {' '.join([kind[:_MOST_NAME], *([shown] if shown else [])])}]"


def _is_short(name: str) -> bool:
    return 0 < len(name) <= _MOST_NAME and name.isprintable() and not name.startswith("data:")
