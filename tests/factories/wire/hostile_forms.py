"""Uploads that no client should send: forms that are none, too large, or of the wrong parts."""

from __future__ import annotations

from collections.abc import Mapping

from factories.wire.made_things import BOUNDARY, FORM, form_of

_PURPOSE = (b'name="purpose"', b"batch")
_FILE = (b'name="file"; filename="a"', b"{}")
_GOOD = form_of(_PURPOSE, _FILE)


def _expires(anchor: bytes, seconds: bytes) -> bytes:
    after = ((b'name="expires_after[anchor]"', anchor), (b'name="expires_after[seconds]"', seconds))
    return form_of(_PURPOSE, *after, _FILE)


# Name -> header and body, which must be refused.
HOSTILE_FORMS: Mapping[str, tuple[bytes, bytes]] = {
    "JSON": (b"content-type: application/json", b"{}"),
    "no type": (b"accept: */*", _GOOD),
    "an empty type": (b"content-type:", _GOOD),
    "a type that is no text": (b"content-type: \xff\xfe; boundary=\xff", _GOOD),
    "no boundary": (b"content-type: multipart/form-data", _GOOD),
    "an empty boundary": (b"content-type: multipart/form-data; boundary=", _GOOD),
    "a boundary in half a quotation": (b'content-type: multipart/form-data; boundary="a', _GOOD),
    "another boundary": (b"content-type: multipart/form-data; boundary=b", _GOOD),
    "a long boundary": (b"content-type: multipart/form-data; boundary=" + b"b" * 4000, _GOOD),
    "a boundary that is no text": (b"content-type: multipart/form-data; boundary=\xed\xa0\x80", _GOOD),
    "a boundary by continuations": (b"content-type: multipart/form-data; boundary*0=a; boundary*9=b", _GOOD),
    "an odd charset": (b"content-type: multipart/form-data; boundary*=none'en'a-boundary", _GOOD),
    "nothing": (FORM, b""),
    "an end alone": (FORM, b"--%b--\r\n" % BOUNDARY),
    "bytes": (FORM, bytes(range(256)) * 16),
    "half a form": (FORM, _GOOD[: len(_GOOD) // 2]),
    "a form without its last line": (FORM, _GOOD[: -len(BOUNDARY) - 6]),
    "no file": (FORM, form_of(_PURPOSE)),
    "no purpose": (FORM, form_of(_FILE)),
    "a purpose with a zero": (FORM, form_of((b'name="purpose"', b"batch\x00"), _FILE)),
    "a purpose that is no text": (FORM, form_of((b'name="purpose"', b"\xed\xa0\x80"), _FILE)),
    "a long purpose": (FORM, form_of((b'name="purpose"', b"b" * 5000), _FILE)),
    "two files": (FORM, form_of(_PURPOSE, _FILE, _FILE)),
    "many fields": (FORM, form_of(*((b'name="f%d"' % number, b"") for number in range(64)), _PURPOSE, _FILE)),
    "a long name": (FORM, form_of(_PURPOSE, (b'name="%b"' % (b"n" * 9000), b""), _FILE)),
    "many headers": (
        FORM,
        b"--%b\r\n%bcontent-disposition: form-data; name=a\r\n\r\n\r\n" % (BOUNDARY, b"a: b\r\n" * 5000) + _GOOD,
    ),
    "a header without an end": (FORM, b"--%b\r\ncontent-disposition: %b" % (BOUNDARY, b"a" * 100_000)),
    "a header without a colon": (FORM, b"--%b\r\na b\r\n\r\n\r\n" % BOUNDARY + _GOOD),
    "no disposition": (FORM, b"--%b\r\n\r\nbatch\r\n--%b--\r\n" % (BOUNDARY, BOUNDARY)),
    "seconds without an anchor": (FORM, form_of(_PURPOSE, (b'name="expires_after[seconds]"', b"60"), _FILE)),
    "an anchor without seconds": (FORM, form_of(_PURPOSE, (b'name="expires_after[anchor]"', b"created_at"), _FILE)),
    "another anchor": (FORM, _expires(b"\x00", b"60")),
    **{
        f"seconds of {seconds.decode('latin-1')[:8]!r}": (FORM, _expires(b"created_at", seconds))
        for seconds in (b"0", b"-1", b"1e3", b"9" * 400, b"\xd9\xa3", b"\x00", b"nan", b" 60")
    },
}
# Name -> body with an odd name of the file, which is kept.
TAKEN_FORMS: Mapping[str, bytes] = {
    name: form_of(_PURPOSE, (b'name="file"; filename="%b"' % given, b"{}"))
    for name, given in {
        "no name": b"",
        "a path": b"../../etc/passwd",
        "bytes": b"\xff\xfe",
        "zeros and escapes": b"a\x00\x1b[31mb",
        "half a pair": b"\xed\xa0\x80",
        "a long name": b"n" * 2000,
        "another direction": "a\u202eb".encode(),
    }.items()
}
