"""Test of a chat template for showing tools to the model: it renders one and searches for it.

Many templates know nothing of tools and silently leave them out. Then a model never calls one, or invents the arguments
of forced calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.common.errors import PenstockError, StartupError
from penstock.tokenizer.bundle_cache import usual_cache
from penstock.tokenizer.chat_template import ChatTemplates, Conversation
from penstock.tokenizer.config import TokenizerConfig
from penstock.tokenizer.control_tokens import ControlMarks
from penstock.tokenizer.load_bundle import load_in_child
from penstock.tokenizer.metrics import TokenizerMetrics
from penstock.tokenizer.template_pool import TemplateLimits, TemplatePool

Render = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
# A name that no template contains.
_NAME = "penstock_tells_the_weather"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_USER, _SYSTEM = {"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}


async def hides_tools(templates: ChatTemplates, render: Render) -> bool:
    """True when the template accepts tools and leaves them out; `render` is TemplatePool's.

    False when it refuses them, since callers get that error, and when it cannot be rendered at all.
    """
    is_silent = False
    # Some add tools only to a system message.
    for messages in ([_USER], [_SYSTEM, _USER]):
        try:
            answer = await render(templates.request(Conversation(messages, tools=[_TOOL])))
        except PenstockError:
            continue
        text = answer.get("marked") or answer.get("text")
        if text is not None and _NAME in text:
            return False
        is_silent = is_silent or text is not None
    return is_silent


async def folder_hides_tools(folder: Path, config: TokenizerConfig) -> bool | None:
    """Return `hides_tools` of a model's folder, found in a child process; None if that fails."""
    try:
        cache = usual_cache(config.cached_tokenizers)
        bundle, child = await load_in_child(folder, timeout_seconds=config.load_timeout_seconds, cache=cache)
    except StartupError:
        return None
    templates = ChatTemplates(bundle.templates, bundle.special_tokens, ControlMarks({}), protect=False)
    limits = TemplateLimits(
        processes=1,
        pipeline=config.template_pipeline,
        max_queued=config.max_queued_requests,
        seconds=config.template_timeout_seconds,
        memory_bytes=config.template_memory_bytes,
        start_seconds=config.load_timeout_seconds,
    )
    pool = TemplatePool(templates.renderer_settings, limits, TokenizerMetrics(CollectorRegistry()))
    try:
        await pool.start(child)
        return await hides_tools(templates, pool.render)
    except StartupError:
        return None
    finally:
        await pool.close()
