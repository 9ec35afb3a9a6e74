"""From a file to a converted file: read, recognise, translate, check and write."""

import ast
import json
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from grpo_cli.checks.recipe import CheckedRecipe, check_recipe
from grpo_cli.convert import trl
from grpo_cli.convert.axolotl import convert_axolotl
from grpo_cli.convert.datasets import PROMPT_EXAMPLE
from grpo_cli.convert.key_report import (
    CONVERTIBLE,
    Dialect,
    KeyReport,
    by_key,
    find,
    put,
    read_keys,
    read_words,
    write_recipe,
)
from grpo_cli.convert.rewards import name_file
from grpo_cli.convert.script import Script
from grpo_cli.convert.script_account import ALL_SECTIONS
from grpo_cli.convert.script_values import MISSING
from grpo_cli.convert.shell import Command, read_command
from grpo_cli.convert.shell_flags import Flags, read_flags
from grpo_cli.convert.shell_syntax import Word
from grpo_cli.convert.shell_values import is_open
from grpo_cli.convert.swift import SWIFT_KEYS, convert_swift
from grpo_cli.errors import UsageError, nearest, recipe_error
from grpo_cli.issues import Issue, Location
from grpo_cli.recipe.yaml_tree import Node, read_source, read_text

_NAMES = read_words("conversion")
_MAGIC = re.compile(r"\s*(\w+\s*=\s*)?[%!?]")
"""Lines of a notebook for the shell or for the notebook itself."""
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
_CONVERTERS = {
    "trl": trl.convert_trl,
    "open-r1": trl.convert_open_r1,
    "axolotl": convert_axolotl,
    "ms-swift": convert_swift,
}


