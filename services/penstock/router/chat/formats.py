"""Table of models' formats for tool calls and reasoning, and the choice of one by a chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from penstock.common.errors import StartupError
from penstock.router.chat import call_programs as programs
from penstock.router.chat.call_block import Program
from penstock.router.chat.gemma_calls import GEMMA_END, GEMMA_QUOTE, gemma
from penstock.router.chat.kimi_k3_calls import XTML_ANSWER, XTML_CALLS, XTML_CLOSE, XTML_OPEN, XTML_SEP, kimi_k3
from penstock.router.chat.marks import Marks, marks_of


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around a thought at the start of an answer."""

    name: str
    opens: str
    closes: str
    # Any of them in a template selects the format.
    marks: tuple[str, ...]
    # Further markers that must stay in the text although a vocabulary calls them special.
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """One way to write tool calls."""

    name: str
    models: str
    # A block begins with any of these in any place, but with a `start` only at the start of an answer. An `inline` is
    # the start of the call itself.
    opens: tuple[str, ...]
    # None: the format has a reader of its own.
    program: Program | None
    # A template with all marks of one of these selects the format; the first row that fits wins.
    marks: tuple[tuple[str, ...], ...] = ()
    starts: tuple[str, ...] = ()
    inline: tuple[str, ...] = ()
    # Further markers that must stay in the text although a vocabulary calls them special.
    inner: tuple[str, ...] = ()
    # Messages on channels, which have their own parser.
    is_harmony: bool = False
    # Markers around the text of an answer, which are no part of it; the first one begins it.
    around: tuple[str, ...] = ()

    def call_marks(self, *more: str) -> Marks:
        """Markers of the start of calls, and further ones."""
        return marks_of(*more, *self.opens, *self.inline)


