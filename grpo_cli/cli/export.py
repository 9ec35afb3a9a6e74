"""`grpo export`: export a model, and print where it is and how it was verified."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_cli.cli import output
from grpo_cli.cli.arguments import AsJson, Run, TrustCheckpoint
from grpo_cli.units import count_noun, format_bytes

Dtype = Annotated[
    str | None,
    typer.Option(help="float32, float16 or bfloat16; by default the run's, if it is fine enough."),
]
Push = Annotated[
    str | None,
    typer.Option(
        metavar="ORG/NAME", help="Upload to this private repository on the hub, as one commit."
    ),
]


def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="Folder of the export.")],
    format: Annotated[str, typer.Option(help="safetensors, adapter or gguf.")] = "safetensors",
    checkpoint: Annotated[str | None, typer.Option(help="A step of the run, or best.")] = None,
    dtype: Dtype = None,
    gguf_type: Annotated[str | None, typer.Option(help="f32, f16 (default), bf16 or q8_0.")] = None,
    converter: Annotated[
        Path | None, typer.Option(help="A llama.cpp checkout, or its converter.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest file of weights, such as 500MB.")
    ] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Load the export and compare.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    push: Push = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository of --push public.")
    ] = False,
    trust_checkpoint: TrustCheckpoint = False,
    json: AsJson = False,
) -> None:
    """Export a trained model for other tools, and verify that the export is that model."""
    from grpo_cli import api

    with output.stdout_to_stderr(), output.progress("starting") as tell:
        result = api.export(
            run,
            to,
            format=format,  # type: ignore[arg-type]
            checkpoint=checkpoint,
            dtype=dtype,  # type: ignore[arg-type]
            gguf_type=gguf_type,  # type: ignore[arg-type]
            converter=converter,
            max_shard_size=max_shard_size,
            verify=verify,
            force=force,
            push_to=push,
            private=not public,
            trust_checkpoint=trust_checkpoint,
            on_progress=tell,
        )
    output.show(result, _print_result, as_json=json)


def _print_result(result: Mapping[str, Any]) -> None:
    console, verification = output.stdout(), result["verification"]
    precision = f", {result['precision']}" if result["precision"] else ""
    size = f"{count_noun(len(result['files']), 'file')}, {format_bytes(result['bytes'])}"
    text = f"exported {result['model']} as {result['format']}{precision}: {size}"
    console.print(output.marked("ok", text))
    if verification is None:
        _print_line("not verified", style="yellow")
    else:
        _print_verification(verification, result["precision"])
    for each in result["warnings"]:
        _print_line(f"warning: {each['seen']}. Fix: {each['fix']}", style="yellow")
    console.print(f"  folder  {result['path']}")
    if result.get("pushed"):
        console.print(f"  pushed  {result['pushed']}")


def _print_verification(verification: Mapping[str, Any], precision: str | None) -> None:
    difference, moved = verification["difference"], verification["moved"]
    tensors = verification["tensors"]
    if "instead_of" in verification:
        coarse = verification["instead_of"]
        _print_line(
            f"{precision}, since {coarse['dtype']} keeps {coarse['kept']:.0%} of what training "
            "changed; --dtype float16 is finer, and as small"
        )
    _print_line(
        f"logits  max error {difference['largest']:.2g}, mean {difference['mean']:.2g} (training "
        f"changed logits by up to {moved['largest']:.2g}, {moved['mean']:.2g} on average): "
        f"{verification['kept']:.1%} kept"
    )
    same, prompts = verification["greedy_same"], verification["prompts"]
    _print_line(f"greedy  the same first tokens for {same} of {prompts} prompts")
    if tensors["all"]:
        changed = f"{tensors['changed']} of {tensors['all']}"
        _print_line(f"weights {changed} tensors differ from the base model's")
    for issue in verification["findings"]:
        _print_line(f"{issue['level']}: {issue['seen']}. Fix: {issue['fix']}", style="yellow")


def _print_line(text: str, style: str = "") -> None:
    output.print_words(output.stdout(), text, style, indent=2)
