"""`grpo export`: parses, calls one function, and prints its result."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_cli.cli.arguments import AsJson, Run

if TYPE_CHECKING:
    from grpo_cli.export.exporting import ExportPlan


def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="Folder of the export.")],
    format: Annotated[str, typer.Option(help="safetensors, adapter or gguf.")] = "safetensors",
    checkpoint: Annotated[str | None, typer.Option(help="A step of the run, or best.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, float16 or bfloat16; by default the run's own, or float32 where that loses "
            "much of what was trained."
        ),
    ] = None,
    gguf_type: Annotated[str | None, typer.Option(help="f32, f16 (default), bf16 or q8_0.")] = None,
    converter: Annotated[
        Path | None, typer.Option(help="A llama.cpp checkout, or its converter.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Of one file of weights, such as 500MB.")
    ] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Load the export again, and compare.")
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an export that is there.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Upload to the hub as one commit; private."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository of --push a public one.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Export a trained model that other tools load, and prove that it is the trained one."""
    from grpo_cli.cli import export_view, output
    from grpo_cli.export import exporting
    from grpo_cli.export.gguf import find_converter
    from grpo_cli.export.request import ExportOptions, make_request
    from grpo_cli.export.target import resolve_target

    options: Any = {"format": format, "dtype": dtype, "gguf_type": gguf_type}
    request = make_request(
        run, ExportOptions(**options, checkpoint=checkpoint, max_shard_size=max_shard_size)
    )
    command = find_converter(converter) if format == "gguf" else None
    refine = dtype is None and format == "safetensors" and verify
    target = resolve_target(to, request.run)
    plan = exporting.ExportPlan(request, target, force, verify, refine, command)
    with output.stdout_to_stderr(), export_view.progress() as tell:
        result = _export_and_push(plan, push, public=public, tell=tell)
    if json:
        output.print_json(result)
    else:
        export_view.print_result(result)


def _export_and_push(
    plan: "ExportPlan", push: str | None, *, public: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    from grpo_cli.export import exporting

    if push is None:
        return exporting.export(plan, tell)
    from grpo_cli.export import hub

    hub.check_login(push)
    result = exporting.export(plan, tell)
    tell(f"uploading to {push}")
    message = f"{plan.request.recipe.name}: {plan.request.name}, exported by grpo"
    pushed = hub.push(plan.target, push, private=not public, message=message)
    return {**result, "pushed": pushed}
