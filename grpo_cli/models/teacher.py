"""Which model a recipe's teacher is, and whether it can teach: what shows without torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_cli.errors import GrpoError, RecipeError
from grpo_cli.issues import Issue
from grpo_cli.models.adapter import fingerprint_adapter
from grpo_cli.models.source import fingerprint_model, is_adapter, read_present_base, resolve_source
from grpo_cli.recipe.adapter import find_downloaded, find_run, name_checkpoint
from grpo_cli.recipe.model import AdapterConfig, ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import read_object

_PATH = "teacher.path"
_OWN = ("attn_implementation", "trust_remote_code")
"""What a teacher takes from the `model` section."""


class Teacher(NamedTuple):
    """Where the teacher's weights are."""

    model: ModelConfig
    """In the precision it was saved or trained in."""
    adapter: Path | None


def find_teacher(recipe: Recipe) -> Teacher | None:
    """Return the teacher that a recipe names; None if it names none, or one on a server.

    Raises `RecipeError` if there is no such model.
    """
    if recipe.teacher is None or recipe.teacher.path is None:
        return None
    own = recipe.model.model_dump(include=set(_OWN))
    folder, section = _find_folder(recipe.teacher.path, recipe.teacher.revision)
    try:
        if folder is None or not is_adapter(folder):
            path = recipe.teacher.path if folder is None else str(folder)
            model = ModelConfig(path=path, revision=recipe.teacher.revision, **own)
            resolve_source(model)
            return Teacher(model, None)
        base = {"path": read_present_base(folder)}
        # A run knows more of its base than its adapter does.
        kept = {"path", "revision", "dtype", "trust_remote_code"} & section.keys()
        model = ModelConfig(**{**own, **base, **{key: section[key] for key in kept}})
        resolve_source(model)
    except RecipeError as error:
        raise RecipeError([replace(each, path=_PATH) for each in error.problems]) from error
    except GrpoError as error:
        raise RecipeError([error.as_issue(_PATH)]) from error
    return Teacher(model, folder)


def _find_folder(text: str, revision: str | None) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder of weights or of an adapter, with the `model` section of the run it comes from.

    Of the hub, it is the folder of a downloaded adapter; None for anything else.
    """
    path = Path(text).absolute()
    if not path.is_dir():
        return find_downloaded(text, revision), {}
    run = find_run(path)
    if run == path and not (path / "model").is_dir():
        fix = name_checkpoint(path, "*config.json")
        raise RecipeError([Issue(f"the run {text} has no final model", fix, _PATH)])
    recipe = {} if run is None else read_object(run / "resolved.json").get("recipe") or {}
    return path / "model" if run == path else path, recipe.get("model") or {}


def fingerprint_teacher(teacher: Teacher) -> str | None:
    """Return a fingerprint of the teacher's weights, its adapter's too; None if it is not known here."""
    weights = fingerprint_model(teacher.model)
    if teacher.adapter is None or weights is None:
        return weights
    adapter = AdapterConfig(path=str(teacher.adapter))
    return f"{weights}+{fingerprint_adapter(teacher.model.model_copy(update={'adapter': adapter}))}"


def compare_vocabularies(own: Mapping[str, int], teacher: Mapping[str, int]) -> Issue | None:
    """Return that the teacher reads a token id of the model as another token; None if it reads all the same."""
    for token, number in sorted(own.items(), key=lambda item: item[1]):
        if teacher.get(token) != number:
            other = teacher.get(token)
            known = f"has the id {other}" if other is not None else "is unknown"
            seen = (
                "the teacher has another tokenizer than the model, so it cannot tell how likely tokens are: "
                f"{token!r}, with the id {number}, {known} there ({len(own):,} and {len(teacher):,} tokens)"
            )
            return Issue(seen, "name a teacher of the same family of models", _PATH)
    return None


def check_teacher_tokenizer(recipe: Recipe, tokenizer: Any) -> None:
    """Check that the teacher, if there is one, reads each token id as the model does.

    Raises `RecipeError` if it does not, or it has no tokenizer that can be loaded, and `SetupError` if it
    does not, or does not answer, on its server.
    """
    if recipe.teacher is not None and recipe.teacher.base_url is not None:
        from grpo_cli.models.teacher_server import TeacherServer

        TeacherServer(recipe.teacher.base_url).check_tokenizer(tokenizer)
    elif (teacher := find_teacher(recipe)) is not None:
        from grpo_cli.models.loading import load_tokenizer

        own, taught = tokenizer.get_vocab(), load_tokenizer(teacher.model).get_vocab()
        if (problem := compare_vocabularies(own, taught)) is not None:
            raise RecipeError([problem])
