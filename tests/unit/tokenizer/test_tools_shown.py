"""Chat templates that leave tools out, found by rendering them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from penstock.tokenizer.chat_template import ChatTemplates
from penstock.tokenizer.control_tokens import ControlMarks
from penstock.tokenizer.template_process import Renderer, answer_to
from penstock.tokenizer.tools_shown import hides_tools

SHOWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
# Templates -> True when they leave tools out.
TEMPLATES = {
    "none": (SHOWN, True),
    "all": ("{{ tools | tojson if tools else '' }}" + SHOWN, False),
    "names": ("{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + SHOWN, False),
    "with a system message": (
        "{% if messages[0].role == 'system' and tools %}{{ tools | tojson }}{% endif %}" + SHOWN,
        False,
    ),
    "refused": ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + SHOWN, False),
    "no system message": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SHOWN,
        True,
    ),
    "a count": ("{{ (tools or []) | length }}" + SHOWN, True),
}


@pytest.mark.parametrize("protect", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_template_that_leaves_tools_out_is_found(name: str, protect: bool) -> None:
    template, hides = TEMPLATES[name]
    assert await hides_of({"default": template}, protect=protect) is hides


async def test_the_template_of_tools_is_the_one_that_counts() -> None:
    assert not await hides_of({"default": SHOWN, "tool_use": TEMPLATES["all"][0]})
    assert await hides_of({"default": TEMPLATES["all"][0], "tool_use": SHOWN})


async def test_without_a_template_nothing_is_hidden() -> None:
    assert not await hides_of({})


async def hides_of(templates: Mapping[str, str], *, protect: bool = True) -> bool:
    made = ChatTemplates(templates, {}, ControlMarks({7: "<|im_start|>"}), protect=protect)
    renderer = Renderer(made.renderer_settings)

    async def render(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return answer_to(renderer, dict(request))

    return await hides_tools(made, render)
