"""`/v1/files`: files of callers, which batches read and write.

The form is that of https://platform.openai.com/docs/api-reference/files, as in openai-python 3.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs

from penstock.common.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock.common.logging import get_logger
from penstock.database.transactions import DatabaseFailed
from penstock.gateway.answers import dumps
from penstock.gateway.endpoint import Answer, FileContent, HttpCall
from penstock.gateway.file_upload import FILE, FileUpload
from penstock.gateway.jobs import Jobs
from penstock.jobs.file_store import CHUNK_BYTES
from penstock.jobs.job_records import FileRecord, file_object

PURPOSE = "batch"
# Fields of a form that decide how long its file is kept.
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_NUMBER = re.compile("[0-9]{1,9}")
_MOST_LISTED, _LISTED = 10_000, 1000
_log = get_logger("penstock.gateway")


def jobs_of(call: HttpCall) -> Jobs:
    """Return the store of a call. Raises FailedPrecondition when there is none."""
    if call.jobs is None:
        raise FailedPrecondition("this gateway has no files and batches (--job-store)", reason="JOB_STORE_OFF")
    return call.jobs


@contextmanager
def asking_jobs() -> Iterator[None]:
    """Turn a store's failure into the caller's error."""
    try:
        yield
    except DatabaseFailed as error:
        _log.error("the store of jobs failed", error=str(error))
        raise Unavailable(
            "the store of files and batches does not answer: try again",
            reason="JOB_STORE_DOWN",
            retry_after_seconds=1.0,
        ) from error


async def create_file(call: HttpCall) -> Answer:
    """Keep an uploaded file. Raises PenstockError; then nothing of it is kept."""
    jobs = jobs_of(call)
    await jobs.rights.require_scope(call.tenant, call.client)
    with asking_jobs(), jobs.uploading(call.owner):
        form = FileUpload(call.content_type)
        record = await jobs.files.begin(call.owner)
        try:
            await _receive(call, jobs, form, record)
            name, seconds = _check(form)
            record = await jobs.files.finish(record, name=name, purpose=PURPOSE, seconds=seconds)
        except BaseException:
            await asyncio.shield(jobs.files.abandon(record))
            raise
    return dumps(file_object(record))


async def _receive(call: HttpCall, jobs: Jobs, form: FileUpload, record: FileRecord) -> None:
    """Write the file of a form to the store while it arrives."""
    assert call.parts is not None
    place, held = 0, bytearray()

    async def write(*, at_least: int) -> None:
        nonlocal place, held
        await asyncio.to_thread(form.feed, bytes(held))
        held = bytearray()
        while form.num_held >= at_least and (data := form.taken(CHUNK_BYTES)):
            await jobs.files.append(record, place, data)
            place += len(data)

    async for part in call.parts:
        held += part
        if len(held) >= CHUNK_BYTES:
            await write(at_least=CHUNK_BYTES)
    await write(at_least=1)


def _check(form: FileUpload) -> tuple[str, float | None]:
    """Return the name of a form's file, and its life in seconds. Raises InvalidArgument naming a field."""
    if not form.is_whole or form.file_name is None:
        raise InvalidArgument(FILE, "must be a whole file in a form (multipart/form-data)")
    if form.fields.get("purpose") != PURPOSE:
        raise InvalidArgument("purpose", f"must be {PURPOSE}")
    anchor, seconds = form.fields.get(_ANCHOR), form.fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return form.file_name, None
    if anchor != "created_at":
        raise InvalidArgument("expires_after.anchor", "must be created_at")
    if seconds is None or _NUMBER.fullmatch(seconds) is None or int(seconds) < 1:
        raise InvalidArgument("expires_after.seconds", "must be a number of seconds")
    return form.file_name, float(seconds)


async def get_file(call: HttpCall) -> Answer:
    """Answer with the facts of a file. Raises NotFound."""
    with asking_jobs():
        return dumps(file_object(await jobs_of(call).files.get(call.owner, call.tail)))


async def get_file_content(call: HttpCall) -> Answer:
    """Answer with the bytes of a file. Raises NotFound."""
    files = jobs_of(call).files
    with asking_jobs():
        record = await files.get(call.owner, call.tail)
    return FileContent(record.num_bytes, files.content(record))


async def delete_file(call: HttpCall) -> Answer:
    """Delete a file. Raises NotFound, and FailedPrecondition while a batch reads it."""
    with asking_jobs():
        await jobs_of(call).files.delete(call.owner, call.tail)
    return dumps({"id": call.tail, "object": "file", "deleted": True})


async def list_files(call: HttpCall) -> Answer:
    """Answer with the caller's files. Raises InvalidArgument."""
    asked = query_of(call)
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgument("order", "must be asc or desc")
    limit = limit_of(asked, _LISTED, _MOST_LISTED)
    with asking_jobs():
        found, has_more = await jobs_of(call).files.listed(
            call.owner,
            purpose=asked.get("purpose"),
            after=asked.get("after"),
            # No answer is larger than a page of the default.
            limit=min(limit, _LISTED),
            newest_first=order == "desc",
        )
    return dumps(page_of([file_object(one) for one in found], has_more=has_more))


def query_of(call: HttpCall) -> dict[str, str]:
    """Return the parameters of a call's URL; of several with one name the last. Raises InvalidArgument."""
    asked = {name: values[-1] for name, values in parse_qs(call.query).items()}
    for name, value in asked.items():
        if "\0" in value:
            # No database of texts has it.
            raise InvalidArgument(name[:64], "must not have a zero character")
    return asked


def limit_of(asked: dict[str, str], default: int, most: int) -> int:
    """Return the length of a page. Raises InvalidArgument."""
    limit = asked.get("limit", str(default))
    if _NUMBER.fullmatch(limit) is None or not 1 <= int(limit) <= most:
        raise InvalidArgument("limit", f"must be from 1 to {most}")
    return int(limit)


def page_of(objects: list[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    """Return OpenAI's object of one page of a list."""
    ends = (
        {"first_id": objects[0]["id"], "last_id": objects[-1]["id"]} if objects else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": objects, **ends, "has_more": has_more}
