"""Images of rows: what is read, what is refused, and where they stand in a prompt."""

import io

import pytest
from PIL import Image

from grpo_cli.checks.images import look_at_images
from grpo_cli.data.images import as_image, decode_image, read_size
from grpo_cli.data.prompts import Renderer
from grpo_cli.data.rows import RowNames
from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.recipe.dataset import PromptConfig
from grpo_cli.serve.chat import read_picture

RED = (255, 0, 0)


def packed(picture, form="PNG", **options):
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def decoded(data):
    return decode_image(as_image(data, None))


def test_transparent_pictures_are_on_white():
    above = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    above.putpixel((0, 0), (*RED, 255))
    palette = above.convert("P")
    palette.info["transparency"] = palette.getpixel((1, 0))
    for picture in (above, palette):
        shown = decoded(packed(picture))
        assert shown.mode == "RGB"
        assert [shown.getpixel((x, 0)) for x in (0, 1)] == [RED, (255, 255, 255)]


def test_other_modes_become_rgb():
    assert decoded(packed(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "JPEG")).mode == "RGB"
    deep = Image.new("I;16", (1, 1), 0x8000)
    assert decoded(packed(deep)).getpixel((0, 0)) == (128, 128, 128)


def test_pictures_are_turned_upright():
    exif = Image.Exif()
    exif[274] = 6
    image = as_image(packed(Image.new("RGB", (4, 2)), "JPEG", exif=exif), None)
    assert read_size(image) == decode_image(image).size == (2, 4)


def test_values_of_datasets_and_pillow_are_images(tmp_path):
    Image.new("RGB", (3, 1)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    values = ["a.png", data, {"bytes": data, "path": "gone.png"}, {"bytes": None, "path": "a.png"}]
    values.append(Image.open(tmp_path / "a.png"))
    assert {read_size(as_image(value, tmp_path)) for value in values} == {(3, 1)}


@pytest.fixture
def bad(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    noise = Image.effect_noise((60, 60), 90)
    noise.save(tmp_path / "good.jpg")
    for name in ("torn.jpg", "torn.png"):
        noise.save(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    Image.new("L", (80, 80)).save(tmp_path / "bomb.png")
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "vector.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (tmp_path / "folder.png").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("gone.png", "which does not exist"),
        ("folder.png", "not a regular file"),
        ("text.png", "is not a picture that Pillow reads"),
        ("vector.svg", 'begins with b"<svg'),
        ("torn.jpg", "cannot be read"),
        ("torn.png", "cannot be read"),
        ("bomb.png", "more than 5,000 pixels"),
        ("https://example.org/a.png", "is an address, which is not opened"),
        (7, "holds 7, which is not an image"),
        ("/dev/zero", "not a regular file"),
        ("iVBORw0KGgo" * 500, "which is not a path"),
    ],
)
def test_what_is_no_picture_is_told_once_with_its_row(bad, value, seen):
    rows = [{"picture": "good.jpg"}, {"picture": ["good.jpg", value]}, {"picture": value}]
    names = RowNames("training", ((bad / "rows.jsonl", 3),))
    (issue,) = look_at_images(dict(enumerate(rows)), ["picture"], names)
    assert issue.seen.startswith("row 2 of rows.jsonl: `picture` ")
    assert seen in issue.seen
    assert issue.seen.endswith("so it is in 2 of the 3 rows looked at")


def test_the_fix_of_a_picture_in_a_chat_speaks_of_no_row(tmp_path):
    with pytest.raises(UsageError) as error:
        read_picture(str(tmp_path / "gone.png"))
    seen = f"--image names {tmp_path / 'gone.png'}, which does not exist"
    assert str(error.value) == f"{seen}. Fix: correct the path"
    (issue,) = look_at_images({0: {"picture": "gone.png"}}, ["picture"], RowNames("training"))
    assert issue.fix.endswith("relative to the file of the row, or leave the row out")


def render(row, *, in_parts=True, **keys):
    return Renderer(PromptConfig(**keys), "chat", in_parts=in_parts).render(row, "training row 7")


def shown(messages):
    return [
        "".join("<image>" if part["type"] == "image" else part["text"] for part in each["content"])
        for each in messages
    ]


def test_images_come_before_the_text_or_where_they_are_marked():
    row = {"first": "a.png", "more": ["b.png", "c.png"], "none": None, "q": "same?"}
    columns = ("first", "more", "none")
    assert shown(render(row, images=columns, user="{{ q }}")) == ["<image><image><image>same?"]
    marked = "{{ image }} and {{ image }}: {{ q }}{{ image }}"
    assert shown(render(row, images=columns, user=marked)) == ["<image> and <image>: same?<image>"]
    looped = "{% for each in more %}{{ image }}{% endfor %}{{ q }}"
    assert shown(render(row, images="more", user=looped)) == ["<image><image>same?"]
    # A row without any, beside others with some.
    assert shown(render(row, images="none", user="{{ q }}", system="Look.")) == ["Look.", "same?"]


def test_messages_of_the_data_may_hold_places_of_images():
    parts = [{"type": "text", "text": "what is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "picture": "a.png"}
    assert shown(render(row, images="picture")) == ["what is <image>?"]
    with pytest.raises(RecipeError, match=r"name their columns in `dataset\.prompt\.images`"):
        render(row, in_parts=False)


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("{{ image }} what?", "has the mark"),
        ([{"type": "image", "image": "b.png"}], "has a prompt with the message"),
    ],
)
def test_messages_of_the_data_hold_neither_marks_nor_images(content, seen):
    row = {"prompt": [{"role": "user", "content": content}], "picture": "a.png"}
    with pytest.raises(RecipeError, match=seen):
        render(row, images="picture")


@pytest.mark.parametrize(
    ("picture", "seen"),
    [(["a.png", "b.png"], "has 2 images in `picture`, and its prompt 1"), (None, "has 0 images")],
)
def test_marks_that_do_not_match_the_images_are_refused(picture, seen):
    with pytest.raises(RecipeError, match=seen):
        render({"picture": picture}, images="picture", user="{{ image }} what?")


def test_what_mends_a_wrong_count_fits_the_prompt():
    parts = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(RecipeError, match=r"its prompt 1 image part\. Fix: write a part"):
        render({"prompt": parts, "picture": ["a.png", "b.png"]}, images="picture")
    looped = "{% for each in picture %}{{ image }}{% endfor %}what?"
    with pytest.raises(RecipeError, match="a `for` over `picture` needs a list there"):
        render({"picture": "a.png"}, images="picture", user=looped)


@pytest.mark.parametrize(("column", "more"), [("image", "$"), ("chart", ", and write {{ image }}")])
def test_a_printed_image_is_to_be_named_as_one(column, more):
    row = {column: {"bytes": b"\x89PNG", "path": None}}
    with pytest.raises(RecipeError, match=rf"set `dataset\.prompt\.images: {column}`{more}"):
        render(row, user=f"{{{{ {column} }}}} what?")
