"""Prompts and patterns of which YAML reads something else than is meant."""

from pathlib import Path

import pytest

from grpo_cli.checks.recipe import check_texts, check_to_do
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.yaml_tree import read_text
from tests.contexts import make_context


def load(text):
    """What checks read of a YAML text that need not be a recipe."""
    tree = read_text(text, "recipe.yaml")
    return make_context(LoadedRecipe(None, tree, (), Path("recipe.yaml"), text))


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("system: End with #### <number>.", "ends with 'End with', without '#### <number>.'"),
        ("system: |\n  End with #### <number>.", ""),
        ("system: Answer.   # be short\nuser: '{{ q }}' #two", ""),
        ("prompt: {user: a, system: Two\n  lines #1\n }", "without '#1'"),
        (r"user: '{{ q }}\nAnswer:'", "a line break in double quotes alone"),
        (r"""user: "{{ q }}\\nAnswer:\n" """, ""),
        (r"user: 'Is x \neq y?'", ""),
        (r"""rewards: [{kind: regex, pattern: "\b7"}]""", "reads \\b as one"),
        (r"""system: "Write \boxed{}." """, "reads \\b as one"),
        (r"""system: "a\tb" """, ""),
        (r"""columns: {a: {from: a, regex: '\b7'}}""", ""),
        (r"""rewards: [{kind: regex, pattern: '\boxed\{'}]""", r"it never matches \boxed"),
        (r"""rewards: [{kind: regex, pattern: '\\boxed\{'}]""", ""),
    ],
)
def test_texts_that_yaml_reads_otherwise_are_found(text, seen):
    found = [each.seen for each in check_texts(load(text))]
    assert [seen in each for each in found] == [True] * bool(seen)


def test_what_convert_left_to_do_is_an_error_until_it_is_written():
    text = (
        "training:\n  max_steps: 2\n  # TO DO: training.learning_rate: train.py:3 has `args.lr`\n"
    )
    for written, places in ((text, ["recipe.yaml:3:3"]), (f"{text}  learning_rate: 1e-5\n", [])):
        issues = check_to_do(load(written))
        assert [str(each.location) for each in issues] == places


def test_a_value_that_convert_is_not_sure_of_is_an_error_until_the_comment_is_deleted():
    text = "training:\n  beta: 0.1\n# TO DO: training (in part): train.py:3 has `**more`\n"
    (issue,) = check_to_do(load(text))
    assert (issue.path, issue.seen) == (
        "training",
        "is converted in part, as the comment `TO DO` says",
    )
    assert [*check_to_do(load(text.partition("#")[0]))] == []
