"""Program of Kimi K3's tool calls: tags of text between control tokens, with a typed value in each.

A tag is <|open|>name key="value"<|sep|>, and ends as <|close|>name<|sep|>. Source: the renderer encoding_k3.py of
moonshotai/Kimi-K3, and the chat template that files in GGUF have of it.
"""

from __future__ import annotations

import re

from penstock.router.chat.call_block import CallBlock, Steps

XTML_OPEN, XTML_CLOSE, XTML_SEP = "<|open|>", "<|close|>", "<|sep|>"
# Markers around the text of an answer; the first one begins it.
XTML_ANSWER = (
    f"{XTML_OPEN}response{XTML_SEP}",
    f"{XTML_CLOSE}response{XTML_SEP}",
    f"{XTML_CLOSE}message{XTML_SEP}",
    "<|end_of_msg|>",
)
XTML_CALLS = (f"{XTML_OPEN}tools{XTML_SEP}", f"{XTML_CLOSE}tools{XTML_SEP}")
_CALL, _CALL_END = f"{XTML_OPEN}call", f"{XTML_CLOSE}call{XTML_SEP}"
_ARGUMENT, _ARGUMENT_END = f"{XTML_OPEN}argument", f"{XTML_CLOSE}argument{XTML_SEP}"
_JSON, _JSON_END = f"{XTML_OPEN}json", f"{XTML_CLOSE}json{XTML_SEP}"
_ATTRIBUTE = re.compile(r'([\w.:-]+)="([^"]*)"')


def kimi_k3(block: CallBlock) -> Steps:
    """Read calls up to the end of their block. Arguments are typed values, or one object of JSON in place of them."""
    while (yield from block.expect(_CALL, XTML_CALLS[1])) == _CALL:
        head, _ = yield from block.until(XTML_SEP)
        tool = _attributes(head).get("tool", "")
        block.begin(tool)
        is_first = True
        while (part := (yield from block.expect(_ARGUMENT, _CALL_END, *((_JSON,) if is_first else ())))) == _ARGUMENT:
            head, _ = yield from block.until(XTML_SEP)
            value, _ = yield from block.until(_ARGUMENT_END)
            said = _attributes(head)
            kind = said.get("type")
            is_string = None if kind is None else kind == "string"
            block.member(tool, said.get("key", ""), value, is_first=is_first, is_string=is_string)
            is_first = False
        if part == _JSON:
            yield from block.until(XTML_SEP)
            yield from block.arguments()
            yield from block.expect(_JSON_END)
            yield from block.expect(_CALL_END)
            block.done()
        else:
            block.add("{}" if is_first else "}")
            block.end()


def escaped(text: str) -> str:
    """Return a text as the value of an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _attributes(head: str) -> dict[str, str]:
    """Return the attributes of a tag."""
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in _ATTRIBUTE.findall(head)}
