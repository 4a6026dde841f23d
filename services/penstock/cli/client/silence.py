"""Reason why a server gave no answer, found by probing its port by hand: no listener, TLS against plaintext, or a
certificate that one side does not accept.
"""

from __future__ import annotations

import socket
import ssl

from penstock.common.config import ChannelConfig
from penstock.common.credentials import channel_tls_context
from penstock.common.errors import StartupError
from penstock.common.proxies import through_proxy

SECONDS = 3.0
# Flags of a service's connections -> those of a command.
_FLAGS = {"--channel-tls-ca": "--tls-ca", "--channel-tls-cert": "--client-cert", "--channel-tls-key": "--client-key"}
# The start of HTTP/2 with empty settings: a server answers it with its own settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class Silence(StartupError):
    """A server gave no answer. `lasts`: waiting will not help, since the other side said what it does not accept."""

    def __init__(self, message: str, *, flag: str, lasts: bool = False) -> None:
        super().__init__(message, flag=flag)
        self.lasts = lasts


def silence_of(
    address: str,
    *,
    tls: bool,
    tls_ca: str | None,
    client_cert: str | None,
    client_key: str | None,
    name: str | None,
    hint: str = "is `penstock serve` running?",
) -> Silence:
    """Make the error for `address`, which did not answer with these settings; it names the flag to change.

    Blocks for some seconds at most. `name` is the one expected in the certificate when it is not the address's. `hint`
    names a likely cause when nobody answers.
    """
    if through := through_proxy(address):
        return Silence(f"no answer from {address}: {through}", flag="--address")
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    host = host.strip("[]")
    files = ChannelConfig(
        channel_tls=tls, channel_tls_ca=tls_ca, channel_tls_cert=client_cert, channel_tls_key=client_key
    )
    try:
        context = channel_tls_context(files)
    except StartupError as error:
        return with_own_flags(error)
    try:
        with socket.create_connection((host, int(port)), SECONDS) as plain:
            if context is None:
                return _of_plaintext(address, host, plain)
            return _of_tls(address, plain, context, name or host)
    except (OSError, ValueError, OverflowError):
        return Silence(f"no server answers at {address}; {hint}", flag="--address")


def _of_plaintext(address: str, host: str, plain: socket.socket) -> Silence:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLError as error:
        if _is_plaintext(error):
            return _too_slow(address)
        # An alert: only TLS has alerts.
    except OSError:
        return _too_slow(address)
    told = f"{address} speaks TLS: give --tls-ca FILE, or --tls for the system's CAs"
    return Silence(told, flag="--tls-ca", lasts=True)


def _is_plaintext(error: ssl.SSLError) -> bool:
    """True when the other side answered a handshake with bytes that are not TLS, or hung up."""
    signs = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", None)
    return error.reason in signs or isinstance(error, ssl.SSLEOFError)


def _of_tls(address: str, plain: socket.socket, context: ssl.SSLContext, name: str) -> Silence:
    try:
        secure = context.wrap_socket(plain, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message
        if "mismatch" in why:
            told = f"the certificate of {address} is not for {name}: give --server-name"
            return Silence(told, flag="--server-name", lasts=True)
        return Silence(
            f"the certificate of {address} is not accepted ({why}): give its CA", flag="--tls-ca", lasts=True
        )
    except TimeoutError:
        return _too_slow(address)
    except OSError as error:
        if isinstance(error, ssl.SSLError) and not _is_plaintext(error):
            # An alert of TLS 1.2.
            return _wants_certificate(address)
        # A side that only hangs up may be the proxy of a server that is still starting.
        said = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError) and error.reason is not None
        return Silence(f"{address} does not speak TLS: leave --tls and --tls-ca out", flag="--tls-ca", lasts=said)
    with secure:
        try:
            secure.sendall(_PREFACE)
            answers = bool(secure.recv(1))
        except OSError as error:
            answers = isinstance(error, TimeoutError)
        if answers:
            return _too_slow(address)
    # TLS 1.3 refuses a client after the handshake: it hangs up, with an alert or without.
    return _wants_certificate(address)


def with_own_flags(error: StartupError) -> Silence:
    """Return `error` about a file of ChannelConfig with the command's names of these flags."""
    message, flag = error.message, error.flag or "--tls-ca"
    for theirs, ours in _FLAGS.items():
        message, flag = message.replace(theirs, ours), ours if flag == theirs else flag
    return Silence(message, flag=flag, lasts=True)


def _wants_certificate(address: str) -> Silence:
    told = f"{address} wants a client certificate that it accepts: give --client-cert and --client-key"
    return Silence(told, flag="--client-cert", lasts=True)


def _too_slow(address: str) -> Silence:
    return Silence(f"{address} accepts connections but did not answer in time", flag="--connect-timeout-seconds")
