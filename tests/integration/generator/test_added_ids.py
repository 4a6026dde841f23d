"""Texts that spell an added token which the model has no row for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories.engine.local_generators import local_generator
from factories.servers.generation import text_checkpoint
from penstock.common.errors import InvalidArgument

TOKEN = "<image_soft_token>"


@pytest.mark.parametrize(
    ("special", "allowed"),
    [(True, False), pytest.param(True, True, id="control tokens are parsed"), (False, False)],
)
def test_it_is_spelled_where_control_tokens_are_and_refused_elsewhere(
    tmp_path: Path, special: bool, allowed: bool
) -> None:
    folder = text_checkpoint(tmp_path)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": rows, "content": TOKEN, "special": special})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with local_generator(folder, allow_control_tokens_in_text=allowed) as generator:

        def answered(prompt: Any) -> int:
            return generator.generate(prompt, max_new_tokens=2, ignore_eos=True).usage.completion_tokens

        assert answered("see <image>") == 2
        if special and not allowed:
            assert answered(f"see {TOKEN}") == 2
            assert answered([{"role": "user", "content": f"see {TOKEN}"}]) == 2
        else:
            with pytest.raises(InvalidArgument) as refused:
                answered(f"see {TOKEN}")
            assert refused.value.field == "prompt"
            assert refused.value.reason == "TOKEN_OUT_OF_VOCABULARY"
