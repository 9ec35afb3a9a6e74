import os
from pathlib import Path

import pytest

from grpo_cli.errors import RecipeError
from grpo_cli.recipe.yaml_tree import read_scalar, read_source, read_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3.", -3.0),
        ("1_000", 1000),
        ("0x10", 16),
        ("0o17", 15),
        ("-7", -7),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("0b1", "0b1"),
    ],
)
def test_scalars_are_read_as_a_person_means_them(text, value):
    read = read_scalar(text)
    assert read == value
    assert type(read) is type(value)


def test_quotes_keep_text_as_text():
    assert read_text("a: '1e-6'\nb: \"no\"\nc: |\n  1\n", "r").plain() == {
        "a": "1e-6",
        "b": "no",
        "c": "1\n",
    }


def test_every_value_knows_its_place():
    tree = read_text("a:\n  - x\n  - {b: 3}\n", "r.yaml")
    assert str(tree.child("a").child(1).child("b").location) == "r.yaml:3:9"
    assert str(tree.child("a").child(1).key_locations["b"]) == "r.yaml:3:6"


def test_merge_keys_and_anchors_work():
    tree = read_text("base: &b {x: 1, y: 2}\nd: {<<: *b, y: 3}\n", "r")
    assert tree.plain()["d"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "r:3:1: the key `a` stands twice in this mapping (first in line 1)"),
        (
            "a: {b: 1}\nc: 2\na: {d: 3}",
            "Fix: move its keys into the first `a`, and remove the second",
        ),
        ("a:\n  b: 1\n  c:20\n  d: 2", "r:3:3: is not valid YAML: could not find expected ':'"),
        ("a:\n  b: 1\n  c:20\n  d: 2", "Fix: put a space after the colon: `c: 20`"),
        ('a: 1\nb: "x\nc: 2\n', "r:2:4: is not valid YAML: found unexpected end of stream"),
        ("a:\n\u00a0 b: 1\n", "r:2:1: is indented with no-break spaces (U+00A0)"),
        ("a: {{ q }}", 'put it in quotes: "{{ question }}"'),
        ("a: !!python/object/apply:os.system ['true']", "r:1:4: has the tag"),
        ("a: !mine 3", "has the tag `!mine`"),
        ("a:\n\t- b", "with spaces, not tabs"),
        ("a: b: c", "put text that holds `: ` in quotes"),
        (r'a: "#### \s*"', "in single quotes instead of double ones"),
        ("a: 1\n---\nb: 2", "keep one YAML document"),
        ("a: *nobody", "define the anchor before it is used"),
        ("a: [1, 2", "is not valid YAML"),
        ("? [1, 2]\n: x", "a key must be a word"),
    ],
)
def test_what_a_recipe_has_no_use_for_is_refused(text, said):
    with pytest.raises(RecipeError) as caught:
        read_text(text, "r")
    assert said in str(caught.value)


def test_files_that_are_no_recipe_are_refused(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\xfe\n")
    with pytest.raises(RecipeError, match=r"binary\.yaml:2:1: is not UTF-8"):
        read_source(binary)
    with pytest.raises(RecipeError, match=r"cannot be read.*binary.yaml"):
        read_source(tmp_path / "missing.yaml")
    (tmp_path / "like-missing.yaml").touch()
    with pytest.raises(RecipeError, match=r"there are like-missing.yaml, binary.yaml"):
        read_source(tmp_path / "missing.yaml")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(RecipeError, match=r"rows.jsonl: is a file of data.*`train`"):
        read_source(tmp_path / "rows.jsonl")
    with pytest.raises(RecipeError, match="name a file, not a folder"):
        read_source(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\n")
    assert read_text(read_source(path), "r").plain() == {"name": "x"}


LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (LAUGHS, "its aliases repeat more than"),
        ("a: &a {b: *a}", "holds itself"),
        ("a: &a [1, {b: [*a]}]", "holds itself"),
        ("a: " + "[" * 90 + "]" * 90, "stand inside each other"),
        ("a: " + "{b: " * 90 + "1" + "}" * 90, "stand inside each other"),
        ("- " * 5000 + "1", "nesting depth"),
    ],
)
def test_values_that_multiply_or_hold_themselves_are_refused(text, seen):
    with pytest.raises(RecipeError, match=seen):
        read_text(text, "r.yaml")


def test_aliases_stand_for_what_they_name_wherever_they_are():
    tree = read_text("a: &a {b: [1, 2]}\nc: *a\nd: [*a, *a]\ne: {<<: *a, f: 1}", "r.yaml")
    one = {"b": [1, 2]}
    assert tree.plain() == {"a": one, "c": one, "d": [one, one], "e": {**one, "f": 1}}


@pytest.mark.parametrize("sign", ["\0", "\x07", "\x1b", "\ufffe"])
def test_a_character_that_yaml_forbids_is_named_where_it_stands(sign):
    with pytest.raises(RecipeError, match=f"^recipe.yaml:2:6: .*U\\+{ord(sign):04X}"):
        read_text(f"é: 1\nb: 'ü{sign}'\n", "recipe.yaml")


def test_a_pipe_with_a_path_is_refused_and_that_of_a_shell_is_read(tmp_path):
    os.mkfifo(tmp_path / "a.yaml")
    (tmp_path / "link.yaml").symlink_to("a.yaml")
    for path in (tmp_path / "a.yaml", tmp_path / "link.yaml", Path("/dev/zero")):
        with pytest.raises(RecipeError, match="is a pipe, a socket or a device"):
            read_source(path)
    reading, writing = os.pipe()
    os.write(writing, b"a: 1")
    os.close(writing)
    assert read_source(Path(f"/dev/fd/{reading}")) == "a: 1"
    os.close(reading)