@dataclass(frozen=True)
class ChatFormat:
    """Formats of one model."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    # The template or an option names the thought. Else a model that writes thoughts is believed.
    thinks: bool = False
    # The template reads `reasoning_effort` itself.
    takes_effort: bool = False
    # White space that the template writes before the marker that closes a thought.
    before_close: str = ""

    def kept_for(self, *, with_tools: bool) -> tuple[str, ...]:
        """Markers that must reach the parser although a vocabulary calls them special."""
        row = self.reasoning
        thought = () if row is None else (row.opens, row.closes, *row.inner)
        if with_tools or self.tools.is_harmony or self.tools.around:
            return (*self.tools.opens, *self.tools.inner, *thought)
        return thought


RowT = TypeVar("RowT", ToolFormat, ReasoningFormat)
REASONING = (
    ReasoningFormat("gemma", "<|channel>thought", "<channel|>", ("<|channel>thought",), ("<|channel>",)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", ("<seed:think>",)),
    ReasoningFormat(
        "kimi_k3",
        f"{XTML_OPEN}think{XTML_SEP}",
        f"{XTML_CLOSE}think{XTML_SEP}",
        (XTML_OPEN,),
        (XTML_OPEN, XTML_CLOSE, XTML_SEP),
    ),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷", ("◁think▷",)),
    ReasoningFormat(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        ("Here is my thought process:", "Here's my thought process:"),
    ),
    ReasoningFormat("think", "<think>", "</think>", ("<think>", "</think>")),
)
THINK = REASONING[-1]

# Beginnings of an object that is a call, in the middle of a text.
OBJECTS = ('{"name":', '{"type": "function", "name":', '{"type":"function","name":')
# The more specific rows come first: several formats write <tool_call>.
TOOLS = (
    ToolFormat(
        "harmony",
        "gpt-oss",
        opens=(),
        program=None,
        marks=(("<|channel|>", "<|message|>"),),
        inner=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        is_harmony=True,
    ),
    ToolFormat(
        "gemma4",
        "Gemma 4",
        opens=("<|tool_call>",),
        program=gemma,
        marks=(("<|tool_call>call:",),),
        inner=(GEMMA_QUOTE, GEMMA_END),
    ),
    ToolFormat(
        "deepseek_v4",
        "DeepSeek V4",
        opens=("<｜DSML｜tool_calls>",),
        program=programs.invokes(
            '<｜DSML｜invoke name="',
            "</｜DSML｜invoke>",
            '<｜DSML｜parameter name="',
            "</｜DSML｜parameter>",
            "</｜DSML｜tool_calls>",
        ),
        marks=(("｜DSML｜tool_calls",),),
        inner=("｜DSML｜",),
    ),
    ToolFormat(
        "deepseek_v32",
        "DeepSeek V3.2",
        opens=("<｜DSML｜function_calls>",),
        program=programs.invokes(
            '<｜DSML｜invoke name="',
            "</｜DSML｜invoke>",
            '<｜DSML｜parameter name="',
            "</｜DSML｜parameter>",
            "</｜DSML｜function_calls>",
        ),
        marks=(("<｜DSML｜",), ("｜DSML｜",)),
        inner=("｜DSML｜",),
    ),
    ToolFormat(
        "deepseek_v3",
        "DeepSeek V3, R1",
        opens=("<｜tool▁calls▁begin｜>",),
        program=programs.deepseek,
        marks=(("<｜tool▁sep｜>", "```json"),),
        inner=(programs.DEEPSEEK_CALL, programs.DEEPSEEK_SEP, programs.DEEPSEEK_CALL_END, programs.DEEPSEEK_END),
    ),
    ToolFormat(
        "deepseek_v31",
        "DeepSeek V3.1",
        opens=("<｜tool▁calls▁begin｜>",),
        program=programs.deepseek,
        marks=(("<｜tool▁sep｜>",),),
        inner=(programs.DEEPSEEK_CALL, programs.DEEPSEEK_SEP, programs.DEEPSEEK_CALL_END, programs.DEEPSEEK_END),
    ),
    ToolFormat(
        "kimi_k3",
        "Kimi K3",
        opens=(XTML_CALLS[0],),
        program=kimi_k3,
        # Templates put the tags together.
        marks=((XTML_OPEN, XTML_CLOSE, XTML_SEP),),
        inner=(XTML_OPEN, XTML_CLOSE, XTML_SEP),
        around=XTML_ANSWER,
    ),
    ToolFormat(
        "kimi_k2",
        "Kimi K2",
        opens=("<|tool_calls_section_begin|>",),
        program=programs.kimi,
        # The first template of Kimi-K2-Instruct renders no calls; its turns have this mark.
        marks=(("<|tool_call_argument_begin|>",), ("<|im_middle|>",)),
        inner=(programs.KIMI_CALL, programs.KIMI_ARGUMENTS, programs.KIMI_CALL_END, programs.KIMI_END),
    ),
    ToolFormat(
        "minimax_m2",
        "MiniMax M2",
        opens=("<minimax:tool_call>",),
        program=programs.invokes(
            '<invoke name="', "</invoke>", '<parameter name="', "</parameter>", "</minimax:tool_call>"
        ),
        marks=(("<minimax:tool_call>",),),
        inner=("</minimax:tool_call>",),
    ),
    ToolFormat(
        "seed_oss",
        "Seed-OSS",
        opens=("<seed:tool_call>",),
        program=programs.qwen_coder("</seed:tool_call>"),
        marks=(("<seed:tool_call>",),),
        inner=("</seed:tool_call>",),
    ),
    ToolFormat(
        "glm4",
        "GLM-4.5, 4.6, 4.7, 5",
        opens=("<tool_call>",),
        program=programs.glm,
        marks=(("<arg_key>", "<arg_value>"),),
        inner=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5",
        opens=("<tool_call>", "<function="),
        program=programs.qwen_coder("</tool_call>"),
        marks=(("<function=", "<parameter="),),
        inner=("</tool_call>",),
    ),
    ToolFormat(
        "mistral",
        "Mistral, Ministral, Magistral, Devstral",
        opens=("[TOOL_CALLS]",),
        program=programs.mistral,
        marks=(("[TOOL_CALLS]",),),
        inner=("[ARGS]", "[CALL_ID]"),
    ),
    ToolFormat(
        "phi4",
        "Phi-4-mini",
        # The model writes the second unless a prompt asks for another.
        opens=("<|tool_call|>", "functools"),
        program=programs.objects(close=("<|/tool_call|>",)),
        marks=(("<|/tool_call|>",),),
        inner=("<|/tool_call|>",),
    ),
    ToolFormat(
        "lfm2",
        "LFM2, LFM2.5",
        opens=("<|tool_call_start|>",),
        program=programs.lfm2,
        marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        inner=(programs.LFM2_END,),
    ),
    ToolFormat(
        "granite",
        "Granite 3",
        opens=("<|tool_call|>", "<tool_call>"),
        program=programs.objects(close=("</tool_call>",)),
        marks=(("<|tool_call|>",), ("<|start_of_role|>", "<tool_call>[")),
        inner=("</tool_call>",),
    ),
    ToolFormat(
        "llama4",
        "Llama 4 and 3.2, as Python writes calls",
        opens=("<|python_start|>", "<|python_tag|>"),
        program=programs.llama,
        marks=(("<|python_start|>",), ("<|header_start|>",)),
        starts=("[", "{"),
        inline=OBJECTS,
        inner=("<|python_end|>",),
    ),
    ToolFormat(
        "llama3",
        "Llama 3.1, 3.2, 3.3",
        opens=("<|python_tag|>",),
        program=programs.llama,
        marks=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        starts=("{",),
        inline=OBJECTS,
    ),
    ToolFormat(
        "hermes",
        "Hermes, Qwen2.5, Qwen3, Granite 4, and templates that no other row knows",
        opens=("<tool_call>",),
        program=None,
        marks=(("<tool_call>",),),
        inner=("</tool_call>",),
    ),
)
HERMES = TOOLS[-1]
AUTO, NONE = "auto", "none"


def choose_format(
    template: str, tools: str = AUTO, reasoning: str = AUTO, *, response_template: str = ""
) -> ChatFormat:
    """Choose the formats of a model by the text of its chat template, or by name.

    transformers' `response_template`, JSON text, takes precedence if its markers are known. Hermes and <think> are used
    when no row fits. Raises StartupError naming the flag for a name that no row has.
    """
    row = _named(TOOLS, tools, "--tool-format") if tools != AUTO else None
    # Markers in it may be regular expressions.
    told = response_template.replace("\\", "")
    row = row or _fitting(told) or _fitting(template) or HERMES
    if reasoning == NONE:
        return ChatFormat(row, None, thinks=row.is_harmony, takes_effort="reasoning_effort" in template)
    if reasoning != AUTO:
        thought: ReasoningFormat | None = _named(REASONING, reasoning, "--reasoning-format")
    else:
        thought = _thought(told) or _thought(template)
    thinks, thought = row.is_harmony or thought is not None, thought or THINK
    return ChatFormat(
        row,
        thought,
        thinks=thinks,
        takes_effort="reasoning_effort" in template,
        # In a template's text literals a line break is an escape, as a rule.
        before_close="\n" if any(f"{line}{thought.closes}" in template for line in ("\\n", "\n")) else "",
    )


def _thought(template: str) -> ReasoningFormat | None:
    return next((one for one in REASONING if any(mark in template for mark in one.marks)), None)


def _fitting(template: str) -> ToolFormat | None:
    for row in TOOLS:
        if any(all(mark in template for mark in marks) for marks in row.marks):
            return row
    return None


def _named(rows: tuple[RowT, ...], name: str, flag: str) -> RowT:
    for row in rows:
        if row.name == name:
            return row
    raise StartupError(f"{flag} {name!r}: must be one of: auto, {', '.join(one.name for one in rows)}", flag=flag)


DEFAULT = ChatFormat(HERMES, THINK)
