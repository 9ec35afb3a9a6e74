"""The `grpo` command: registers the subcommands, and turns what they raise into a message and an exit code."""

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from grpo_cli import __version__
from grpo_cli.cli.output import print_problems, stderr
from grpo_cli.errors import ExitCode, GrpoError, ProblemsError

COMMANDS = {
    "init": "init",
    "check": "check",
    "check-batch": "check",
    "probe": "probe",
    "train": "train",
    "sweep": "sweep",
    "schema": "check",
    "doctor": "doctor",
    "eval": "eval",
    "expect": "expect",
    "export": "export",
    "convert": "convert",
    "diagnose": "diagnose",
    "report": "report",
    "watch": "watch",
    "serve": "serve",
    "chat": "serve",
    "runs": "runs",
    "rewards": "rewards",
    "env": "env",
}
"""The module of each command, or group of commands, in the order of `grpo --help`."""
_OF_THE_MACHINE = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`)",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "change the permissions, or choose another place",
    errno.EPERM: "change the permissions, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Errors of files that are not bugs, wherever they come from → the fix."""
_USAGE_FIXES = {
    r"No such command 'status'": "grpo watch shows the newest run, grpo runs list all of them",
    r"No such option: --(\w+\.[\w.]+)": r"write --set \1=VALUE",
    r"unexpected extra argument.*\((= *\S+)": r"write --set KEY=VALUE without spaces around `=`",
}
"""Patterns of Typer's messages, and the fix."""
_received: list[int] = []
"""Signals that this command got."""


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        callback=_root,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in names:
        module = import_module(f"grpo_cli.cli.{COMMANDS[name]}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name.replace("-", "_")))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"grpo {__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, measure and ship language models with GRPO, from YAML recipes."""


def main() -> None:
    """Entry point of the `grpo` command; loads the command that is meant, or all for help."""
    first = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    app = make_app([first] if first in COMMANDS else COMMANDS)
    sys.exit(run_guarded(lambda: app(prog_name="grpo", standalone_mode=False)))


class Terminated(BaseException):
    """A SIGTERM or SIGHUP, on its way past every `finally`; Typer would take a KeyboardInterrupt for Ctrl-C."""


def run_guarded(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; unexpected errors (with `GRPO_DEBUG=1` all) keep a traceback."""
    _received.clear()
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # `nohup` has it ignored, and means it.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminate)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Text in another encoding must be printable.
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    try:
        code = int(command() or ExitCode.OK)
        # Typer makes an exit code of a Ctrl-C that nothing else has answered.
        interrupted = code == ExitCode.INTERRUPTED and signal.SIGINT in _received
        return _say("interrupted", ExitCode.INTERRUPTED) if interrupted else code
    except GrpoError as error:
        if os.environ.get("GRPO_DEBUG") == "1":
            raise
        if isinstance(error.__cause__, KeyboardInterrupt):
            # Ctrl-C reached a reward, whose error hides it.
            return _say("interrupted", ExitCode.INTERRUPTED)
        if isinstance(error, ProblemsError):
            print_problems(error.problems)
            if len(error.problems) > 1:
                stderr().print(f"{len(error.problems)} problems; nothing was started")
        else:
            stderr().print(f"error: {error}", style="red")
        return error.exit_code
    except TyperException as error:
        return _explain_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        # Typer raises Abort for Ctrl-C or end of input at a prompt.
        return _say("interrupted", ExitCode.INTERRUPTED)
    except Terminated:
        return _say("terminated", ExitCode.TERMINATED)
    except BrokenPipeError:
        # The reader has gone (`grpo … | head`): no error.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return ExitCode.OK
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE or os.environ.get("GRPO_DEBUG") == "1":
            raise
        name = "" if error.filename is None else f"{error.filename}: "
        seen = f"{name}{(error.strerror or '').lower()}"
        stderr().print(f"error: {GrpoError(seen, _OF_THE_MACHINE[error.errno])}", style="red")
        return ExitCode.ENVIRONMENT
    except Exception:
        # Libraries that import lazily turn a signal during an import into errors of their own.
        if not _received or os.environ.get("GRPO_DEBUG") == "1":
            raise
        if _received[0] == signal.SIGINT:
            return _say("interrupted", ExitCode.INTERRUPTED)
        return _say("terminated", ExitCode.TERMINATED)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise on the first signal, so that every `finally` cleans up; the next one kills."""
    _received.append(number)
    signal.signal(number, signal.SIG_DFL)
    raise Terminated


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt


def _say(word: str, code: ExitCode) -> ExitCode:
    stderr().print(word)
    return code


def _explain_usage(error: TyperException) -> int:
    message = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "grpo"
    fix = f"see {command} --help"
    option = re.match(r"No such option: --([\w-]+)", message)
    if option and context and any(each.name == "set_" for each in context.command.params):
        from grpo_cli.recipe.grpo_fields import find_setting

        setting = find_setting(option[1].replace("-", "_"))
        if setting is not None:
            message, fix = message.partition(" (")[0], f"write --set {setting}=VALUE"
    for pattern, hint in _USAGE_FIXES.items():
        fix = match.expand(hint) if (match := re.search(pattern, message)) else fix
    if message:
        stop = "" if message.endswith("?") else "."
        stderr().print(f"error: {message.rstrip('.')}{stop} Fix: {fix}", style="red")
    return ExitCode.USAGE
