"""The form of an upload: read whatever its pieces, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("python_multipart")

from penstock.common.errors import InvalidArgument
from penstock.gateway.file_upload import FileUpload

KIND = b"multipart/form-data; boundary=x"


def part(name: str, data: bytes, more: str = "") -> bytes:
    return f'--x\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data + b"\r\n"


def read(data: bytes, size: int = 1 << 20) -> FileUpload:
    upload = FileUpload(KIND)
    for at in range(0, len(data), size):
        upload.feed(data[at : at + size])
    return upload


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 40), st.booleans())
def test_file_and_fields_do_not_depend_on_the_pieces_or_their_order(file: bytes, size: int, is_first: bool) -> None:
    file = file.replace(b"\r\n--x", b"")
    parts = [part("file", file, '; filename="a.jsonl"'), part("purpose", b"batch")]
    upload = read(b"".join(parts if is_first else parts[::-1]) + b"--x--\r\n", size)
    assert (upload.is_whole, upload.file_name, upload.fields) == (True, "a.jsonl", {"purpose": "batch"})
    assert upload.num_held == len(file)
    assert upload.taken(7) + upload.taken(1000) == file
    assert upload.num_held == 0


def test_a_form_that_is_cut_short_is_not_whole() -> None:
    assert not read(part("file", b"abc", '; filename="a"')).is_whole


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"nonsense", "body"),
        (part("file", b"a") + part("file", b"b") + b"--x--\r\n", "file"),
        (b"".join(part(f"f{number}", b"") for number in range(40)) + b"--x--\r\n", "body"),
        (part("purpose", b"x" * 5000) + b"--x--\r\n", "purpose"),
        (part("file", b"", "; filename=" + "x" * 9000) + b"--x--\r\n", "body"),
    ],
)
def test_a_form_beyond_its_bounds_is_refused_by_the_fields_name(data: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(data, 512)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [b"", b"application/json", b"multipart/form-data", b"multipart/mixed; boundary=x"])
def test_another_body_is_refused(kind: bytes) -> None:
    with pytest.raises(InvalidArgument):
        FileUpload(kind)


def test_a_name_has_only_what_can_be_shown() -> None:
    upload = read(part("file", b"", '; filename="a\tb\x00' + "c" * 600 + '"') + b"--x--\r\n")
    assert upload.file_name == "ab" + "c" * 510