@dataclass(frozen=True)
class Conversion:
    """A converted config, and what became of each key."""

    source: Path
    text: str
    """The YAML, comments included."""
    plain: dict[str, Any]
    """The same as data."""
    problems: tuple[Issue, ...]
    """What `grpo check` reports on the recipe."""
    output: Path | None
    """The file that was written."""
    report: KeyReport
    """What became of every key of the source."""

    @property
    def valid(self) -> bool:
        """Whether what was written can be used as it is: without errors, and nothing is to do."""
        return not self.report.to_do and not any(each.level == "error" for each in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Return the conversion as plain values, for `--json`."""
        report = self.report
        mapped = [entry.as_json() for entry in report.entries if entry.target is not None]
        dropped = [
            {"key": entry.key, "line": entry.location.line, "reason": entry.note}
            for entry in report.dropped
        ]
        return {
            "source": str(self.source),
            "dialect": report.dialect,
            "recognised_by": list(report.signs),
            "output": str(self.output) if self.output else None,
            "recipe": self.plain,
            "valid": self.valid,
            "problems": [problem.as_json() for problem in self.problems],
            "mapped": mapped,
            "dropped": dropped,
            "to_do": report.to_do,
        }


def convert_file(source: Path, dialect: str | None, output: Path | None) -> Conversion:
    """Convert a config, write the result if `output` is given, and check it.

    Raises:
        UsageError: The flags contradict each other, or `output` exists.
        RecipeError: The file cannot be read, or is not a config of a known tool.
    """
    if output is not None and output.exists():
        raise UsageError(f"{output} exists", "give another name, or move it away")
    conversion = _convert(source, dialect, output)
    try:
        if output is not None:
            with output.open("x", encoding="utf-8") as file:
                file.write(conversion.text)
    except OSError as error:
        cause = f"cannot be written ({error.strerror})"
        raise UsageError(f"{output} {cause}", "check the path") from None
    return conversion


def _convert(source: Path, dialect: str | None, output: Path | None) -> Conversion:
    report = translate(read_source(source), source, dialect, output)
    checked, problems = _check(report, source, output)
    columns = checked.preview.columns if checked.preview else None
    is_prompt_made = find(report.recipe, "dataset.prompt.user") or find(
        report.recipe, "dataset.columns.prompt"
    )
    if columns is not None and "prompt" not in columns and not is_prompt_made:
        report.to_do.setdefault(
            "dataset.prompt",
            f"the rows have no column `prompt` (columns: {', '.join(sorted(columns))}); write the "
            f"prompt as Jinja over the columns\n{PROMPT_EXAMPLE}",
        )
        problems = tuple(each for each in problems if each.path != "dataset.prompt")
    text = write_recipe(report, source.name)
    return Conversion(source, text, report.recipe, problems, output, report)


def _check(
    report: KeyReport, source: Path, output: Path | None
) -> tuple[CheckedRecipe, tuple[Issue, ...]]:
    """Check the recipe beside the file that it is written to, since its paths are relative to that.

    Return what `grpo check` reports on what the user need not write; the rest is checked with placeholders.
    """
    folder = output.parent if output else Path.cwd()
    with tempfile.NamedTemporaryFile(
        "w",
        encoding="utf-8",
        dir=folder if os.access(folder, os.W_OK) else None,
        prefix=".convert-",
        suffix=".yaml",
    ) as file:
        # `convert` lists what is to do itself.
        file.write(write_recipe(report, source.name).replace("# TO DO: ", "# To do: "))
        file.flush()
        checked = check_recipe(Path(file.name), _list_overrides(report))
    name = checked.loaded.tree.location.source
    problems: list[Issue] = []
    for problem in checked.problems:
        where = problem.location
        if where and where.source == name:
            where = replace(where, source=str(output)) if output else None
        elif where and where.source.startswith("--set"):
            where = None  # a placeholder
        if not _is_left(report, problem.path):
            problems.append(replace(problem, location=where))
    return checked, tuple(problems)


def _list_overrides(report: KeyReport) -> list[str]:
    """Return values for what the user has to write, so that the rest can be checked."""
    values = dict(report.defaults)
    for key, placeholders in read_keys("placeholders").items():
        if key in report.to_do and find(report.recipe, f"{key}.kind") is None:
            values = {**placeholders, **values}
    missing = {key: value for key, value in values.items() if find(report.recipe, key) is None}
    return [f"{key}={json.dumps(value, default=str)}" for key, value in missing.items()]


def _is_left(report: KeyReport, path: str) -> bool:
    """Return whether a key is left to the user, or may stand in what was not read."""
    section, _, key = path.partition(".")
    if section in report.unread:
        return True
    if (
        "dataset" in report.to_do
        and section == "dataset"
        and key.partition(".")[0] in ("", *_NAMES["row-keys"])
    ):
        return True
    left = [each for each in report.to_do if find(report.recipe, each) is None]
    left = [each for each in left if each not in ("dataset", *report.defaults)]
    return any(f"{path}.".startswith(f"{each}.") for each in left)


def translate(
    text: str, source: Path, dialect: str | None = None, output: Path | None = None
) -> KeyReport:
    """Translate a config's text into a recipe for `output`, without writing or checking it."""
    here = Path.cwd()
    folders = (output.resolve().parent if output else here, here, source.resolve().parent)
    report = _translate_any(text, source, dialect, folders)
    report.recipe["name"] = _name(report, source)
    if find(report.recipe, "model.path") is None:
        report.to_do.setdefault("model.path", "name the model: a hub id or a folder")
    model = report.recipe.get("model", {})
    partial = {"lora", "adapter", "quantization"}
    left = {key.removeprefix("model.") for key in report.to_do}
    is_partial = bool(partial & {*model, *left})
    if model.get("dtype") == "bfloat16" and not is_partial:
        report.replace_value(
            "model.dtype", "float32", "was bfloat16, which rounds most updates away"
        )
    if report.dialect in ("trl", "open-r1"):
        trl.note_versions(report)
    for target in _NAMES["paths"]:
        _anchor(report, target, here, folders[0])
    return report


def _translate_any(
    text: str, source: Path, dialect: str | None, folders: tuple[Path, ...]
) -> KeyReport:
    """Translate a file of any kind."""
    is_python = source.suffix in (".py", ".ipynb")
    shebang = re.match(r"#!.*\b(ba|z|k)?sh\b", text)
    is_shell = source.suffix in _NAMES["shell-endings"] or shebang is not None
    allowed = (None, "trl", *(("ms-swift",) if is_shell else ()))
    if (is_python or is_shell) and dialect not in allowed:
        tools = "TRL and ms-swift have" if is_shell else "TRL has"
        cause = f"{source} is a script, which only {tools}"
        raise UsageError(cause, "leave --from out")
    if is_python:
        script = Script(*read_python(text, source), source, folders[0], None)
        script.is_asked = dialect == "trl"
        return _translate_script(script, folders)
    if is_shell:
        return _translate_command(read_command(text, source), source, folders, dialect == "trl")
    if source.suffix == ".toml":
        cause = "is TOML, which none of the tools that can be converted reads"
        raise recipe_error(cause, CONVERTIBLE, location=Location(str(source)))
    tree = read_text(text, str(source))
    report = KeyReport(tree, *recognise(tree, dialect, str(source)))
    _CONVERTERS[report.dialect](report, folders)
    return report


def _translate_command(
    command: Command, source: Path, folders: tuple[Path, ...], is_asked: bool
) -> KeyReport:
    """Translate a command of a shell script: of TRL or ms-swift, or one that starts a Python script."""
    files = (Path(command.tool), source.parent / command.tool)
    script = None
    if command.tool not in ("trl", "swift"):
        script = next((each for each in files if os.path.isfile(each)), None)
    flags = read_flags(command, source, is_read=script is not None)
    tree = flags.tree
    if script is not None:
        values = {**tree.plain(), **dict.fromkeys(flags.unset, MISSING)}
        values = {name: each for name, each in values.items() if name not in flags.launch}
        places = dict(tree.key_locations)
        for name, (each, line) in command.environment.items():
            values[f"${name}"] = MISSING if is_open(each) else each
            places[f"${name}"] = Location(str(source), line, 1)
        module = read_python(read_source(script), script)
        reader = Script(*module, script, folders[0], values, places)
        reader.is_asked = is_asked
        for name in tree.value.keys() & flags.launch:
            reader.report.tree.value[name] = tree.value[name]
            reader.report.tree.key_locations[name] = tree.key_locations[name]
        unset = {name: flag for name, flag in flags.unset.items() if name in flags.launch}
        _record_shell(reader.report, replace(flags, unset=unset), source)
        report = _translate_script(reader, folders)
        # The values of variables that settings are computed from are in the recipe.
        entries = [each.entry or {} for each in reader.rewards.values()]
        is_imported = any(each.get("kind") == "python" for each in entries)
        read = set() if is_imported else reader.list_read_flags()
        _note_all(
            report, [each for each in command.notes if f"${each[0].text}" not in read], source
        )
        return report
    known: Dialect = next(
        (name for name, signs in _find_signs(tree) if signs and name != "axolotl"), "trl"
    )
    dialect: Dialect = "ms-swift" if command.tool == "swift" else known
    names = {"swift": "swift rlhf", "trl": "trl grpo"}
    report = KeyReport(tree, dialect, (names.get(command.tool, command.tool),))
    _record_shell(report, flags, source)
    _note_all(report, command.notes, source)
    if not command.tool.endswith(_NAMES["known-scripts"]):
        text = f"`{command.tool}` was not found, and may set more; convert where it is, or write what it sets"
        report.add_to_do("training", text, ALL_SECTIONS)
        report.reader = command.tool
    _CONVERTERS[dialect](report, folders)
    return report


def _note_all(report: KeyReport, notes: Sequence[tuple[Word, str]], source: Path) -> None:
    """Record what a shell script has besides."""
    for (text, line), reason in notes:
        report.note(text, Location(str(source), line, 1), reason)


def _record_shell(report: KeyReport, flags: Flags, source: Path) -> None:
    """Record what a shell script leaves open; any flags leave every key open."""
    is_swift = report.dialect == "ms-swift"
    targets = {"": "training"}
    for name in {**flags.unset, **flags.to_do}:
        key = read_keys("swift-names").get(name, name) if is_swift else name
        target = read_keys("script-targets").get(key) or trl.find_home(key)
        target = target or trl.find_model_key(key)
        targets[name] = target or "training"
        flag = flags.unset.get(name)
        if flag is None:
            continue
        where = Location(str(source), flag.line, 1)
        if target is None and trl.is_dropped(key, SWIFT_KEYS if is_swift else ()):
            report.tree.value[name] = Node(flag.text, where)
            report.tree.key_locations[name] = where
        else:
            text = f"line {flag.line} of {source.name} has `{flag.text}`; write its value"
            report.add_to_do(targets[name], text)
    for name, texts in flags.to_do.items():
        for text in texts:
            report.add_to_do(targets[name], text)
    if flags.to_do.get(""):
        report.unread |= {*ALL_SECTIONS}


def _translate_script(script: Script, folders: tuple[Path, ...]) -> KeyReport:
    """Translate a Python script that was parsed."""
    script.read()
    report, reader = script.report, script.evaluator
    for name in reader.flags.keys() - reader.used:
        text = f"--{name}"
        reason = "the script has no such argument"
        report.note(text, reader.places.get(name, report.tree.location), reason)
    for name in sorted(reader.own & reader.places.keys() - script.list_read_flags()):
        text = f"--{name} {reader.flags[name]}"
        reason = "the script reads it, and no setting of a recipe; write the value there"
        report.note(text, reader.places.get(name, report.tree.location), reason)
    trl.convert_trl(report, folders, script.rewards)
    for target, (key, value, at) in script.extra.items():
        script.put(key, value, at)
        report.keep((key,), target, value)
    return report


def recognise(tree: Node, dialect: str | None, source: str) -> tuple[Dialect, Sequence[str]]:
    """Return the dialect of a config, and the keys that tell it; none if `dialect`, of `--from`, does."""
    if dialect is not None and dialect not in DIALECTS:
        fix = f"--from {nearest(dialect, DIALECTS) or ', '.join(DIALECTS)}"
        raise UsageError(f"there is no dialect `{dialect}`", f"use {fix}")
    if not isinstance(tree.value, dict):
        message = "is not a config: the top level must be `key: value` lines"
        fix = "name the YAML file that the other tool reads"
        raise recipe_error(message, fix, location=tree.location)
    if dialect is not None:
        return dialect, ()
    if _is_recipe(tree):
        fix = f"check it with `grpo check {source}`"
        raise recipe_error("is a recipe of grpo already", fix, location=tree.location)
    for name, signs in _find_signs(tree):
        if signs:
            return name, signs[:4]
    others = by_key(read_keys("other-tools"))
    tool = next((others[key] for key in others if key in tree.value), None)
    about = "not a config of TRL, open-r1, axolotl or ms-swift"
    if tool is not None:
        about = f"a config of {tool}, which is not converted"
    raise recipe_error(f"is {about}", CONVERTIBLE, location=tree.location)


def _is_recipe(tree: Node) -> bool:
    model = tree.child("model")
    is_section = model is not None and isinstance(model.value, dict)
    others = {*by_key(read_keys("other-tools")), *read_keys("signs")["ms-swift"].split()}
    is_other = bool(others & tree.value.keys())
    return not is_other and (is_section or bool(tree.value.keys() & {"rewards", "extends"}))


def _find_signs(tree: Node) -> Iterator[tuple[Dialect, list[str]]]:
    """Yield each tool with the keys of a config that are signs of it, the most certain first."""
    signs = {
        tool: [key for key in names.split() if key in tree.value]
        for tool, names in read_keys("signs").items()
    }
    rewards = str((tree.child("reward_funcs") or Node("", tree.location)).plain())
    r1_rewards = [name for name in trl.R1_REWARD_SIGNS if f"'{name}'" in rewards]
    yield "ms-swift", signs["ms-swift"]
    yield "axolotl", signs["axolotl"] if "base_model" in tree.value else []
    yield "open-r1", [*(key for key in trl.R1_SIGNS if key in tree.value), *r1_rewards]
    yield "trl", signs["trl"]


def _anchor(report: KeyReport, target: str, here: Path, folder: Path) -> None:
    """Make local paths, which other tools read from the working directory, relative to the recipe."""
    value = find(report.recipe, target)
    paths = value if isinstance(value, list) else [value]
    if here == folder or not all(isinstance(each, str) and Path(each).exists() for each in paths):
        return
    moved = [each if Path(each).is_absolute() else name_file(here / each, folder) for each in paths]
    put(report.recipe, target, moved if isinstance(value, list) else moved[0])


def _name(report: KeyReport, source: Path) -> str:
    """Return a name for the runs: of the output folder, or of the file."""
    folder = Path(str(report.get("output_dir") or "")).name
    text = source.stem if folder.lower() in ("", *_NAMES["generic-folders"]) else folder
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._") or "converted"


def read_python(text: str, source: Path) -> tuple[ast.Module, list[int]]:
    """Return a script's syntax tree and, of a notebook, the line at which each of its cells begins.

    Raises:
        RecipeError: The file is not Python, or not a notebook.
    """
    if source.suffix != ".ipynb":
        return _parse(text, source, []), []
    cells = _read_cells(text, source)
    starts, lines = [], 1
    for cell in cells:
        starts.append(lines)
        lines += cell.count("\n") + 1
    return _parse("\n".join(cells), source, starts), starts


def _read_cells(text: str, source: Path) -> list[str]:
    """Return the code of a notebook's cells; lines for the shell or the notebook are left out."""
    try:
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]
        codes = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError, AttributeError):
        cause = "is not a notebook that can be read"
        raise recipe_error(
            cause, "save it again with Jupyter", location=Location(str(source))
        ) from None
    return [_without_magic(code) for code in codes]


def _without_magic(code: str) -> str:
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not first.startswith(("%%time", "%%capture", "%%writefile")):
        return "\n" * (len(lines) - 1)
    kept = []
    is_continued = False
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        is_magic = is_continued or _MAGIC.match(line) is not None
        kept.append("" if is_continued else f"{indent}pass" if is_magic else line)
        is_continued = is_magic and line.rstrip().endswith("\\")
    return "\n".join(kept)


def _parse(text: str, source: Path, starts: list[int]) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    where, cause = Location(str(source), 1, 1), ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree: Any = compile(text, str(source), "exec", flags)
            return ast.Module(tree.body, [])
    except SyntaxError as error:
        line, cause = error.lineno or 1, error.msg
        before = [start for start in starts if start <= line]
        name = f"{source}, code cell {len(before)}" if before else str(source)
        where = Location(name, line - (before[-1] - 1 if before else 0), 1)
    except ValueError as error:
        cause = str(error)
    except (RecursionError, MemoryError):
        cause = "it is nested too deeply"
    version = ".".join(platform.python_version_tuple()[:2])
    fix = f"correct that line, or install grpo with the Python that the script is for (this is {version})"
    raise recipe_error(f"is not Python that can be read: {cause}", fix, location=where)
