"""From a file to a converted file: read, recognise, translate, write, and check what was written.

Owns the order of these steps and the result; looks at no key itself.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from grpo_cli.checks.recipe_checks import check_recipe
from grpo_cli.convert.dialects import TOOLS, Dialect, Recognition, recognise
from grpo_cli.convert.from_axolotl import convert_axolotl
from grpo_cli.convert.from_open_r1 import convert_open_r1
from grpo_cli.convert.from_script import read_script
from grpo_cli.convert.from_trl import PROMPT_EXAMPLE, convert_trl
from grpo_cli.convert.key_report import Entry, Ledger, find, put
from grpo_cli.convert.to_trl import flatten_recipe
from grpo_cli.convert.writing import write_recipe, write_trl
from grpo_cli.errors import Problem, UsageError, nearest
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.yaml_tree import read_source, read_text

_CONVERTERS = {"trl": convert_trl, "open-r1": convert_open_r1, "axolotl": convert_axolotl}
_TARGETS = ("recipe", "trl")
_NOT_TELLING = frozenset(
    "output outputs out model-out model results result checkpoints checkpoint trainer_output run".split()
)
"""Folders that say nothing of a training; the file's own name does."""
_NAME_KEYS = ("hub_model_id", "output_dir")
_STAND_INS = {
    "model.path": "to/choose",
    "dataset": "{kind: hub, path: to/choose, eval_split: test}",
    "rewards": "[{kind: think_format}]",
}
"""What is checked in the place of a part that is left to a person."""
_PATHS = ("model.path", "dataset.train", "dataset.eval", "launch.accelerate_config")
"""Keys of a recipe that may hold local paths, which are relative to it."""


