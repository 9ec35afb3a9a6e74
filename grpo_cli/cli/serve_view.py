"""How a server and a chat look in a terminal. Knows no models."""

import contextlib
import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from grpo_cli.cli.output import stderr, stdout
from grpo_cli.errors import RunError
from grpo_cli.launch.serve_plan import ServePlan
from grpo_cli.launch.server_plan import ServerPlan
from grpo_cli.launch.server_process import read_end, running
from grpo_cli.report.live.terminal import clean_lines
from grpo_cli.workflows.chat_backends import ChatBackend, Message

_COMMANDS = "/new starts anew, /quit or Ctrl-D ends"


def print_command(plan: ServerPlan) -> None:
    """Prints the command that serves the model."""
    stdout().print(plan.command_line(), markup=False, soft_wrap=True)


def run(plan: ServePlan, timeout_s: float) -> None:
    """Starts a server for a trained model, says how to ask it, and stays until Ctrl-C."""
    _run(plan, timeout_s, f"{plan.name} answers at {plan.url}; Ctrl-C ends it\n\n{plan.curl}")


def run_for_training(plan: ServerPlan, timeout_s: float) -> None:
    """Starts a server that a training samples from, says how it finds it, and stays until Ctrl-C."""
    found = f"`--set generation.vllm.base_url={plan.root}`"
    _run(plan, timeout_s, f"a training finds it with {found}; Ctrl-C ends it")


def _run(plan: ServerPlan, timeout_s: float, hint: str) -> None:
    console = stderr()
    log = Path(tempfile.mkstemp(prefix="grpo-serve-", suffix=".log")[1])
    console.print(f"log  {log}", markup=False)
    with contextlib.ExitStack() as stack:
        with console.status("starting") as status:
            process = stack.enter_context(
                running(plan, log, timeout_s, lambda line: status.update(Text(line)))
            )
        stdout().print(hint, markup=False)
        with contextlib.suppress(KeyboardInterrupt):
            code = process.wait()
            raise RunError(f"the server ended with {code}:\n{read_end(log)}\nFix: see {log}")


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows what is being waited for."""
    with stderr().status(Text(what)):
        yield


def converse(name: str, speaker: ChatBackend, system: str | None) -> None:
    """Reads lines and streams the answers; Ctrl-C ends an answer, Ctrl-D (or /quit) the chat.

    Where stdin is no terminal every line is answered, and nothing else is printed on stdout.
    """
    typed = sys.stdin.isatty()
    if typed:
        # Importing it gives `input` its history and arrow keys.
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        stderr().print(f"{name} · {_COMMANDS}", markup=False)
        if system:
            stderr().print(f"system: {system}", markup=False, style="dim")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _read_line(typed)) is not None:
        if line == "/new":
            messages = list(opening)
        elif typed and re.fullmatch(r"/\w+", line):
            stderr().print(f"there is no {line}; {_COMMANDS}", markup=False, style="yellow")
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(speaker, messages)})


def _read_line(typed: bool) -> str | None:
    """What was typed, stripped; None at the end."""
    try:
        line = input("> " if typed else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/quit" else line


def _answer(speaker: ChatBackend, messages: list[Message]) -> str:
    pieces: list[str] = []
    stream = speaker(messages)
    try:
        for piece in stream:
            pieces.append(piece)
            sys.stdout.write(clean_lines(piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]
    sys.stdout.write("\n")
    return "".join(pieces)
