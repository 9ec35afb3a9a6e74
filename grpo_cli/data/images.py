"""Images of rows: where they are, whether Pillow reads them, and how they are decoded."""

import base64
import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_cli.data.rows import Row, show, show_names, suggest
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue

MARK = "image"
"""The name in a template that says where an image goes."""
Image = dict[str, Any]
"""`{"bytes": …, "path": …}`, one of them None, as `datasets` stores an image."""
_PLACE = "dataset.prompt.images"
_TURNED = range(5, 9)
"""Values of EXIF's orientation (tag 274) that exchange width and height."""
_ENDS = {b"\xff\xd8\xff": b"\xff\xd9", b"\x89PNG": b"IEND"}
"""How JPEG and PNG begin and end."""
_START, _TAIL = 12, 1024
_LONGEST_PATH = 4096
_CONVERT = "convert it to PNG or JPEG"


def check_image_columns(columns: Iterable[str], available: Iterable[str], rows: str) -> None:
    """Check that there are the columns that hold images; `rows` is what `RecipeError` calls the rows."""
    names = list(available)
    for name in columns:
        if name not in names:
            message = f"there is no column `{name}`; the {rows} rows have {show_names(names)}"
            fix = suggest(name, names, "name one of these columns")
            raise RecipeError([Issue(message, fix, _PLACE)])


class ImageError(Exception):
    """An image cannot be used; what was seen, with the fix."""

    def __init__(self, kind: str, seen: str, fix: str) -> None:
        super().__init__(seen)
        self.kind, self.seen, self.fix = kind, seen, fix

    @property
    def row_fix(self) -> str:
        """The fix for an image of a row."""
        where = ", which is relative to the file of the row" if self.kind == "missing" else ""
        others = ", or leave the row out" if self.kind in ("missing", "format", "damage") else ""
        return f"{self.fix}{where}{others}"


def is_stored_image(value: Any) -> bool:
    """Return whether a value is an image as `datasets` stores one: `{bytes, path}`, not both empty."""
    is_kept = isinstance(value, dict) and value.keys() <= {"bytes", "path"}
    return is_kept and any(value.values())


def image_values(row: Row, columns: Iterable[str]) -> list[tuple[str, Any]]:
    """Return each image of a row as it is written, with its column; empty values are not images."""
    listed = {
        name: value if isinstance(value := row.get(name), list | tuple) else [value]
        for name in columns
    }
    return [
        (name, each)
        for name, values in listed.items()
        for each in values
        if each is not None and each != ""
    ]


def read_images(row: Row, columns: Iterable[str], where: str, folder: Path | None) -> list[Image]:
    """Return a row's images; of each, the first and last bytes are read. Relative paths are below `folder`.

    Raises `RecipeError` if one of them is not a picture that Pillow reads.
    """
    images = []
    for column, value in image_values(row, columns):
        try:
            images.append(as_image(value, folder))
            check_image(images[-1])
        except ImageError as error:
            message = f"{where}: `{column}` {error.seen}"
            raise RecipeError([Issue(message, error.row_fix, _PLACE)]) from error
    return images


def as_image(value: Any, folder: Path | None) -> Image:
    """Return an image as `datasets` stores it; `folder` is what a path is relative to.

    Raises `ImageError` if the value is none.
    """
    if isinstance(value, str):
        if "://" in value or value.startswith("data:"):
            fix = "download the pictures first, and write their paths"
            raise ImageError("address", f"is an address, which is not opened: {show(value)}", fix)
        if "\0" in value or len(value) > _LONGEST_PATH:
            fix = "write the path of a picture, or keep its bytes in a parquet file"
            raise ImageError("value", f"holds {show(value)}, which is not a path", fix)
        path = Path(value).expanduser()
        return {"bytes": None, "path": str(folder / path if folder else path.absolute())}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value), "path": None}
    if is_stored_image(value):
        if value.get("bytes"):
            return {"bytes": value["bytes"], "path": None}
        return as_image(value["path"], folder)
    if hasattr(value, "getexif"):
        file = io.BytesIO()
        value.save(file, format="PNG")
        return {"bytes": file.getvalue(), "path": None}
    raise ImageError(
        "value", f"holds {show(value)}, which is not an image", "write the path of a picture"
    )


def name_images(images: Iterable[Image]) -> list[str]:
    """Return what tells images from others: their paths, or hashes of their bytes."""
    return [image["path"] or hashlib.sha256(image["bytes"]).hexdigest() for image in images]


