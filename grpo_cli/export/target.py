"""Where an export may go, and giving it its name. Owns what `--force` replaces: exports, and nothing else."""

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from grpo_cli.errors import RunError, UsageError

RECORD = "export.json"
"""In every export: what it is, and what was checked of it."""
KIND = "grpo-export"


def resolve_target(to: Path, run: Path) -> Path:
    """The folder that `--to` means.

    Args:
        to: As given; a link stands for what it names.
        run: The run that is exported.

    Raises:
        UsageError: It cannot be a folder, or an export there would take the place of the run, of the
            working directory or of the home directory.
    """
    try:
        str(to).encode()
        target = to.expanduser().resolve()
        Path.home()
    except (OSError, RuntimeError, ValueError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(
            f"{str(to)!r} is no place for a folder ({said}). Fix: another --to"
        ) from None
    if target.exists() and not target.is_dir():
        raise UsageError(f"{to} is a file. Fix: --to names a folder")
    run = run.resolve()
    if run.is_relative_to(target) or target.is_relative_to(run):
        raise UsageError(f"{to} is part of the run, or holds it. Fix: another --to")
    if any(place.is_relative_to(target) for place in (Path.cwd(), Path.home().resolve())):
        raise UsageError(f"{to} is where other things live. Fix: --to names a folder of its own")
    return target


def check_free(target: Path, *, force: bool) -> None:
    """Refuses a folder that holds something; with `force`, something that is no export.

    Raises:
        UsageError: It does.
    """
    if not target.exists() or not any(target.iterdir()):
        return
    if not is_export(target):
        raise UsageError(
            f"{target} exists already and is no export of grpo's, so it is not replaced. "
            "Fix: another --to, or remove it yourself"
        )
    if not force:
        raise UsageError(
            f"{target} exists already, and nothing is overwritten. Fix: another --to, or --force"
        )


def is_export(folder: Path) -> bool:
    """Whether `grpo export` wrote a folder."""
    try:
        told = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return bool(told["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def give_name(partial: Path, target: Path, *, force: bool) -> None:
    """Puts a finished folder in its place; an export that was there goes when the new one stands.

    Raises:
        UsageError: Something has come to be there in the meantime.
        RunError: The system refuses it.
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
        raise RunError(
            f"{target} cannot get its name: {error.strerror}. Fix: another --to"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
