"""Nothing of a source is lost unmentioned, and what is written is a recipe."""

import pytest

from grpo_cli.convert.key_report import KeyReport, write_recipe
from grpo_cli.convert.trl import convert_open_r1
from grpo_cli.recipe.yaml_tree import dotted, read_text
from tests.unit.convert.readings import NAMES, convert, leaves, read, reasons, write


def list_unmentioned(report):
    """The leaves that neither have an entry nor lie below a key that was decided as a whole."""
    known = {entry.key for entry in report.entries}
    unmentioned = []
    for path in leaves(report.source):
        for depth in range(len(path), 0, -1):
            key = dotted(path[:depth])
            taken_apart = depth < len(path) and any(other.startswith(f"{key}.") for other in known)
            if key in known and not taken_apart:
                break
        else:
            unmentioned.append(dotted(path))
    return unmentioned


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_mapped_or_dropped_with_a_reason(name):
    report = read(name)
    assert list_unmentioned(report) == []
    assert all(note for note in reasons(report).values())


def test_the_search_for_unmentioned_keys_finds_one():
    tree = read_text("model_name_or_path: m\nfresh: {inner: 1}\n", "x")
    report = KeyReport(tree, "trl")
    assert list_unmentioned(report) == ["model_name_or_path", "fresh.inner"]
    report.drop(("fresh",), "why not")
    assert list_unmentioned(report) == ["model_name_or_path"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_fits_the_schema_and_reads_as_what_was_decided(name, tmp_path):
    report = read(name)
    loaded = write(report, tmp_path)
    assert [str(problem) for problem in loaded.problems] == []
    text = write_recipe(report, "config.yaml")
    assert read_text(text, "converted").plain() == report.recipe


@pytest.mark.parametrize("name", NAMES)
def test_every_dropped_key_stands_in_a_comment(name):
    report = read(name)
    _, _, end = write_recipe(report, "c").partition("# Not taken over:")
    for key in reasons(report):
        assert f"#   {key}: " in end


@pytest.mark.parametrize("ending", ["\\n", "\\u2028", "\\x85", "\\r"])
def test_no_value_of_a_source_ends_the_comment_it_stands_in(ending, tmp_path):
    text = "base_model: m\nrl: grpo\noptimizer: X\ndatasets: [{path: d, type: X}]\ntrl: {reward_funcs: [X]}\n"
    report = convert(text.replace("X", f'"a{ending}training: 1"'), "axolotl")
    loaded = write(report, tmp_path)
    assert loaded.tree.plain()["training"] == report.recipe["training"]


def test_problems_carry_the_place_in_the_source():
    report = convert("model_name_or_path: m\ndataset_name: d\nlearnin_rate: 1e-6\n")
    (entry,) = [entry for entry in report.entries if entry.target is None]
    assert str(entry.location) == "config.yaml:3:1"
    assert entry.note == "has no counterpart in a recipe; did you mean `learning_rate`?"


def test_an_empty_config_leaves_the_model_the_dataset_and_the_rewards_to_do():
    report = KeyReport(read_text("dataset_prompt_column: p\n", "x"), "open-r1")
    convert_open_r1(report, ())
    assert "dataset" in report.to_do
    assert [reward["kind"] for reward in report.recipe["rewards"]] == ["math", "regex", "tag_count"]
    assert set(convert("use_vllm: true\n").to_do) == {"dataset", "rewards", "model.path"}