def check_image(image: Image, *, decodes: bool = False) -> None:
    """Check that an image is there, and whole; one whose format has no end to look for is decoded with `decodes`.

    Raises `ImageError` if it cannot be used.
    """
    read_size(image)
    start, tail = _read_ends(image)
    end = next((end for begin, end in _ENDS.items() if start.startswith(begin)), None)
    # Some cameras write more behind the end.
    if decodes if end is None else end not in tail:
        decode_image(image)


def _read_ends(image: Image) -> tuple[bytes, bytes]:
    if image["bytes"] is not None:
        return image["bytes"][:_START], image["bytes"][-_TAIL:]
    with open(image["path"], "rb") as file:
        start = file.read(_START)
        file.seek(max(file.seek(0, io.SEEK_END) - _TAIL, 0))
        return start, file.read()


def read_size(image: Image) -> tuple[int, int]:
    """Return the width and height of an image, turned upright, from its first bytes, or raise `ImageError`."""
    with _opened(image) as picture:
        width, height = picture.size
        turned = picture.getexif().get(274) in _TURNED
        return (height, width) if turned else (width, height)


def decode_image(image: Image) -> Any:
    """Return an image as an upright RGB `PIL.Image.Image`, on white if it is transparent, or raise `ImageError`.

    Its `filename` is the path, as that of an image that Pillow opened; empty if it has none.
    """
    from PIL import ImageOps

    with _opened(image) as picture:
        picture.load()
        decoded = _as_rgb(ImageOps.exif_transpose(picture))
    decoded.filename = image["path"] or ""
    return decoded


def as_data_url(picture: Any) -> str:
    """Return a `PIL.Image.Image` as a PNG in a `data:` address, as servers take images."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@contextmanager
def _opened(image: Image) -> Iterator[Any]:
    """Open an image; what is wrong with it, inside too, is an `ImageError`."""
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    name = image["path"] or f"{len(image['bytes']):,} bytes"
    file = image["path"] or io.BytesIO(image["bytes"])
    path = image["path"]
    if path and os.path.exists(path) and not os.path.isfile(path):
        # A pipe or a device might never end.
        raise ImageError("folder", f"names {name}, which is not a regular file", "name a picture")
    try:
        with warnings.catch_warnings():
            # Up to twice the limit, Pillow merely warns.
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            with Pillow.open(file) as picture:
                yield picture
    except FileNotFoundError as error:
        seen = f"names {name}, which does not exist"
        raise ImageError("missing", seen, "correct the path") from error
    except UnidentifiedImageError as error:
        seen = f"is not a picture that Pillow reads: {name} begins with {_read_ends(image)[0]!r}"
        raise ImageError("format", seen, _CONVERT) from error
    except (Pillow.DecompressionBombWarning, Pillow.DecompressionBombError) as error:
        limit = f"{Pillow.MAX_IMAGE_PIXELS:,} pixels, the most that Pillow opens"
        raise ImageError(
            "size", f"is too large: {name} has more than {limit}", "scale it down"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        is_damage = getattr(error, "errno", None) is None
        kind, fix = (
            ("damage", _CONVERT) if is_damage else ("access", "correct the path, or its access")
        )
        raise ImageError(kind, f"cannot be read: {name}: {reason}", fix) from error


def _as_rgb(picture: Any) -> Any:
    from PIL import Image as Pillow

    if picture.mode.startswith("I;16"):
        # Pillow would cut all values off at 255.
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    above = picture.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", above.size, "white"), above).convert("RGB")


def as_picture(value: Any) -> Any:
    """Return an image, also a `PIL.Image.Image`, as `decode_image` does, or raise `ImageError`."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    if not isinstance(value, Pillow.Image):
        return decode_image(as_image(value, None))
    if not all(value.size):
        raise ImageError("size", f"has no pixels: {value.width}x{value.height}", "draw it larger")
    try:
        picture = _as_rgb(ImageOps.exif_transpose(value))
    except (OSError, SyntaxError, ValueError) as error:
        # It was opened, and not read yet.
        raise ImageError("damage", f"cannot be read: {error}", _CONVERT) from error
    picture.filename = getattr(value, "filename", "")
    return picture


def in_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts, as templates of vision-language models take them."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def images_of(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the images that messages hold, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if "image" in part]


def without_images(prompt: Any) -> Any:
    """Return a prompt whose messages say where images are, and hold none."""
    if isinstance(prompt, str):
        return prompt
    return [
        {
            **message,
            "content": [
                {key: value for key, value in part.items() if key != "image"}
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]


def fill_images(prompt: Sequence[dict[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a prompt's messages with its images in their places."""
    left = iter(images)
    return [
        {
            **message,
            "content": [
                {**part, "image": next(left)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in in_parts(prompt)
    ]
