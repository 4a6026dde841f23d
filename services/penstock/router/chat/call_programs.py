"""Programs of the tool-call formats: they read the text behind a format's opening marker for `CallBlock`."""

from __future__ import annotations

from penstock.router.chat.call_block import CallBlock, Program, Steps

DEEPSEEK_CALL, DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DEEPSEEK_CALL_END, DEEPSEEK_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
KIMI_CALL, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
LFM2_END = "<|tool_call_end|>"
KIMI_CALL_END, KIMI_END = "<|tool_call_end|>", "<|tool_calls_section_end|>"


def objects(separators: tuple[str, ...] = (), close: tuple[str, ...] = ()) -> Program:
    """Return the program of one object, objects between `separators`, or a JSON list; one of `close` may follow."""

    def read(block: CallBlock) -> Steps:
        if (yield from block.one_of("[")):
            while True:
                yield from block.call_object()
                if (yield from block.expect(",", "]")) == "]":
                    break
        else:
            yield from block.call_object()
            while separators and (yield from _goes_on(block, separators)):
                yield from block.call_object()
        if close:
            yield from _goes_on(block, close)

    return read


def _goes_on(block: CallBlock, options: tuple[str, ...]) -> Steps:
    """Return the option that follows; empty without one, or at the end."""
    if not (yield from block.peek()):
        return ""
    return (yield from block.one_of(*options))


def llama(block: CallBlock) -> Steps:
    """Llama 3 and 4: JSON objects between semicolons, name.call(…) after the tag, or Python's list of calls."""
    first = yield from block.peek()
    if first == "{":
        yield from objects(separators=(";",), close=("<|python_end|>",))(block)
    elif first == "[":
        yield from _call_list(block)
        yield from _goes_on(block, ("<|python_end|>",))
    elif block.opened.strip():
        yield from block.python_call(suffix=".call")
        yield from _goes_on(block, ("<|python_end|>",))
    else:
        block.refuse()


def _call_list(block: CallBlock) -> Steps:
    """Read a list of objects, or of calls as Python writes them."""
    yield from block.expect("[")
    read = block.call_object if (yield from block.peek()) == "{" else block.python_call
    yield from read()
    while (yield from block.expect(",", "]")) == ",":
        yield from read()


def lfm2(block: CallBlock) -> Steps:
    """LFM2: Python's list of calls, or one of JSON objects where the prompt asks for that."""
    yield from _call_list(block)
    yield from _goes_on(block, (LFM2_END,))


def mistral(block: CallBlock) -> Steps:
    """[TOOL_CALLS] with a JSON list, or with name[ARGS]{…}, perhaps with [CALL_ID]id in between."""
    if (yield from block.peek()) in ("[", "{"):
        yield from objects()(block)
        return
    call_id = ""
    name, end = yield from block.until("[CALL_ID]", "[ARGS]", "{")
    if end == "[CALL_ID]":
        call_id, end = yield from block.until("[ARGS]", "{")
    block.begin(name.strip(), call_id.strip())
    if end == "{":
        block.unread(1)
    yield from block.arguments()


def deepseek(block: CallBlock) -> Steps:
    """DeepSeek V3 (function<sep>name and a fenced object) and V3.1 (name<sep>object)."""
    while (yield from block.expect(DEEPSEEK_CALL, DEEPSEEK_END)) == DEEPSEEK_CALL:
        head, _ = yield from block.until(DEEPSEEK_SEP)
        is_fenced = head.strip() == "function" and (yield from block.peek()) != "{"
        if is_fenced:
            head, _ = yield from block.until("```json")
        block.begin(head.strip())
        yield from block.arguments()
        if is_fenced:
            yield from block.expect("```")
        yield from block.expect(DEEPSEEK_CALL_END)
        block.done()


def kimi(block: CallBlock) -> Steps:
    """Kimi K2: functions.name:index is the call's id, and its object."""
    while (yield from block.expect(KIMI_CALL, KIMI_END)) == KIMI_CALL:
        call_id, _ = yield from block.until(KIMI_ARGUMENTS)
        call_id = call_id.strip()
        block.begin(call_id.rpartition(":")[0].removeprefix("functions.") or call_id, call_id)
        yield from block.arguments()
        yield from block.expect(KIMI_CALL_END)
        block.done()


def qwen_coder(close: str) -> Program:
    """Return the program of <function=name><parameter=key>value</parameter></function> up to `close`."""

    def read(block: CallBlock) -> Steps:
        if not block.opened.endswith("<function="):
            yield from block.expect("<function=")
        while True:
            name, _ = yield from block.until(">")
            if len(name.split()) != 1 or "<" in name:
                block.refuse()
            yield from _members(block, name.strip(), "<parameter=", ">", "</parameter>", "</function>")
            if (yield from _goes_on(block, (close, "<function="))) != "<function=":
                return

    return read


def invokes(call: str, end: str, parameter: str, parameter_end: str, close: str) -> Program:
    """Return the program of <invoke name="…"> with <parameter name="…">value</parameter>, each up to its end tag."""

    def read(block: CallBlock) -> Steps:
        while (yield from block.expect(call, close)) == call:
            name, _ = yield from block.until('">')
            yield from _members(block, name.strip(), parameter, ">", parameter_end, end)

    return read


def _members(block: CallBlock, tool: str, opens: str, opened: str, closes: str, end: str) -> Steps:
    """Read parameters up to `end`. Keys may have quotes, and attributes may follow: string="true" gives the type.
    Models that know other formats write one JSON object instead."""
    block.begin(tool)
    is_first = True
    if (yield from block.peek()) == "{":
        yield from block.arguments()
        yield from block.expect(end)
        block.done()
        return
    while (yield from block.expect(opens, end)) == opens:
        head, _ = yield from block.until(opened)
        key, _, attributes = head.partition('"')
        # Qwen3-Coder sometimes leaves out </parameter>: a line that begins the next part also ends the value.
        value, found = yield from block.until(closes, "\n" + opens, "\n" + end)
        block.unread(0 if found == closes else len(found))
        kind = None if "string=" not in attributes else 'string="true"' in attributes
        value = value.removeprefix("\n").removesuffix("\n") if kind is None else value
        block.member(tool, key.strip(), value, is_first=is_first, is_string=kind)
        is_first = False
    block.add("{}" if is_first else "}")
    block.end()


def glm(block: CallBlock) -> Steps:
    """GLM-4.5 and later: a name, then <arg_key>key</arg_key><arg_value>value</arg_value> up to </tool_call>."""
    name, end = yield from block.until("<arg_key>", "</tool_call>")
    name = name.strip()
    if not name or any(char in name for char in "{}<>\n"):
        block.refuse()
    block.begin(name)
    is_first = True
    while end == "<arg_key>":
        key, _ = yield from block.until("</arg_key>")
        yield from block.expect("<arg_value>")
        value, _ = yield from block.until("</arg_value>")
        block.member(name, key.strip(), value, is_first=is_first)
        is_first = False
        end = yield from block.expect("<arg_key>", "</tool_call>")
    block.add("{}" if is_first else "}")
    block.end()


def harmony(name: str) -> Program:
    """Return the program of a message to the tool `name`: an object and <|call|>, as gpt-oss writes it."""

    def read(block: CallBlock) -> Steps:
        block.begin(name)
        yield from block.arguments()
        yield from _goes_on(block, ("<|call|>", "<|end|>"))

    return read
