"""`grpo export` from a request to a folder under its final name.

Owns the order: refusals, weights, verification, card, and only then the name. What goes wrong on the
way leaves nothing behind, and an export that was there before stays as it was.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo_cli.errors import RunError, SetupError
from grpo_cli.export.request import ExportRequest
from grpo_cli.export.target import KIND, RECORD, check_free, give_name
from grpo_cli.issues import Finding
from grpo_cli.models.adapters import read_adapter_base
from grpo_cli.models.licence import read_licence
from grpo_cli.models.sharded import is_sharded, make_whole
from grpo_cli.processes import run_module, start_child
from grpo_cli.recipe.writing import write_yaml
from grpo_cli.runs.files import SCHEMA_VERSION, write_json, write_text
from grpo_cli.runs.folder import RunFolder, unwritable
from grpo_cli.units import format_bytes

Tell = Callable[[str], None]
"""Told what is being done."""
_VERIFIER = "grpo_cli.export.verification"
_LOST = ("weights", "logits", "training kept")
"""The verification's findings that a finer precision mends."""
_WEIGHT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_GGUF_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Bytes of one weight; q8_0 has a scale of 2 bytes for each 32 weights (ggml's `block_q8_0`)."""
_SPARE_BYTES = 64 * 2**20
"""For tokenizer, card and picture."""


@dataclass(frozen=True)
class ExportPlan:
    """Where an export goes and how it is made."""

    request: ExportRequest
    target: Path
    force: bool
    verify: bool
    may_refine: bool
    """Whether float32 may take the place of a precision that loses what was trained."""
    converter: list[str] | None
    """The command of llama.cpp's converter; None where no GGUF file is wanted."""


def check_target(plan: ExportPlan) -> None:
    """Refuses a target that is there already, or a disk that is too small.

    Raises:
        UsageError: The folder holds something that may not be replaced.
        SetupError: There is not enough room.
    """
    check_free(plan.target, force=plan.force)
    existing = plan.target.absolute()
    while not existing.exists():
        existing = existing.parent
    needed, free = _needed_bytes(plan), shutil.disk_usage(existing).free
    if needed > free:
        raise SetupError(
            f"the export needs {format_bytes(needed)} on the disk of {existing}, which has "
            f"{format_bytes(free)} left. Fix: free some space, or --to a folder on another disk"
        )


def _needed_bytes(plan: ExportPlan) -> float:
    """Room for everything that is on the disk at the same time."""
    from grpo_cli.export.weights import count_parameters

    request = plan.request
    held = sum(file.stat().st_size for file in request.trained.rglob("*"))
    if request.format == "adapter":
        return held + _SPARE_BYTES
    weights, whole = count_parameters(request), _WEIGHT_BYTES["float32"]
    spare = _SPARE_BYTES + (min(held, weights * whole) if is_sharded(request.trained) else 0)
    if request.gguf_type is None:
        dtype = "float32" if plan.may_refine else request.dtype
        return weights * _WEIGHT_BYTES[dtype] + spare
    # The float32 weights it is made from; when they are gone, those it is read back as.
    return weights * (_GGUF_BYTES[request.gguf_type] + whole) + spare


def export(plan: ExportPlan, tell: Tell) -> dict[str, Any]:
    """Writes, verifies and names an export.

    Args:
        plan: What to do.
        tell: Told what is being done.

    Returns:
        What was written, with the verification.

    Raises:
        GrpoError: It cannot be written, or is not what was trained; nothing is left then.
    """
    check_target(plan)
    try:
        plan.target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(
            tempfile.mkdtemp(prefix=f".{plan.target.name}.partial-", dir=plan.target.parent)
        )
    except OSError as error:
        raise unwritable(plan.target, error, "--to DIR") from None
    try:
        with _whole_request(plan, tell) as whole:
            request, verification = _write_checked(replace(plan, request=whole), partial, tell)
            result = _describe(request, verification)
            tell("writing the card")
            _write_companions(request, partial, result)
        result |= _list_files(partial)
        write_json(partial / RECORD, result)
        partial.chmod(0o755)
        for path in partial.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        give_name(partial, plan.target, force=plan.force)
    except SafetensorError as error:
        raise SetupError(
            f"{plan.target} cannot be written: {error}. Fix: free some space"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**result, "path": str(plan.target)}


@contextmanager
def _whole_request(plan: ExportPlan, tell: Tell) -> Iterator[ExportRequest]:
    """The request for weights that can be loaded: a checkpoint in shards is made whole for a while."""
    request = plan.request
    if not is_sharded(request.trained):
        yield request
        return
    tell("gathering the shards")
    with tempfile.TemporaryDirectory(
        prefix=f".{plan.target.name}.whole-", dir=plan.target.parent
    ) as whole:
        make_whole(request.trained, request.model, Path(whole))
        yield request.model_copy(update={"trained": Path(whole)})


def _write_checked(
    plan: ExportPlan, partial: Path, tell: Tell
) -> tuple[ExportRequest, dict[str, Any] | None]:
    """Writes weights and verifies them; once more in float32 where a coarser precision loses too much.

    Raises:
        RunError: The export is not the trained model.
    """
    request = plan.request
    _write_weights(request, partial, plan.converter, tell)
    if not plan.verify:
        return request, None
    verification = run_verification(request, partial, tell)
    lossy = any(each["subject"] in _LOST for each in verification["findings"])
    if lossy and plan.may_refine and request.dtype != "float32":
        coarse = {"dtype": request.dtype, "kept": verification["kept"]}
        tell(f"{request.dtype} keeps {coarse['kept']:.0%} of what training changed: float32 now")
        shutil.rmtree(partial)
        partial.mkdir()
        request = request.model_copy(update={"dtype": "float32"})
        _write_weights(request, partial, plan.converter, tell)
        verification = run_verification(request, partial, tell) | {"instead_of": coarse}
    if not verification["ok"]:
        found = [each for each in verification["findings"] if each["level"] == "error"]
        told = "; ".join(f"{each['subject']}: {each['seen']}" for each in found)
        raise RunError(f"{told}. Nothing was exported. Fix: {found[0]['fix']}")
    return request, verification


def _write_weights(
    request: ExportRequest, folder: Path, converter: list[str] | None, tell: Tell
) -> None:
    from grpo_cli.export import weights

    if request.format == "adapter":
        tell("copying the adapter")
        weights.write_adapter(request, folder)
        return
    if converter is None or request.gguf_type is None:
        tell("merging" if request.is_adapter else "writing the weights")
        weights.write_safetensors(request, folder, request.dtype)
        return
    from grpo_cli.export.gguf import convert

    with tempfile.TemporaryDirectory(dir=folder, prefix=".float32-") as scratch:
        whole = Path(scratch) / request.recipe.name
        tell("merging" if request.is_adapter else "writing the weights")
        weights.write_safetensors(request, whole, "float32")
        tell("converting to GGUF")
        name = f"{request.recipe.name}-{request.gguf_type}.gguf"
        if licence := read_licence(request.recipe.model):
            write_text(whole / "README.md", f"---\nlicense: {licence}\n---\n")
        convert(converter, whole, folder / name, request.gguf_type)


def run_verification(request: ExportRequest, folder: Path, tell: Tell) -> dict[str, Any]:
    """What a fresh process finds of an exported folder.

    Raises:
        RunError: It could not look.
    """
    tell("verifying in a fresh process")
    with tempfile.TemporaryFile("w+") as said:
        process = start_child(
            [*run_module(_VERIFIER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            told, _ = process.communicate(request.model_dump_json())
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode == 0:
            return json.loads(told)
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip()]
    last = lines[-1] if lines else f"it ended with {process.returncode}"
    raise RunError(
        f"the export could not be loaded again: {last}. Nothing was exported. "
        "Fix: `--no-verify` leaves the check out, if you are sure"
    )


def _describe(request: ExportRequest, verification: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "run": "/".join(request.run.parts[-2:]),
        "model": request.name,
        "format": request.format,
        "precision": request.gguf_type or (None if request.format == "adapter" else request.dtype),
        "verification": verification,
        "warnings": [each.as_json() for each in _warn(request)],
    }


def _warn(request: ExportRequest) -> list[Finding]:
    """What a person should know before giving the export away."""
    base = read_adapter_base(request.trained) if request.format == "adapter" else None
    if base is None or not base.startswith("/"):
        return []
    seen = f"the adapter names its base by a path of this machine, {base}: nobody else can load it"
    return [Finding("base model", "warning", seen, "export as safetensors, to give it away")]


def _list_files(folder: Path) -> dict[str, Any]:
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return {"files": sizes, "bytes": sum(sizes.values())}


def _write_companions(request: ExportRequest, folder: Path, result: dict[str, Any]) -> None:
    """What belongs beside the weights: recipe, curve, card and, for Ollama, the `Modelfile`."""
    from grpo_cli.export.card import write_card
    from grpo_cli.export.curve import draw_curve

    write_text(folder / "recipe.yaml", write_yaml(request.recipe))
    # Of scored data the curve would show the rewards of the data.
    has_curve = request.recipe.is_sampled and draw_curve(
        RunFolder(request.run), folder / "reward_curve.png"
    )
    if request.format == "gguf":
        from grpo_cli.export.ollama import write_modelfile

        write_modelfile(request, folder)
    write_card(request, folder, result, has_curve=has_curve)
