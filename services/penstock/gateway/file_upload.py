"""The form of an upload (multipart/form-data) as it arrives: its fields, and the bytes of its file."""

from __future__ import annotations

import logging
from typing import Any

from penstock.common.errors import FailedPrecondition, InvalidArgument

# Fields beside the file, and bytes of each and of a part's headers.
_MOST_FIELDS, _MOST_FIELD_BYTES, _MOST_HEADER_BYTES = 16, 4096, 8192
_MOST_NAME_CHARS = 512
FILE = "file"
# The package warns of a form that is none. Its caller is told by the answer, and must not fill the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


def _no_form() -> InvalidArgument:
    return InvalidArgument("body", "is not a form (multipart/form-data)", reason="MALFORMED_MESSAGE")


class FileUpload:
    """Form that is fed with bytes. It holds what it got of the file until `taken` hands it on.

    Feeding it is not for an event loop.
    """

    def __init__(self, content_type: bytes) -> None:
        """Raises InvalidArgument for a body of another type."""
        try:
            from python_multipart.exceptions import FormParserError
            from python_multipart.multipart import MultipartParser, parse_options_header
        except ImportError as error:
            raise FailedPrecondition(
                "this gateway takes no files: it lacks the package python-multipart", reason="NO_UPLOADS"
            ) from error
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidArgument(
                "body", "must be a form with a file (multipart/form-data)", reason="MALFORMED_MESSAGE"
            )
        self._error = FormParserError
        self._options_of = parse_options_header
        self.fields: dict[str, str] = {}
        # Its name as the caller gave it; None: no file has come.
        self.file_name: str | None = None
        self.is_whole = False
        self._file = bytearray()
        self._field = bytearray()
        self._name = ""
        self._is_file = False
        self._header_name = self._header_value = b""
        self._header_bytes = 0
        self._disposition = b""
        callbacks: Any = {
            "on_part_begin": self._begin_part,
            "on_part_data": self._take,
            "on_part_end": self._end_part,
            "on_header_field": self._take_header_name,
            "on_header_value": self._take_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            # The boundary is too long.
            raise _no_form() from error

    @property
    def num_held(self) -> int:
        """Bytes of the file that `taken` would return."""
        return len(self._file)

    def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises InvalidArgument."""
        try:
            self._parser.write(data)
        except self._error as error:
            raise _no_form() from error

    def taken(self, most: int) -> bytes:
        """Return bytes of the file, at most `most`, and forget them."""
        part = bytes(self._file[:most])
        del self._file[:most]
        return part

    def _begin_part(self) -> None:
        if len(self.fields) >= _MOST_FIELDS:
            raise InvalidArgument("body", f"must have at most {_MOST_FIELDS} fields", reason="TOO_MANY")
        self._field.clear()
        self._disposition = b""
        self._header_bytes = 0

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += self._counted(data[start:end])

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += self._counted(data[start:end])

    def _counted(self, part: bytes) -> bytes:
        self._header_bytes += len(part)
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise InvalidArgument("body", "a part of the form has too long headers", reason="TOO_MANY")
        return part

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = self._options_of(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == FILE
        if self._is_file:
            if self.file_name is not None:
                raise InvalidArgument(FILE, "must be one file")
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self.file_name = "".join(char for char in given if char.isprintable())[:_MOST_NAME_CHARS] or "file"

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file += data[start:end]
            return
        if len(self._field) + end - start > _MOST_FIELD_BYTES:
            raise InvalidArgument(self._name[:64] or "body", f"must have at most {_MOST_FIELD_BYTES} bytes")
        self._field += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_whole = True
