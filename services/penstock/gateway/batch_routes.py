"""`/v1/batches`: a file of requests in, files of answers and errors out, on idle capacity.

The form is that of https://platform.openai.com/docs/api-reference/batch, as in openai-python 3.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.common.units import parse_duration
from penstock.gateway.answers import dumps
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.file_routes import asking_jobs, jobs_of, limit_of, page_of, query_of
from penstock.gateway.job_scope import require_jobs_scope
from penstock.gateway.places import ANYBODY
from penstock.gateway.request_fields import Fields, typed
from penstock.jobs.job_records import ENDPOINTS, batch_object

_DAYS = re.compile("([0-9]{1,4})d")
_DAY_SECONDS = 86400.0
# OpenAI's bounds.
_MOST_PAIRS, _MOST_NAME_CHARS, _MOST_VALUE_CHARS = 16, 64, 512
_LISTED, _MOST_LISTED = 20, 100


async def create_batch(call: HttpCall) -> Answer:
    """Make a batch. Raises InvalidArgument naming a field, NotFound, ResourceExhausted."""
    jobs, fields = jobs_of(call), Fields(call)
    input_file, endpoint = fields.raw("input_file_id"), fields.raw("endpoint")
    input_file = typed(input_file, str, "input_file_id")
    if endpoint not in ENDPOINTS:
        raise InvalidArgument("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    window = fields.get("completion_window", str, "24h")
    seconds = _seconds(window, call.config.max_batch_seconds)
    metadata = _metadata(fields.get("metadata", dict, {}))
    fields.done()
    if call.tenant != ANYBODY and not (call.config.job_token_file or call.config.channel_token_file):
        raise FailedPrecondition(
            "the router asks for tokens, and this gateway has none for the lines of batches (--job-token-file)",
            reason="NO_JOB_TOKEN",
        )
    await require_jobs_scope(call)
    with asking_jobs():
        record = await jobs.batches.create(
            call.owner, input_file=input_file, endpoint=endpoint, window=window, seconds=seconds, metadata=metadata
        )
    jobs.runner.wake()
    return dumps(batch_object(record))


def _seconds(window: str, most: float) -> float:
    """Return a completion_window in seconds. Raises InvalidArgument."""
    try:
        days = _DAYS.fullmatch(window)
        seconds = int(days[1]) * _DAY_SECONDS if days else parse_duration(window)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= most:
        raise InvalidArgument(
            "completion_window", f"must be a duration such as 24h, at most {most:g} s (--max-batch-seconds)"
        )
    return seconds


def _metadata(given: dict[str, Any]) -> dict[str, str]:
    if len(given) > _MOST_PAIRS:
        raise InvalidArgument("metadata", f"must have at most {_MOST_PAIRS} entries", reason="TOO_MANY")
    for name, value in given.items():
        text = typed(value, str, f"metadata.{name[:_MOST_NAME_CHARS]}")
        if len(name) > _MOST_NAME_CHARS or len(text) > _MOST_VALUE_CHARS or "\0" in name + text:
            raise InvalidArgument(
                f"metadata.{name[:_MOST_NAME_CHARS]}",
                f"must have at most {_MOST_VALUE_CHARS} characters, and its name {_MOST_NAME_CHARS}",
            )
    return given


async def get_batch(call: HttpCall) -> Answer:
    """Answer with a batch. Raises NotFound."""
    with asking_jobs():
        return dumps(batch_object(await jobs_of(call).batches.get(call.owner, call.tail)))


async def cancel_batch(call: HttpCall) -> Answer:
    """Begin the end of a batch: what is answered so far is kept. Raises NotFound, and FailedPrecondition at its end."""
    jobs = jobs_of(call)
    with asking_jobs():
        record = await jobs.batches.cancel(call.owner, call.tail)
    jobs.runner.wake()
    return dumps(batch_object(record))


async def list_batches(call: HttpCall) -> Answer:
    """Answer with the caller's batches, the newest first. Raises InvalidArgument."""
    asked = query_of(call)
    limit = limit_of(asked, _LISTED, _MOST_LISTED)
    with asking_jobs():
        found, has_more = await jobs_of(call).batches.listed(call.owner, after=asked.get("after"), limit=limit)
    return dumps(page_of([batch_object(one) for one in found], has_more=has_more))
