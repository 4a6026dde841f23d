"""No request ends in a fault of the gateway: every value that no client should send, at every place of every body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
from factories.servers.gateway import running_gateway
from factories.servers.served import Served
from factories.wire.hostile_bodies import BODIES, GENERATING, Case, hostile_cases, whole_case
from factories.wire.hostile_forms import HOSTILE_FORMS, TAKEN_FORMS
from factories.wire.made_things import FORM, make_things
from factories.wire.plain_http import PlainHttp
from penstock.gateway import app

pytestmark = pytest.mark.xdist_group("gateway")
# Of a route's cases so many are in the ordinary run: every n-th.
_ONE_OF = 61
_CONNECTIONS = 4
# A field whose value is refused by the name of another, which it does not go together with.
_OTHERS = {
    ("force_words_ids", "num_beams"),
    ("constraints", "num_beams"),
    ("n", "num_return_sequences"),
    # Of another name, no tool is the one that is chosen.
    ("tools", "tool_choice"),
}
# No answer in time, and work that would come too late, are none of the body's: a model goes on as long as a request
# lets it.
_FINE = (200, 400, 404, 413, 429, 504)
# Routes that refuse every body that is one, and the reason of each: nothing else of the body is read.
_REFUSING = {"/v1/responses/compact": "COMPACTION_NOT_SUPPORTED"}


def _named(case: Case, error: dict[str, Any]) -> bool:
    """True for an error that names the case's field."""
    if error["reason"] == "PROMPT_TOO_LONG":
        # All texts together.
        return True
    if error["reason"] == _REFUSING.get(case.path):
        return True
    param = error["param"] or ""
    if not case.place:
        # An object without the fields that are needed, or with others.
        return bool(error["field"]) or error["reason"] == "BATCH_ENDED"  # by an earlier case
    top = param.partition(".")[0].partition("[")[0]
    return top == case.field or case.field in error["message"] or (case.field, top) in _OTHERS


async def _sweep(served: Served, cases: Sequence[Case]) -> None:
    """Send all cases; fail with a list of those that were answered wrongly."""
    wrong: list[str] = []
    left = iter(cases)

    async def send(address: tuple[str, int]) -> None:
        async with PlainHttp(*address) as client:
            for case in left:
                status, answer = await client.ask("POST", *case.sent(made))
                if status not in _FINE or (status == 400 and not _named(case, json.loads(answer)["error"])):
                    wrong.append(f"{case}: {status} {answer[:200]!r}")

    async with running_gateway(served.grpc, answer_seconds=5.0) as gateway:
        async with PlainHttp(*gateway.host_port) as client:
            made = await make_things(client)
        with structlog.testing.capture_logs() as lines:
            await asyncio.gather(*(send(gateway.host_port) for _ in range(_CONNECTIONS)))
    assert not wrong, f"{len(wrong)} of {len(cases)}: " + "\n".join(wrong[:20])
    # A deadline of the gateway's own is told by the line of its request.
    faults = [line for line in lines if line["log_level"] in ("warning", "error", "critical")]
    assert not [line for line in faults if line["event"] != "request" or line["status"] not in _FINE]


_RUNS = [
    run
    for path in BODIES
    for run in (
        pytest.param(path, _ONE_OF, id=path),
        pytest.param(path, 1, id=f"{path} all", marks=pytest.mark.slow),
    )
]


@pytest.mark.parametrize(("path", "one_of"), _RUNS)
@pytest.mark.timeout(3600)
async def test_a_hostile_value_is_refused_by_the_name_of_its_field(served: Served, path: str, one_of: int) -> None:
    await _sweep(served, hostile_cases(path)[::one_of])


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.timeout(3600)
async def test_a_stream_refuses_what_an_answer_refuses(served: Served, path: str) -> None:
    await _sweep(served, hostile_cases(path, is_stream=True))


@pytest.mark.parametrize("path", BODIES)
async def test_the_body_that_the_cases_change_is_answered(served: Served, path: str) -> None:
    async with running_gateway(served.grpc) as gateway, PlainHttp(*gateway.host_port) as client:
        status, answer = await client.ask("POST", *whole_case(path, await make_things(client)))
    assert (status, (json.loads(answer).get("error") or {}).get("reason")) == (
        (400, _REFUSING[path]) if path in _REFUSING else (200, None)
    )


