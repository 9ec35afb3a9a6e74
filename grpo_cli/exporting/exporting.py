"""`grpo export` from a request to a folder under its final name, and to the hub.

The order: refusals, the prompts of the verification, weights, verification, card, and only then the
name. A failure leaves nothing behind, and an export that was there before stays as it was.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from safetensors import SafetensorError

from grpo_cli.errors import RunError, SetupError, UsageError
from grpo_cli.exporting.card import read_licence
from grpo_cli.exporting.request import TEMPLATE, ExportRequest
from grpo_cli.issues import Issue
from grpo_cli.models.source import is_sharded, read_adapter_base, read_source_template
from grpo_cli.processes import child, run_module
from grpo_cli.recipe.yaml_tree import write_yaml
from grpo_cli.runs.files import SCHEMA_VERSION, read_object, write_json, write_text
from grpo_cli.runs.folder import unwritable

Tell = Callable[[str], None]
RECORD = "export.json"
"""In every export: what it is, and the result of its verification."""
KIND = "grpo-export"
PROGRESS = "progress: "
"""What the verifying process writes before each line that says what it is doing."""
_VERIFIER = "grpo_cli.exporting.verification"
_PRECISION_ISSUES = ("weights", "logits", "training kept")
"""Subjects of the verification's issues that a finer precision fixes."""
_STALE = {"safetensors": ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]}
"""Format → files of an earlier push that transformers would load before or beside those of the export."""
_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class ExportPlan:
    """Where an export goes and how it is made."""

    request: ExportRequest
    target: Path
    force: bool
    verify: bool
    may_refine: bool
    """Whether to write float32 instead of a precision that loses what was trained."""
    converter: list[str] | None
    """The command of llama.cpp's converter; None unless a GGUF file is written."""
    trusted: bool = False
    """Whether shards may hold more than tensors and plain values."""


def check_free(target: Path, *, force: bool) -> None:
    """Refuse a folder that holds something; with `force`, something that is not an export."""
    if target.is_file():
        raise UsageError(f"{target} is a file", "--to names a folder")
    if not target.exists() or not any(target.iterdir()):
        return
    if read_object(target / RECORD).get("kind") != KIND:
        raise UsageError(
            f"{target} exists already and is not an export by grpo, so it is not replaced",
            "another --to, or remove it yourself",
        )
    if not force:
        raise UsageError(
            f"{target} exists already, and nothing is overwritten", "another --to, or --force"
        )


def export(plan: ExportPlan, tell: Tell) -> dict[str, Any]:
    """Write, verify and name an export; return what was written, with the verification.

    Raises `GrpoError` if it cannot be written, or is not what was trained; nothing is left then.
    """
    check_free(plan.target, force=plan.force)
    if plan.verify:
        from grpo_cli.exporting.verification import read_rows

        # Writing the weights may take hours.
        tell("reading the prompts of the verification")
        has_template = read_source_template(plan.request.tokenizer) != ""
        read_rows(plan.request, has_chat_template=has_template)
    try:
        plan.target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(
            tempfile.mkdtemp(prefix=f".{plan.target.name}.partial-", dir=plan.target.parent)
        )
    except OSError as error:
        raise unwritable(plan.target, error, "--to DIR") from None
    try:
        with whole_request(plan, tell) as whole:
            request, verification = _write_checked(replace(plan, request=whole), partial, tell)
            result = _describe(request, verification)
            tell("writing the card")
            _write_companions(request, partial, result)
        result |= _measure_files(partial)
        write_json(partial / RECORD, result)
        # The record cannot hold its own size.
        result |= _measure_files(partial)
        partial.chmod(0o755)
        for path in partial.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        give_name(partial, plan.target, force=plan.force)
    except SafetensorError as error:
        raise SetupError(f"{plan.target} cannot be written: {error}", "free some space") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**result, "path": str(plan.target)}


def _measure_files(folder: Path) -> dict[str, Any]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    return {"files": sizes, "bytes": sum(sizes.values())}


@contextmanager
def whole_request(plan: ExportPlan, tell: Tell) -> Iterator[ExportRequest]:
    """Yield the request with weights that can be loaded: shards are gathered in a temporary folder."""
    request = plan.request
    if not is_sharded(request.trained):
        yield request
        return
    from grpo_cli.models.shards import merge_shards

    tell("gathering the shards")
    with tempfile.TemporaryDirectory(
        prefix=f".{plan.target.name}.whole-", dir=plan.target.parent
    ) as whole:
        merge_shards(request.trained, request.model, Path(whole), trusted=plan.trusted)
        if (template := request.trained / TEMPLATE).is_file():
            shutil.copy(template, whole)
        yield request.model_copy(update={"trained": Path(whole)})


def _write_checked(
    plan: ExportPlan, partial: Path, tell: Tell
) -> tuple[ExportRequest, dict[str, Any] | None]:
    """Write weights and verify them; again in float32 if a coarser precision loses too much."""
    request = plan.request
    _write_weights(request, partial, plan.converter, tell)
    if not plan.verify:
        return request, None
    verification = run_verification(request, partial, tell)
    is_lossy = any(each["subject"] in _PRECISION_ISSUES for each in verification["findings"])
    if is_lossy and plan.may_refine and request.dtype != "float32":
        coarse = {"dtype": request.dtype, "kept": verification["kept"]}
        tell(f"{request.dtype} keeps {coarse['kept']:.0%} of what training changed: float32 now")
        shutil.rmtree(partial)
        partial.mkdir()
        request = request.model_copy(update={"dtype": "float32"})
        _write_weights(request, partial, plan.converter, tell)
        verification = run_verification(request, partial, tell) | {"instead_of": coarse}
    if not verification["ok"]:
        errors = [each for each in verification["findings"] if each["level"] == "error"]
        listed = "; ".join(f"{each['subject']}: {each['seen']}" for each in errors)
        raise RunError(f"{listed}. Nothing was exported", errors[0]["fix"])
    return request, verification


