"""Check the health of a service in this container by its Unix socket: `python -I -S health_probe.py PATH`.

PATH is the service's --health-socket. Exit status 0 means SERVING; 1 comes with a line that gives the reason. The
container's health check runs it all day, so it imports nothing written in Python.
"""

import _socket
import sys

SECONDS = 3.0


def main(arguments: list[str]) -> int:
    """Print the answer; return the exit status."""
    path = arguments[0] if arguments else ""
    probe = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    probe.settimeout(SECONDS)
    try:
        probe.connect(path)
        answer = probe.recv(64).strip().decode()
    except OSError as error:
        answer = f"no answer from {path!r}: {error.strerror or 'timed out'}"
    finally:
        probe.close()
    sys.stdout.write(f"{answer or 'no answer'}\n")
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