def test_every_route_that_takes_a_body_has_cases() -> None:
    # The body of an upload is a form.
    assert {*BODIES, "/v1/files"} == app._POST.keys()


@pytest.mark.parametrize("form", HOSTILE_FORMS)
async def test_a_hostile_form_is_refused(served: Served, form: str, caplog: pytest.LogCaptureFixture) -> None:
    header, body = HOSTILE_FORMS[form]
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(served.grpc) as gateway, PlainHttp(*gateway.host_port) as client:
            status, answer = await client.ask("POST", b"/v1/files", body, header)
            left = json.loads((await client.ask("GET", b"/v1/files"))[1])["data"]
    assert status in (400, 413), answer
    assert not left
    assert not [line for line in lines if line["log_level"] in ("warning", "error", "critical")]
    # A service forwards what libraries log.
    assert not caplog.records


@pytest.mark.parametrize("name", TAKEN_FORMS)
async def test_an_odd_form_that_is_one_is_taken(served: Served, name: str) -> None:
    async with running_gateway(served.grpc) as gateway, PlainHttp(*gateway.host_port) as client:
        status, answer = await client.ask("POST", b"/v1/files", TAKEN_FORMS[name], FORM)
        assert status == 200, answer
        shown = json.loads(answer)["filename"]
    assert shown.isprintable()
    assert 0 < len(shown) <= 512


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        # As the issue lists them: integers of 400 digits.
        *(
            ("/v1/chat/completions", {name: 10**400}, name)
            for name in ("temperature", "max_tokens", "seed", "logit_bias")
        ),
        ("/v1/chat/completions", {"documents": [[]]}, "documents[0]"),
        ("/v1/chat/completions", {"documents": [{"text": 1}]}, "documents[0].text"),
        ("/apply-template", {"documents": [None]}, "documents[0]"),
        # Together with the tools' parameters.
        ("/apply-template", {"chat_template_kwargs": {"a": [1] * 20_000}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"force_words_ids": [[1]] * 20_000}, None),
        # Answers of several prompts have numbers that are counted from it.
        *(
            ("/v1/completions", {"prompt": ["a", "b"], "stream": True, name: {"type": 6}}, name)
            for name in ("n", "num_return_sequences")
        ),
    ],
)
def test_the_field_is_named_by_its_path(served: Served, path: str, body: dict[str, Any], field: str | None) -> None:
    status, _, answer = served.ask(path, {"messages": [{"role": "user", "content": "Hello"}], **body})
    assert (status, json.loads(answer)["error"]["param"]) == (400, field)


@pytest.mark.parametrize("shape", ["lists", "objects"])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
            "tools[0].function.parameters",
        ),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools[0].parameters"),
        ("/v1/messages", {"max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}]}, "tools[0].input_schema"),
        ("/v1/messages/count_tokens", {"tools": [{"name": "f", "input_schema": {}}]}, "tools[0].input_schema"),
        ("/apply-template", {"chat_template_kwargs": {}}, "chat_template_kwargs"),
    ],
)
def test_what_protobuf_holds_is_taken_and_one_level_more_is_named(
    served: Served, path: str, body: dict[str, Any], field: str, shape: str
) -> None:
    def status_of(depth: int) -> tuple[int, str | None]:
        nested: Any = 1
        for _ in range(depth - 1):
            nested = [nested] if shape == "lists" else {"a": nested}
        conversation = [{"role": "user", "content": "Hello"}]
        given = {"messages": conversation, "input": conversation, "max_tokens": 1, **json.loads(json.dumps(body))}
        at = given
        for step in field.replace("[0]", ".0").split("."):
            at = at[int(step) if step.isdigit() else step]
        at["x"] = nested
        status, _, answer = served.ask(path, given)
        return status, json.loads(answer).get("error", {}).get("param") if status != 200 else None

    assert status_of(32) == (200, None)
    assert status_of(33) == (400, field)