def _write_weights(
    request: ExportRequest, folder: Path, converter: list[str] | None, tell: Tell
) -> None:
    from grpo_cli.exporting.formats import convert, write_adapter, write_safetensors

    if request.format == "adapter":
        tell("copying the adapter")
        write_adapter(request, folder)
        return
    tell("merging" if request.is_adapter else "writing the weights")
    if converter is None or request.gguf_type is None:
        write_safetensors(request, folder, request.dtype)
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".float32-") as scratch:
        whole = Path(scratch) / request.recipe.name
        write_safetensors(request, whole, "float32")
        tell("converting to GGUF")
        name = f"{request.recipe.name}-{request.gguf_type}.gguf"
        if licence := read_licence(request.recipe.model):
            write_text(whole / "README.md", f"---\nlicense: {licence}\n---\n")
        convert(converter, whole, folder / name, request.gguf_type)


def run_verification(request: ExportRequest, folder: Path, tell: Tell) -> dict[str, Any]:
    """Verify an exported folder in a fresh process; return `verify`'s result. Raises `RunError`."""
    tell("verifying in a fresh process")
    result = ""
    with (
        tempfile.TemporaryFile("w+") as stderr,
        child(
            [*run_module(_VERIFIER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        with suppress(BrokenPipeError), cast(IO[str], process.stdin) as stdin:
            stdin.write(request.model_dump_json())
        for line in cast(IO[str], process.stdout):
            if line.startswith(PROGRESS):
                tell(line.removeprefix(PROGRESS).strip())
            else:
                result = line
        if process.wait() == 0:
            return json.loads(result)
        stderr.seek(0)
        lines = [line for line in stderr.read().splitlines() if line.strip()]
    last = lines[-1] if lines else f"it ended with {process.returncode}"
    raise RunError(
        f"the export could not be loaded again: {last}. Nothing was exported",
        "`--no-verify` skips the check, if you are sure",
    )


def _describe(request: ExportRequest, verification: dict[str, Any] | None) -> dict[str, Any]:
    warnings = []
    base = read_adapter_base(request.trained) if request.format == "adapter" else None
    if base is not None and base.startswith("/"):
        seen = (
            f"the adapter names its base by a path of this machine, {base}: nobody else can load it"
        )
        fix = "export as safetensors, to give it away"
        warnings.append(Issue(seen, fix, level="warning", subject="base model").as_json())
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "run": "/".join(request.run.parts[-2:]),
        "model": request.name,
        "format": request.format,
        "plain_text": request.is_text,
        "precision": request.gguf_type or (None if request.format == "adapter" else request.dtype),
        "verification": verification,
        "warnings": warnings,
    }


def _write_companions(request: ExportRequest, folder: Path, result: dict[str, Any]) -> None:
    from grpo_cli.exporting.card import write_card

    write_text(folder / "recipe.yaml", write_yaml(request.recipe))
    if request.format == "gguf":
        from grpo_cli.exporting.formats import write_modelfile

        write_modelfile(request, folder)
    write_card(request, folder, result)


def give_name(partial: Path, target: Path, *, force: bool) -> None:
    """Move a finished folder to its place; an export that was there is removed last.

    Raises `UsageError` if something else has appeared there, and `RunError` if the system refuses it.
    """
    check_free(target, force=force)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    try:
        if target.exists():
            target.rename(aside / "export")
        partial.rename(target)
    except OSError as error:
        with suppress(OSError):
            (aside / "export").rename(target)
        raise RunError(f"{target} cannot be named: {error.strerror}", "another --to") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def export_and_push(plan: ExportPlan, repo: str, *, private: bool, tell: Tell) -> dict[str, Any]:
    """Export, and upload the folder to the hub as one commit; return also the commit's address.

    A repository that exists keeps its visibility, and loses the weights of an earlier push.

    Raises `UsageError` if the name is not one of a repository; `SetupError` if there is no token, or the hub
    refuses it or cannot be reached; `RunError` if the upload failed; the export on the disk stays.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    if not _REPO.fullmatch(repo):
        raise UsageError(f"{repo} is not a name of a repository", "--push ORGANISATION/NAME")
    api = HfApi()
    try:
        api.whoami()
    except LocalTokenNotFoundError:
        raise SetupError(
            "there is no token for the hub", "`hf auth login`, or set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise SetupError(
            f"the hub: {_first_line(error)}", "`hf auth login`, or try later"
        ) from None
    result = export(plan, tell)
    tell(f"uploading to {repo}")
    message = f"{plan.request.recipe.name}: {plan.request.name}, exported by grpo"
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=plan.target,
            commit_message=message,
            delete_patterns=_STALE.get(plan.request.format),
        )
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise RunError(
            f"{repo} could not be pushed: {_first_line(error)}. The export is kept in {plan.target}",
            f"`hf upload {repo} {plan.target}` once the cause is fixed",
        ) from None
    return {**result, "pushed": str(commit.commit_url)}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
