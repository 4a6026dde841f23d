"""Formats that outputs must match, as regular expressions. Any other format is an annotation.

llguidance has some of them itself, but without a calendar and with seconds up to 60: its results are not always dates.
"""

from __future__ import annotations

_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
# Leap years: divisible by four, but centuries only if divisible by 400. There is no year 0.
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS_31 = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAYS_30 = r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = rf"(?:{_DAYS_31}|{_DAYS_30}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
# A fraction of a second ends at nanoseconds.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_N = "[0-9]{1,6}"
_CLOCK = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = rf"P(?:(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_CLOCK})?|{_CLOCK}|{_N}W)"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_IPV6 = (
    r"(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|(?:[0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}|::(?:[0-9a-fA-F]{1,4})?)"
)
_HEX = "[0-9a-fA-F]"


def _uuid(version: int) -> str:
    return rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


# Whole values.
PATTERNS = {
    "date": _DATE,
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "duration": _DURATION,
    **{f"uuid{version}": _uuid(version) for version in (1, 3, 4, 5, 6, 7, 8)},
    # Pydantic's. A network's address has no bits after its prefix: one host is always valid.
    "ipv4network": rf"{_IPV4}/32",
    "ipv6network": rf"{_IPV6}/128",
    "ipv4interface": rf"{_IPV4}/(?:3[0-2]|[12]?[0-9])",
    "ipv6interface": rf"{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])",
    "ipvanyaddress": rf"(?:{_IPV4}|{_IPV6})",
    "ipvanynetwork": rf"(?:{_IPV4}/32|{_IPV6}/128)",
    "ipvanyinterface": rf"(?:{_IPV4}/(?:3[0-2]|[12]?[0-9])|{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))",
    "base64": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?",
    "byte": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_URI_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/\-]|%[0-9A-Fa-f]{2})"
# Whole values of the formats that llguidance writes itself where they are JSON.
NATIVE_PATTERNS = {
    "email": rf"[A-Za-z0-9_+%\-]+(?:\.[A-Za-z0-9_+%\-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": rf"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.\-]*:(?://[A-Za-z0-9.\-]+(?::[0-9]{{1,5}})?)?{_URI_CHARACTER}+"
    rf"(?:[?#](?:{_URI_CHARACTER}|[?])*)?",
}
NATIVE = frozenset(NATIVE_PATTERNS)


def pattern_of(name: object) -> str | None:
    """Return the pattern of a whole value; None: llguidance has its own, or the format is an annotation."""
    return f"^(?:{PATTERNS[name]})$" if isinstance(name, str) and name in PATTERNS else None
