"""Checks of recipes with images: those of the first rows, the model, and what does not work with them yet."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from grpo_cli.checks.context import CheckContext
from grpo_cli.checks.launch import has_module
from grpo_cli.data.images import ImageError, as_image, check_image, image_values, is_stored_image
from grpo_cli.data.rows import Row, RowNames, columns_of
from grpo_cli.errors import RecipeError, install_extra
from grpo_cli.issues import Issue
from grpo_cli.models.source import (
    find_folder,
    read_model_type,
    read_settings,
    read_source_template,
    reads_images,
    resolve_source,
)
from grpo_cli.recipe.recipe import Recipe

_PLACE = "dataset.prompt.images"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_CUT_ALONE = ("llava_onevision",)
"""Types of models whose processor cuts an image into patches only if it is the only one of a prompt."""
_DECODED = 16
"""Images that are decoded if only that tells whether they are whole."""


def look_at_images(
    rows: Mapping[int, Row], columns: Iterable[str], names: RowNames
) -> Iterator[Issue]:
    """Check the images of rows; a mistake that several rows share is one issue, with their number.

    Args:
        rows: Those looked at, by their places.
        columns: Those with images.
        names: The rows' names in messages.
    """
    columns, looked_at = tuple(columns), 0
    if not columns or not has_module("PIL"):
        return
    faults: dict[tuple[str, str], list[tuple[int, ImageError]]] = {}
    for place, row in rows.items():
        folder = names.folder(place)
        for column, value in image_values(row, columns):
            looked_at += 1
            try:
                _check(value, folder, decodes=looked_at <= _DECODED)
            except ImageError as error:
                faults.setdefault((column, error.kind), []).append((place, error))
    for (column, _), found in faults.items():
        place, first = found[0]
        count = len({place for place, _ in found})
        more = f"; so it is in {count} of the {len(rows)} rows looked at" if count > 1 else ""
        yield Issue(f"{names(place)}: `{column}` {first.seen}{more}", first.row_fix, _PLACE)


def _check(value: object, folder: Path | None, *, decodes: bool) -> None:
    check_image(as_image(value, folder), decodes=decodes)


def find_unused_images(recipe: Recipe, rows: Sequence[Row]) -> Iterator[Issue]:
    """Find columns with images of a model that reads images; no prompt of the rows names any."""
    for name in columns_of(rows):
        values = [value for row in rows for _, value in image_values(row, [name])]
        # `check_model` reports a model that cannot be found.
        with suppress(RecipeError):
            if values and all(map(_is_picture, values)) and reads_images(recipe.model):
                seen = f"the column `{name}` holds images, which the prompts leave out"
                yield Issue(seen, f"set `{_PLACE}: {name}`", "dataset.prompt", level="note")


def _is_picture(value: object) -> bool:
    is_file = isinstance(value, str) and value.lower().endswith(_PICTURE_FILES)
    return is_file or is_stored_image(value)


def check_images(context: CheckContext) -> Iterator[Issue]:
    """Check that the model reads images."""
    recipe = context.recipe
    for index, reward in enumerate(recipe.rewards):
        if reward.kind == "judge" and not reward.params.get("images"):
            seen = "the judge does not see the images of prompts"
            fix = "write `images: true` there if it reads images"
            yield Issue(seen, fix, f"rewards.{index}", level="note")
    place = _PLACE if recipe.dataset.has_images else "episode.images"
    if not has_module("PIL"):
        yield Issue("Pillow is not installed", install_extra("images"), place, package="pillow")
    try:
        reads = reads_images(recipe.model)
    except RecipeError:
        reads = None  # `check_model` tells
    if reads is False:
        seen = "the recipe has images, and the model reads none (by the `vision_config` of config.json)"
        fix = f"name a vision-language model, or remove `{place}`"
        yield Issue(seen, fix, "model.path")
    elif reads:
        yield from _check_processor(recipe)
        of_episodes = recipe.has_episodes and recipe.episode.images
        if of_episodes and read_model_type(recipe.model) in _CUT_ALONE:
            seen = "this model reads an image in another way once a later turn brings another"
            yield Issue(seen, "remove `episode.images`, or name another model", "model.path")
    lora = recipe.model.lora
    if lora is not None and lora.target_modules == "all-linear":
        seen = "adapters are on the language part alone; the vision part stays as it is"
        fix = "to train it too, name the modules of both in `target_modules`"
        yield Issue(seen, fix, "model.lora.target_modules", level="note")


def _check_processor(recipe: Recipe) -> Iterator[Issue]:
    """Check that the files that prepare images and place them in a prompt are there, and can be read."""
    folder = find_folder(resolve_source(recipe.model))
    if folder is None:
        return
    files = [each for name in _PROCESSOR_FILES if (each := folder / name).exists()]
    broken = [each for each in files if read_settings(each) is None]
    if broken:
        yield Issue(
            f"{broken[0]} holds no JSON object", "correct it, or download it again", "model.path"
        )
    elif not files:
        fix = f"put {' or '.join(_PROCESSOR_FILES)} beside config.json"
        yield Issue(f"{folder} has no processor for images", fix, "model.path")
    if read_source_template(recipe.model) == "" and not (folder / "chat_template.json").exists():
        seen = "images need a chat template, which says where they are in a prompt, and the model has none"
        yield Issue(seen, "set `model.chat_template`", "model.path")
