"""Entry point of `penstock`: sets the environment before anything native is imported, and turns errors into lines."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from penstock.common.environment import current_environment, prepare_environment


def main() -> None:
    """Run the command line; never returns. Tracebacks only with --debug."""
    prepare_environment()
    if sys.argv[1:] == ["--version"]:
        # The version needs neither typer nor grpc.
        from penstock import __version__

        sys.stdout.write(f"penstock {__version__}\n")
        sys.exit(0)
    if sys.argv[1:] == ["health"] and (path := current_environment().get("PENSTOCK_HEALTH_SOCKET")):
        # A service's check of itself needs neither, too.
        from penstock.serving import health_probe

        sys.exit(health_probe.main([path]))
    if sys.argv[1:2] == ["serve"]:
        # Until the service takes over there is no work to drain, so a stop while torch is imported is clean.
        signal.signal(signal.SIGTERM, _stop)
        # Generation services log their state on this signal once they run. Until then, and in other processes, it is
        # ignored.
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.exit(_run("--debug" in sys.argv))


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Not by an exception: a callback, such as the import system's, would print and drop it, and the stop would be lost.
    os._exit(0)


def _run(debug: bool) -> int:
    try:
        if sys.argv[1:2] == ["serve"]:
            from penstock.cli.serve.direct import run_plainly

            code = run_plainly(sys.argv[1:])
            if code is not None:
                return code
        return _call()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        return _explain(error)


def _call() -> int:
    """Read the command line by typer, run the command, and return the exit code."""
    import typer

    from penstock.cli.app import app
    from penstock.cli.usage_errors import ClickException, show

    if {"-h", "--help", "--help-all", "help"} & set(sys.argv):
        # Imports modules that only a help text needs.
        from penstock.cli.flags import fold_long_flags

        fold_long_flags()
    try:
        # Exit codes come back as numbers; commands return nothing else.
        code = app(prog_name="penstock", standalone_mode=False)
    except ClickException as error:
        return show(error, sys.argv[1:])
    except typer.Abort:
        return 1
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """Write one line to stderr, and return the exit code."""
    from penstock.cli.console import STARTUP_EXIT_CODE, complain, complain_or_log, startup_line
    from penstock.cli.missing_packages import missing_package
    from penstock.common.errors import PenstockError, StartupError

    if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error, sys.argv[1:])) is not None:
        error = missing
    tell = complain_or_log if sys.argv[1:2] == ["serve"] else complain
    if isinstance(error, StartupError):
        tell(startup_line(error))
        return STARTUP_EXIT_CODE
    if isinstance(error, PenstockError):
        tell(f"{error.code.name}: {error.message}")
    elif not isinstance(error, BrokenPipeError):
        tell(f"internal error ({type(error).__name__}); --debug shows where")
    return 1


if __name__ == "__main__":
    main()
