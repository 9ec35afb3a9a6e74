"""`grpo serve` and `grpo chat`."""

import contextlib
import importlib
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from grpo_cli.cli.arguments import Overrides, RunOrDir, Served
from grpo_cli.cli.output import clean_lines, progress, stderr, stdout
from grpo_cli.errors import RunError, UsageError

if TYPE_CHECKING:
    from grpo_cli.launch.server_plan import ServerPlan
    from grpo_cli.serve.chat import ChatBackend, Message

Checkpoint = Annotated[str | None, typer.Option(help="A step of the run, or best.")]


def serve(
    source: Served,
    checkpoint: Checkpoint = None,
    set_: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="By default 8000, or the recipe's.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt and answer together, in tokens.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of the memory.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the server to start.")
    ] = 600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """Serve a model with vLLM: a trained one, or the server that a recipe's training samples from."""
    from grpo_cli.serve.plan import Listening, prepare, prepare_for_training

    listening = Listening(host, port, max_model_len, gpu_memory_utilization)
    if source.suffix in (".yaml", ".yml"):
        training = prepare_for_training(source, set_, listening, needs_vllm=not dry_run)
        setting = f"`--set generation.vllm.base_url={training.root}`"
        _run(training, timeout, f"train with {setting}; Ctrl-C stops the server", dry_run=dry_run)
        return
    plan = prepare(source, checkpoint, listening, needs_vllm=not dry_run)
    hint = f"{plan.name} answers at {plan.url}; Ctrl-C stops the server\n\n{plan.curl}"
    _run(plan, timeout, hint, dry_run=dry_run)


def _run(plan: "ServerPlan", timeout_s: float, hint: str, *, dry_run: bool) -> None:
    """Start a server, say how to reach it, and stay until Ctrl-C; or print its command."""
    if dry_run:
        stdout().print(plan.command_line())
        return
    from grpo_cli.launch.server_process import read_end, running

    console = stderr()
    log = Path(tempfile.mkstemp(prefix="grpo-serve-", suffix=".log")[1])
    console.print(f"log  {log}")
    with contextlib.ExitStack() as stack:
        with console.status("starting") as status:
            process = stack.enter_context(
                running(plan, log, timeout_s, lambda line: status.update(Text(line)))
            )
        stdout().print(hint)
        with contextlib.suppress(KeyboardInterrupt):
            code = process.wait()
            raise RunError(f"the server ended with {code}", f"see {log}", details=[read_end(log)])


def chat(
    source: RunOrDir,
    checkpoint: Checkpoint = None,
    url: Annotated[
        str | None, typer.Option(help="A server's API, such as http://127.0.0.1:8000/v1.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="System message; by default the recipe's, if it does not depend on the row."
        ),
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="A picture for the first question; repeat it for more.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
) -> None:
    """Chat with a trained model in the terminal, loaded here or through a server."""
    from grpo_cli.launch.server_plan import find_served
    from grpo_cli.serve.chat import SamplingParams, open_model, open_server, read_picture

    served = find_served(source, checkpoint)
    sampling = SamplingParams(temperature, max_tokens, **served.reading)
    if image and not served.has_images:
        raise UsageError(
            f"--image needs a model trained on images, and {source} is none", "leave out --image"
        )
    pictures = [read_picture(path) for path in image or ()]
    with progress("loading the model"):
        backend = (
            open_server(url, None, sampling, is_text=served.is_text)
            if url
            else open_model(served, sampling)
        )
    _converse(served.name, backend, served.system if system is None else system, pictures)


_COMMANDS = "/new starts a new conversation, /quit or Ctrl-D ends the chat"


def _converse(
    name: str, backend: "ChatBackend", system: str | None, pictures: Sequence[Any]
) -> None:
    """Read lines and stream the answers; Ctrl-C ends an answer, Ctrl-D (or /quit) the chat.

    If stdin is not a terminal, every line is answered and nothing else is printed on stdout.
    """
    from grpo_cli.serve.chat import say

    typed = sys.stdin.isatty()
    if typed:
        # Importing it gives `input` its history and arrow keys.
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        stderr().print(f"{name} · {_COMMANDS}")
        if system:
            stderr().print(f"system: {system}", style="dim")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _read_line(typed)) is not None:
        if line == "/new":
            messages = list(opening)
        elif typed and re.fullmatch(r"/\w+", line):
            stderr().print(f"there is no {line}; {_COMMANDS}", style="yellow")
        elif line:
            messages.append(say(line, pictures if len(messages) == len(opening) else ()))
            messages.append({"role": "assistant", "content": _answer(backend, messages)})


def _read_line(typed: bool) -> str | None:
    """Return the line that was typed, stripped; None at the end."""
    try:
        line = input("> " if typed else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/quit" else line


def _answer(backend: "ChatBackend", messages: "list[Message]") -> str:
    pieces: list[str] = []
    stream = backend(messages)
    try:
        for piece in stream:
            pieces.append(piece)
            sys.stdout.write(clean_lines(piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]
    sys.stdout.write("\n")
    return "".join(pieces)
