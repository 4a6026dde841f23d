"""A service over a quantised checkpoint: the form is told by GetModelInfo and the status lines, and loads again."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.models import quantised as made
from factories.servers.generation import generation_service, request
from penstock.v1 import model_pb2


@pytest.mark.asyncio
async def test_the_form_that_it_runs_in_is_told(tmp_path: Path) -> None:
    pair = made.quantised_pair(tmp_path, *made.gptq(4, 32))
    answers = []
    for quantization, forms in (("auto", {"int4": 14}), ("none", {"float32": 14})):
        async with generation_service(
            pair.folder, dtype="float32", kernels="torch", quantization=quantization, load_tokenizer=False
        ) as client:
            info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
            assert info.checkpoint_format == "gptq of 4 bits, symmetric, groups of 32"
            assert dict(info.weight_forms) == forms
            line = client.running.service.status_lines()[0]
            assert f"gptq of 4 bits, symmetric, groups of 32: 14 as {next(iter(forms))}" in line
            outcome = await client.generate(request())
            assert outcome.error is None
            answers.append(outcome.ids())
    async with generation_service(pair.dense, dtype="float32", kernels="torch", load_tokenizer=False) as client:
        info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.checkpoint_format, dict(info.weight_forms)) == ("", {})
        plain = await client.generate(request())
    assert plain.ids() == answers[1]
