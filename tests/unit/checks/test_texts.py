"""Prompts and patterns of which YAML reads something else than is meant."""

import pytest

from grpo_cli.checks.settings import check_texts, check_to_do
from grpo_cli.recipe.yaml_tree import read_text


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
        ("episode: {tool_timeout_s: 10000}", "10000 is in seconds, so it allows 2h46m"),
        ("episode: {tool_timeout_s: 1800}", ""),
        ("launch: {stall_timeout_s: 10000}", ""),
        ("rewards: [{kind: code, seconds_per_test: 5000}]", "5000 is in seconds"),
    ],
)
def test_texts_that_yaml_reads_otherwise_are_found(text, seen):
    found = [each.seen for each in check_texts(read_text(text, "recipe.yaml"))]
    assert [seen in each for each in found] == [True] * bool(seen)


def test_what_convert_left_to_do_is_an_error_until_it_is_written():
    text = (
        "training:\n  max_steps: 2\n  # TO DO: training.learning_rate: train.py:3 has `args.lr`\n"
    )
    for written, places in ((text, ["recipe.yaml:3:3"]), (f"{text}  learning_rate: 1e-5\n", [])):
        issues = check_to_do(read_text(written, "recipe.yaml"), written)
        assert [str(each.location) for each in issues] == places
