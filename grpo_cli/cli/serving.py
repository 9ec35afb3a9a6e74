"""`grpo serve` and `grpo chat`: parse, call one function, show what comes."""

from typing import Annotated

import typer

from grpo_cli.cli.arguments import Overrides, RunOrDir, Served

Checkpoint = Annotated[str | None, typer.Option(help="A step of the run, or best.")]


def serve(
    source: Served,
    checkpoint: Checkpoint = None,
    set_: Overrides = None,
    host: Annotated[str, typer.Option(help="Where it listens.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="By default 8000, or where the recipe looks for the server."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt and answer together, in tokens.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of the memory.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until it must answer.")] = 600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command alone.")] = False,
) -> None:
    """Serve a model with vLLM: a trained one, or the one that a recipe's training samples from."""
    from grpo_cli.cli import serve_view
    from grpo_cli.workflows.serve import Listening, prepare, prepare_for_training

    listening = Listening(host, port, max_model_len, gpu_memory_utilization)
    if source.suffix in (".yaml", ".yml"):
        training = prepare_for_training(source, set_, listening, needs_vllm=not dry_run)
        if dry_run:
            serve_view.print_command(training)
        else:
            serve_view.run_for_training(training, timeout)
        return
    plan = prepare(source, checkpoint, listening, needs_vllm=not dry_run)
    if dry_run:
        serve_view.print_command(plan)
    else:
        serve_view.run(plan, timeout)


def chat(
    source: RunOrDir,
    checkpoint: Checkpoint = None,
    url: Annotated[
        str | None, typer.Option(help="A server's API, such as http://127.0.0.1:8000/v1.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message; by default the recipe's, where it is fixed.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
) -> None:
    """Talk with a trained model in the terminal: in this process, or through a server."""
    from grpo_cli.cli import serve_view
    from grpo_cli.launch.serve_plan import find_served
    from grpo_cli.workflows.chat_backends import SamplingParams, open_model, open_server

    served, manner = find_served(source, checkpoint), SamplingParams(temperature, max_tokens)
    with serve_view.waiting("loading the model"):
        speaker = open_server(url, None, manner) if url else open_model(served, manner)
    serve_view.converse(served.name, speaker, served.system if system is None else system)
