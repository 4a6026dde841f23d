"""Templates with a marked form that determines the plain one."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment
from penstock.tokenizer.template_process import Renderer, are_only_shown

MARK = "\U00100001\U000f0000"


def are_told_by_one(source: str, variables: tuple[str, ...] = ()) -> bool:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return are_only_shown(environment.parse(source), environment.parse(source.replace("<s>", MARK)), variables)


@pytest.mark.parametrize(
    "source",
    [
        "<s>{{ m }}",
        "{% for m in messages %}{% if m %}<s>{% else %}{{ '<s>' + m ~ '<s>' }}{% endif %}{% endfor %}",
        "{{ '<s>' if m == 'user' else ('x' ~ '<s>') }}",
        "{{ bos }}{% set x = 'other' %}{{ x | trim }}",
    ],
)
def test_literals_that_are_written_out_change_nothing_else(source: str) -> None:
    assert are_told_by_one(source, ("bos",))


@pytest.mark.parametrize(
    "source",
    [
        "{% if '<s>' in m %}x{% endif %}",
        "{{ ('<s>' + m) | trim }}",
        "{{ ('<s>' + m)[1:] }}",
        "{{ m.split('<s>')[0] }}",
        "{{ '<s>' if m == '<s>' else '' }}",
        "{% set x = '<s>' %}{{ x }}",
        "{% set x %}<s>{% endset %}{{ x | length }}",
        "{% macro f() %}<s>{% endmacro %}{{ f() | length }}",
        "{% filter trim %}<s>{% endfilter %}",
        "{% for m in ['<s>'] %}{{ m }}{% endfor %}",
        "{% for m in messages recursive %}<s>{% if m.more %}{{ loop(m.more) | length }}{% endif %}{% endfor %}",
        "{{ '<s>' * 3 }}",
        "{% if bos %}x{% endif %}",
        "{% for bos in messages %}x{% endfor %}",
        "{{ bos | length }}",
    ],
)
def test_a_program_that_looks_at_them_is_rendered_both_ways(source: str) -> None:
    assert not are_told_by_one(source, ("bos",))


def rendered(source: str, **wanted: Any) -> dict[str, Any]:
    settings = {
        "templates": {"default": [source, source.replace("<s>", MARK)]},
        "special_tokens": {"bos_token": "<s>", "pad_token": "-"},
        "marked_special_tokens": {"bos_token": MARK, "pad_token": "-"},
    }
    request = {
        "template": "default",
        "mark": True,
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [],
        "documents": [],
        "continue_final_message": False,
        "add_generation_prompt": False,
        "variables": {},
    }
    return Renderer(settings).render({**request, **wanted})


def test_one_rendering_is_made_where_it_determines_both() -> None:
    source = "{{ pad_token | length }}{{ bos_token }}{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    assert rendered(source) == {"text": None, "marked": f"1{MARK}{MARK}hello"}
    assert rendered(source, mark=False) == {"text": "1<s><s>hello", "marked": None}


def test_both_are_made_where_the_template_looks_or_the_end_is_cut() -> None:
    looks = "{{ bos_token | length }}{{ messages[0].content }}"
    assert rendered(looks) == {"text": "3hello", "marked": "2hello"}
    source = "<s>{{ messages[0].content }}"
    assert rendered(source, continue_final_message=True) == {"text": "<s>hello", "marked": f"{MARK}hello"}