@dataclass(frozen=True)
class Conversion:
    """A converted config with the account of what was done."""

    source: Path
    to: Literal["recipe", "trl"]
    text: str
    """The YAML, comments included."""
    plain: dict[str, Any]
    """The same as data."""
    recognition: Recognition | None = None
    """Whose config it was; None for a recipe."""
    entries: tuple[Entry, ...] = ()
    """What became of every key of another tool's config."""
    to_do: dict[str, str] = field(default_factory=dict)
    """Dotted key of the recipe → what is left to be written by a person."""
    lost: tuple[tuple[str, str], ...] = ()
    """What TRL's command line cannot express of a recipe."""
    problems: tuple[Problem, ...] = ()
    """What `grpo check` says of the recipe; of a TRL config what its script cannot do without."""
    output: Path | None = None
    """The file that was written."""

    @property
    def mapped(self) -> list[Entry]:
        """The keys that have their effect in the recipe."""
        return [entry for entry in self.entries if entry.target is not None]

    @property
    def dropped(self) -> list[Entry]:
        """The keys that have none, with the reasons."""
        return [entry for entry in self.entries if entry.target is None]

    @property
    def valid(self) -> bool:
        """Whether what was written can be used as it is."""
        return not any(problem.level == "error" for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """The conversion as plain values, for `--json`."""
        known = self.recognition
        result: dict[str, Any] = {
            "source": str(self.source),
            "dialect": known.dialect if known else None,
            "recognised_by": list(known.signs) if known else [],
            "to": self.to,
            "output": str(self.output) if self.output else None,
            "recipe" if self.to == "recipe" else "config": self.plain,
            "valid": self.valid,
            "problems": [problem.as_json() for problem in self.problems],
        }
        if self.to == "trl":
            return {**result, "lost": [{"key": key, "reason": why} for key, why in self.lost]}
        return {
            **result,
            "mapped": [entry.as_json() for entry in self.mapped],
            "dropped": [
                {"key": entry.key, "line": entry.location.line, "reason": entry.note}
                for entry in self.dropped
            ],
            "to_do": self.to_do,
        }


def convert_file(source: Path, dialect: str | None, to: str, output: Path | None) -> Conversion:
    """Converts a config, writes the result where asked to, and checks it.

    Args:
        source: The file to read.
        dialect: Whose config it is; None to tell by its keys.
        to: `recipe` or `trl`.
        output: The file to write; None for none.

    Raises:
        UsageError: The flags make no sense together, or `output` exists.
        RecipeError: The file cannot be read, or is no config of a known tool.
    """
    if to not in _TARGETS:
        close = nearest(to, _TARGETS) or "recipe or --to trl"
        raise UsageError(f"there is no target `{to}`. Fix: use --to {close}")
    if output is not None and output.exists():
        raise UsageError(f"{output} exists. Fix: give another name, or move it away")
    if to == "trl":
        if dialect is not None:
            raise UsageError(
                "--from names another tool's config, and --to trl reads a recipe. "
                "Fix: leave --from out"
            )
        return _convert_back(source, output)
    return _convert_over(source, dialect, output)


def _convert_over(source: Path, dialect: str | None, output: Path | None) -> Conversion:
    recognition, ledger = translate(read_source(source), source, dialect, output)
    text, problems, columns = _write_and_check(ledger, recognition.dialect, source, output)
    if _lacks_prompt(ledger, columns):
        ledger.to_do.setdefault(
            "dataset.prompt",
            f"the rows have no column `prompt` (columns: {', '.join(sorted(columns or ()))}); write the "
            f"prompt as Jinja over their columns\n{PROMPT_EXAMPLE}",
        )
        text, problems, _ = _write_and_check(ledger, recognition.dialect, source, output)
        problems = tuple(each for each in problems if each.path != "dataset.prompt")
    if output is not None:
        _write_new(output, text)
    return Conversion(
        source,
        "recipe",
        text,
        ledger.recipe,
        recognition,
        tuple(ledger.entries),
        ledger.to_do,
        problems=problems,
        output=output,
    )


def _write_and_check(
    ledger: Ledger, dialect: Dialect, source: Path, output: Path | None
) -> tuple[str, tuple[Problem, ...], frozenset[str] | None]:
    """Return the recipe's text, what `grpo check` says of it, and the data's columns if they are known.

    What is to do and absent is stood in for, so that the rest is checked all the same.
    """
    text = write_recipe(ledger, dialect, source.name)
    lacking = [
        key for key in _STAND_INS if key in ledger.to_do and find(ledger.recipe, key) is None
    ]
    with _written(text, output.parent if output else Path.cwd()) as path:
        checked = check_recipe(path, [f"{key}={_STAND_INS[key]}" for key in lacking])
        problems = tuple(
            _rename(problem, path, output or Path("the recipe"))
            for problem in checked.problems
            if not any(f"{problem.path}.".startswith(f"{key}.") for key in lacking)
        )
    return text, problems, checked.preview.columns if checked.preview else None


def _lacks_prompt(ledger: Ledger, columns: frozenset[str] | None) -> bool:
    made = (
        find(ledger.recipe, "dataset.prompt.user"),
        find(ledger.recipe, "dataset.columns.prompt"),
    )
    return columns is not None and "prompt" not in columns and made == (None, None)


def translate(
    text: str, source: Path, dialect: str | None = None, output: Path | None = None
) -> tuple[Recognition, Ledger]:
    """Translates a config's text into a recipe; writes and checks nothing.

    Args:
        text: The YAML, or the Python of a file that ends in `.py`.
        source: Its file, for messages, and where reward modules may lie.
        dialect: Whose config it is; None to tell by its keys.
        output: Where the recipe will be written, which its paths are relative to.

    Raises:
        UsageError: There is no such dialect.
        RecipeError: The text is no YAML (or Python), or no config of a known tool.
    """
    here = Path.cwd()
    folders = (output.resolve().parent if output else here, here, source.resolve().parent)
    if source.suffix == ".py":
        recognition, ledger = _translate_script(text, source, dialect, folders)
    else:
        tree = read_text(text, str(source))
        recognition = recognise(tree, dialect, str(source))
        ledger = Ledger(tree, TOOLS[recognition.dialect])
        _CONVERTERS[recognition.dialect](ledger, folders)
    ledger.recipe["name"] = _name(ledger, source)
    if "path" not in ledger.recipe.get("model", {}):
        ledger.to_do.setdefault("model.path", "name the model: a hub id or a folder")
    _hold_all_weights_in_float32(ledger)
    for target in _PATHS:
        _anchor(ledger, target, here, folders[0])
    return recognition, ledger


def _translate_script(
    text: str, source: Path, dialect: str | None, folders: tuple[Path, ...]
) -> tuple[Recognition, Ledger]:
    if dialect not in (None, "trl"):
        raise UsageError(f"{source} is a Python script, which only TRL has. Fix: leave --from out")
    script = read_script(text, source, folders[0])
    ledger = Ledger(script.tree, TOOLS["trl"])
    for key, reason in script.dropped.items():
        ledger.drop((key,), reason)
    convert_trl(ledger, folders, script.rewards)
    ledger.to_do.update(script.to_do)
    return Recognition("trl", tuple(f"{sign}(…)" for sign in script.signs)), ledger


def _hold_all_weights_in_float32(ledger: Ledger) -> None:
    """Keep a full fine-tuning from losing its updates to the rounding of bfloat16; autocast stays as it was."""
    model = ledger.recipe.get("model", {})
    if model.get("dtype") == "bfloat16" and not (model.get("lora") or model.get("quantization")):
        ledger.add("model.dtype", "float32", "was bfloat16, which rounds most updates away")


def _anchor(ledger: Ledger, target: str, here: Path, folder: Path) -> None:
    """Turns local paths, which other tools read from where they are started, into the recipe's own."""
    given = find(ledger.recipe, target)
    paths = given if isinstance(given, list) else [given]
    if here == folder or not all(_is_beside(path, here) for path in paths):
        return
    moved = [os.path.relpath(here / path, folder) for path in paths]
    moved = [path if path.startswith(".") else f"./{path}" for path in moved]
    put(ledger.recipe, target, moved if isinstance(given, list) else moved[0])


def _is_beside(path: Any, here: Path) -> bool:
    try:
        return isinstance(path, str) and not Path(path).is_absolute() and (here / path).exists()
    except (OSError, ValueError):
        return False


def _name(ledger: Ledger, source: Path) -> str:
    """A name for the runs: of the model on the hub, of the output folder, or of the file."""
    for key in _NAME_KEYS:
        given = ledger.get(key)
        base = Path(given).name if isinstance(given, str) else ""
        if base and base.lower() not in _NOT_TELLING and _sanitise(base):
            ledger.comments["name"] = key
            return _sanitise(base)
    return _sanitise(source.stem) or "converted"


def _sanitise(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._")


def _convert_back(source: Path, output: Path | None) -> Conversion:
    recipe = load_recipe(source)
    config = flatten_recipe(recipe, Path.cwd())
    text = write_trl(config.groups, config.lost, source.name)
    problems = tuple(
        Problem(f"TRL's script cannot do without {what}", "add it to the file", level="error")
        for what in config.lacks
    )
    if output is not None:
        _write_new(output, text)
    return Conversion(
        source, "trl", text, config.flat, lost=tuple(config.lost), problems=problems, output=output
    )


@contextmanager
def _written(text: str, folder: Path) -> Iterator[Path]:
    """A file with a text, in a folder that its paths are relative to, and gone afterwards."""
    writable = folder if os.access(folder, os.W_OK) else None
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=writable, prefix=".convert-", suffix=".yaml"
    ) as file:
        file.write(text)
        file.flush()
        yield Path(file.name)


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists. Fix: give another name, or move it away") from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}). Fix: check the path"
        ) from None


def _rename(problem: Problem, path: Path, shown: Path) -> Problem:
    """The problem with the name of the file that will hold the recipe."""
    where = problem.location
    if where is None or Path(where.source) != path or path == shown:
        return problem
    return replace(problem, location=replace(where, source=str(shown)))
