"""Small copies of images: made once, named in prompts, and read back."""

import base64
import io

import pytest

from grpo_cli.runs.completions import show_content
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.thumbnails import Thumbnails, read_thumbnails

Image = pytest.importorskip("PIL.Image")

PROMPT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}],
    },
]


def draw(colour, size, path=""):
    picture = Image.new("RGB", size, colour)
    picture.filename = path
    return picture


def test_images_are_copied_once_and_named_where_they_stand(tmp_path):
    run = RunFolder(tmp_path)
    first, second = (run.thumbnails / f"rank_{rank}.jsonl" for rank in (0, 1))
    red, wide = draw("red", (900, 300), "/data/charts/1.png"), draw("blue", (20_000, 3))
    loads = []

    def load():
        loads.append(1)
        return [red, wide]

    thumbnails = Thumbnails(first)
    named = thumbnails.name_images(PROMPT, ("train", 3), load)
    assert thumbnails.name_images(PROMPT, ("train", 3), load) == named
    assert len(loads) == 1
    assert show_content(named[1]["content"]) == "[image charts/1.png] or [image]"
    assert named[0] == PROMPT[0]
    assert "thumbnail" not in PROMPT[1]["content"][0]
    # Another process and another attempt keep the same picture under the same name.
    Thumbnails(second).name_images(PROMPT, 0, lambda: [red, wide])
    Thumbnails(first).name_images(PROMPT, 0, lambda: [wide, red])
    assert len(first.read_text().splitlines()) == 2
    copies = read_thumbnails(run)
    sizes = [
        Image.open(io.BytesIO(base64.b64decode(copies[part["thumbnail"]]))).size
        for part in named[1]["content"]
        if part["type"] == "image"
    ]
    assert sizes == [(128, 43), (128, 1)]


def test_prompts_that_say_nothing_of_their_images_stay_as_they_are(tmp_path):
    thumbnails = Thumbnails(tmp_path / "rank_0.jsonl")
    assert thumbnails.name_images(PROMPT, 0, list) == PROMPT
    assert read_thumbnails(RunFolder(tmp_path)) == {}
