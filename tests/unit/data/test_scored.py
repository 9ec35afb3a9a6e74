"""Rows of one prompt become a group; prompts without anything to compare are left out."""

import pytest

pytest.importorskip("datasets")

from grpo_cli.data.build import build_datasets
from grpo_cli.data.preview import preview
from grpo_cli.errors import RecipeError
from grpo_cli.recipe.recipe import Recipe


def row(prompt, response, reward):
    return {"prompt": prompt, "response": response, "reward": reward}


ROWS = [
    row("a", "one", 1),
    row("b", "two", 0),
    row("a", "three", "0.5"),
    row("c", "alone", 1),
    row("b", "four", 0.0),
    row("a", "five", True),
]


@pytest.fixture
def scored():
    def make(seed=1, **keys):
        dataset = {"kind": "scored", "rows": ROWS, **keys}
        return Recipe.model_validate(
            {"name": "t", "seed": seed, "model": {"path": "m"}, "dataset": dataset}
        )

    return make


def build(made, count_tokens=len):
    return build_datasets(made, has_chat_template=False, count_tokens=count_tokens)


def test_the_rows_of_a_prompt_stand_together_wherever_they_lie(scored):
    built = build(scored())
    assert built.train.to_list() == [
        {
            "prompt": "a",
            "row_id": 0,
            "responses": ["one", "three", "five"],
            "rewards": [1.0, 0.5, 1.0],
        },
        {"prompt": "b", "row_id": 1, "responses": ["two", "four"], "rewards": [0.0, 0.0]},
    ]
    groups = built.report.groups
    assert (groups.prompts, groups.responses, groups.single, groups.equal) == (2, 5, 1, 1)
    assert (groups.smallest, groups.median, groups.largest) == (2, 2, 3)
    assert built.report.as_json()["groups"]["single"] == 1


def test_prompts_and_responses_are_templates_also_over_names_that_trl_keeps(scored):
    rows = [{"q": "1", "completion": "x", "stars": n} for n in (1, 2)]
    made = scored(
        rows=rows, prompt={"user": "Q{{ q }}:"}, response=" {{ completion }}!", reward="stars"
    )
    (only,) = build(made).train.to_list()
    assert (only["prompt"], only["responses"], only["rewards"]) == ("Q1:", [" x!"] * 2, [1.0, 2.0])


def test_whole_prompts_are_held_out(scored):
    rows = [row(f"p{number}", text, 0) for number in range(10) for text in "xyz"]
    built = build(scored(rows=rows, eval_fraction=0.3))
    asked, held = set(built.train["prompt"]), set(built.eval["prompt"])
    assert (len(asked), len(held)) == (7, 3)
    assert not asked & held
    assert built.report.groups.prompts == 7
    assert build(scored(rows=rows, eval_fraction=0.3)).eval["prompt"][:] == built.eval["prompt"][:]
    assert len(build(scored(rows=rows, eval_fraction=0.3, eval_limit=2)).eval) == 2


def test_evaluation_rows_of_their_own_are_grouped_too(scored):
    built = build(scored(eval_rows=[row("d", "1", 0), row("d", "2", 1), row("e", "3", 1)]))
    assert built.eval["prompt"][:] == ["d"]


def test_long_prompts_are_dropped_with_all_their_responses(scored):
    rows = [*ROWS, row("long one", "x", 1), row("long one", "y", 0)]
    built = build(scored(rows=rows, max_prompt_length=3))
    assert built.train["prompt"][:] == ["a", "b"]
    assert built.report.dropped["training"]["too_long"] == 1


@pytest.mark.parametrize(
    ("keys", "path", "said"),
    [
        (
            {"reward": "score"},
            "dataset.reward",
            "training row 1 has no reward: there is no `score`",
        ),
        ({"rows": [*ROWS, row("a", "x", None)]}, "dataset.reward", "training row 7 has no reward"),
        ({"rows": [*ROWS, row("a", "x", "nan")]}, "dataset.reward", "`reward` is 'nan'"),
        ({"rows": [*ROWS, row("a", "x", "0,5")]}, "dataset.reward", "`reward` is '0,5'"),
        ({"rows": [*ROWS, row("a", "x", 10**400)]}, "dataset.reward", "has no reward"),
        (
            {"rows": [*ROWS, row("a", [{"role": "assistant", "content": "x"}], 1)]},
            "dataset.response",
            "has no text in `response`",
        ),
        ({"response": "{{ answer }}"}, "dataset.response", "`answer` is not a column"),
        ({"rows": [row("a", "x", 1), row("b", "x", 1)]}, "dataset", "has a single response"),
    ],
)
def test_what_cannot_be_used_is_said_by_building_and_by_looking(scored, keys, path, said):
    made = scored(**keys)
    with pytest.raises(RecipeError) as error:
        build(made)
    for problems in (error.value.problems, preview(made.dataset, made.seed).problems):
        (problem,) = problems
        assert problem.path == path
        assert said in problem.seen


def test_a_look_counts_the_prompts_that_training_will_have(scored):
    seen = preview(scored().dataset, 1)
    assert (seen.train_rows, seen.eval_rows) == (2, None)
    assert (seen.groups.responses, seen.groups.single) == (5, 1)
    rows = [row(f"p{number}", text, 0) for number in range(10) for text in "xyz"]
    seen = preview(scored(rows=rows, eval_fraction=0.3).dataset, 1)
    assert (seen.train_rows, seen.eval_rows) == (7, 3)
    seen = preview(scored(eval_rows=ROWS).dataset, 1)
    assert (seen.train_rows, seen.eval_rows) == (2, 2)


def test_files_and_the_hub_are_named_in_one_way_at_a_time(scored, section):
    with pytest.raises(ValueError, match=r"it has none"):
        section(kind="scored")
    with pytest.raises(ValueError, match=r"it has `train` and `path`"):
        section(kind="scored", train="a.jsonl", path="org/data")
    hub = section(kind="scored", path="org/data", eval_split="test").source
    assert (hub.kind, hub.path, hub.split, hub.eval_split) == ("hub", "org/data", "train", "test")
