"""`thumbnails/rank_N.jsonl`: small copies of the images that were sampled for, which reports show."""

import base64
import hashlib
import io
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record, read_records
from grpo_cli.runs.records import read_thumbnail

LONGEST_SIDE = 128
"""Of a copy, in pixels."""
_QUALITY = 80


class Thumbnails:
    """Names the images of prompts in a run's records, and keeps a copy of each distinct one."""

    def __init__(self, path: Path) -> None:
        """Append to a file, which need not exist yet."""
        self._path = path
        self._images: dict[Hashable, list[dict[str, str]]] = {}

    @cached_property
    def _kept(self) -> set[str]:
        """Those that are in the file, also of earlier attempts."""
        return set(_read_file(self._path))

    def name_images(self, prompt: Any, key: Hashable, load: Callable[[], Sequence[Any]]) -> Any:
        """Return a prompt whose parts of the type `image` have the `path` and the `thumbnail` of theirs.

        Args:
            prompt: Text, or messages.
            key: Tells the row from others: its images are loaded once.
            load: Returns the row's `PIL.Image.Image`s, in order; `filename` is the path, if it is known.
        """
        if key not in self._images:
            self._images[key] = [self._keep(picture) for picture in load()]
        images = iter(self._images[key])

        def name(part: Any) -> Any:
            is_image = isinstance(part, dict) and part.get("type") == "image"
            return {**part, **next(images, {})} if is_image else part

        return [
            {**message, "content": list(map(name, message["content"]))}
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            else message
            for message in prompt
        ]

    def _keep(self, picture: Any) -> dict[str, str]:
        copy = encode_jpeg(picture, LONGEST_SIDE, _QUALITY)
        digest = hashlib.sha256(copy).hexdigest()[:16]
        if digest not in self._kept:
            record = {"thumbnail": digest, "jpeg": base64.b64encode(copy).decode("ascii")}
            self._path.parent.mkdir(exist_ok=True)
            append_record(self._path, record)
            self._kept.add(digest)
        path = getattr(picture, "filename", "")
        return {**({"path": path} if path else {}), "thumbnail": digest}


def encode_jpeg(picture: Any, longest_side: int, quality: int) -> bytes:
    """Return an RGB `PIL.Image.Image` as JPEG, scaled down to a longest side in pixels if it is larger."""
    largest = max(picture.size)
    if largest > longest_side:
        size = [max(round(side * longest_side / largest), 1) for side in picture.size]
        picture = picture.resize(size, reducing_gap=3.0)
    file = io.BytesIO()
    # Colours at full resolution, since lines and letters of charts would fade.
    picture.save(file, format="JPEG", quality=quality, subsampling=0)
    return file.getvalue()


def read_thumbnails(run: RunFolder) -> dict[str, str]:
    """Return each copy by its name, as base64 of a JPEG file; empty for runs without images."""
    copies: dict[str, str] = {}
    for path in sorted(run.thumbnails.glob("rank_*.jsonl")):
        copies |= _read_file(path)
    return copies


def _read_file(path: Path) -> dict[str, str]:
    return {each["thumbnail"]: each["jpeg"] for each in read_records(path, read_thumbnail)}
