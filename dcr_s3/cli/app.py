"""The command line's entry point: runs one command, turns what it raises into one line and an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import typer
from rich.console import Console

import dcr_s3.cli.engines
import dcr_s3.cli.follow
import dcr_s3.cli.maintain
import dcr_s3.cli.operate
import dcr_s3.cli.planning  # noqa: F401 - these register their commands
from dcr_s3.cli.commands import app
from dcr_s3.cli.output import stderr
from dcr_s3.cli.stopping import Stopped, stop_by_exception
from dcr_s3.errors import DcrError

# What Typer raises for a wrong command line has a public name only through its subclasses.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs ``dcr-s3`` and exits the process with the documented code."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Must be called from the main thread."""
    as_json = "--json" in argv
    stop_by_exception()
    try:
        code = app(args=list(argv) or ["--help"], prog_name="dcr-s3", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except DcrError as error:
        message = "; ".join([str(error), *getattr(error, "__notes__", [])])
        return _fail(type(error).__name__, message, error.exit_code, as_json)
    except Stopped as stopped:
        return _fail("Stopped", str(stopped), stopped.exit_code, as_json)
    except BrokenPipeError:
        # Whoever read stdout has gone; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _UsageError as error:
        hint = "" if as_json else "\nTry 'dcr-s3 --help', or --help after a command."
        return _fail("UsageError", str(error) + hint, 2, as_json)
    except Exception as error:
        if any(arg.startswith("-v") or arg == "--verbose" for arg in argv):
            Console(stderr=True).print_exception()
        else:
            stderr.print("This is a bug; -v shows where it happened.", markup=False)
        return _fail(type(error).__name__, str(error), 1, as_json)


def _fail(kind: str, message: str, exit_code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": kind, "message": message, "exit_code": exit_code}), flush=True)
    stderr.print(f"{kind}: {message}", soft_wrap=True, markup=False, style="red" if exit_code < 128 else None)
    return exit_code
