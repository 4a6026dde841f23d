"""`/v1/batches`: a file of requests in, files of answers and errors out, on idle capacity.

The form is that of https://platform.openai.com/docs/api-reference/batch, as in openai-python 3.
"""

from __future__ import annotations

from penstock.gateway.answers import dumps
from penstock.gateway.batch_order import USUAL_WINDOW, checked_order
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.file_routes import asking_jobs, jobs_of, limit_of, page_of, query_of
from penstock.gateway.request_fields import Fields, typed
from penstock.jobs.job_records import batch_object

_LISTED, _MOST_LISTED = 20, 100


async def create_batch(call: HttpCall) -> Answer:
    """Make a batch.

    Raises InvalidArgument naming a field, NotFound, ResourceExhausted, PermissionDenied, FailedPrecondition.
    """
    jobs, fields = jobs_of(call), Fields(call)
    input_file, endpoint = fields.raw("input_file_id"), fields.raw("endpoint")
    input_file = typed(input_file, str, "input_file_id")
    window = fields.get("completion_window", str, USUAL_WINDOW)
    metadata = fields.get("metadata", dict, {})
    fields.done()
    order = checked_order(call.config, call.tenant, endpoint=endpoint, window=window, metadata=metadata)
    await jobs.rights.require_scope(call.tenant, call.client)
    key_digest = await jobs.rights.key_of_batch(call.tenant, order.endpoint)
    with asking_jobs():
        record = await jobs.batches.create(
            call.owner,
            input_file=input_file,
            endpoint=order.endpoint,
            window=order.window,
            seconds=order.seconds,
            metadata=order.metadata,
            key_digest=key_digest,
        )
    jobs.runner.wake()
    return dumps(batch_object(record))


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
