import json
from datetime import date, datetime
from decimal import Decimal

import pytest

pytest.importorskip("datasets")

from grpo_cli.data.build import build_datasets
from grpo_cli.data.preview import preview
from grpo_cli.data.table import (
    ExactValue,
    as_array,
    as_dataset,
    as_table,
    iterate_rows,
    join,
    list_rows,
    select_rows,
)
from grpo_cli.data.tasks import draw_rows
from grpo_cli.errors import RecipeError

ROWS = [{"q": "one"}, {"q": "two two"}, {"q": "three three three"}]
PROMPT = {"user": "{{ q }}"}


def count_words(prompt) -> int:
    return len((prompt if isinstance(prompt, str) else prompt[-1]["content"]).split())


def build(made, has_chat_template=True, count_tokens=count_words):
    return build_datasets(made, has_chat_template=has_chat_template, count_tokens=count_tokens)


def problem_of(made, **keys):
    with pytest.raises(RecipeError) as error:
        build(made, **keys)
    return error.value.problems[0]


def test_rows_become_prompts_with_their_columns(recipe) -> None:
    built = build(recipe(kind="inline", rows=ROWS, prompt={**PROMPT, "system": "Hi"}))
    assert built.train[1] == {
        "prompt": [{"role": "system", "content": "Hi"}, {"role": "user", "content": "two two"}],
        "row_id": 1,
        "q": "two two",
    }
    assert built.eval is None
    assert built.report.eval_rows is None


def test_printed_prompts_are_those_that_jinja_makes(recipe) -> None:
    values = ["a %s 50%", "", 1, -2.5, True, 10**20, "{{ q }}", "ü\n"]
    rows = [{"q": value, "n": place} for place, value in enumerate(values)]
    for system in (None, "No. {{ n }}"):
        texts = {"user": "100% {{ q }}:\n{{n}}", "system": system}
        jinja = {**texts, "user": texts["user"] + "{# all by Jinja #}"}
        made = [build(recipe(kind="inline", rows=rows, prompt=each)) for each in (texts, jinja)]
        assert made[0].train[:] == made[1].train[:]
        assert made[0].train.features == made[1].train.features
        assert made[0].report.fingerprint == made[1].report.fingerprint


def test_a_row_with_an_empty_prompt_is_named_among_many(recipe) -> None:
    rows = [{"q": "x"}] * 5000 + [{"q": " "}]
    assert (
        "row 5001 has an empty" in problem_of(recipe(kind="inline", rows=rows, prompt=PROMPT)).seen
    )


def test_without_chat_template_prompts_are_text(recipe) -> None:
    built = build(recipe(kind="inline", rows=ROWS, prompt=PROMPT), has_chat_template=False)
    assert built.train["prompt"][:] == [row["q"] for row in ROWS]
    assert built.report.plain_text


def test_a_column_of_texts_is_plain_text_whatever_the_chat_template(recipe) -> None:
    made = recipe(kind="inline", rows=[{"prompt": "x"}])
    assert build(made).report.plain_text
    assert not build(recipe(kind="inline", rows=ROWS, prompt=PROMPT)).report.plain_text


def test_the_template_wins_over_a_prompt_column(recipe) -> None:
    made = recipe(kind="inline", rows=[{"prompt": "x"}], prompt={"user": "<{{ prompt }}>"})
    assert build(made, has_chat_template=False).train["prompt"][:] == ["<x>"]


def test_long_rows_are_dropped_and_counted(recipe) -> None:
    made = recipe(kind="inline", rows=ROWS, eval_rows=ROWS, prompt=PROMPT, max_prompt_length=2)
    built = build(made)
    report = built.report
    assert (len(built.train), len(built.eval)) == (2, 2)
    assert (report.train_rows, report.eval_rows) == (2, 2)
    assert [counts["too_long"] for counts in report.dropped.values()] == [1, 1]
    tokens = report.prompt_tokens
    assert (tokens.min, tokens.median, tokens.p95, tokens.max) == (1, 1, 2, 2)
    assert report.exact_duplicates_between_splits == 2


def test_row_ids_are_places_in_the_source(recipe) -> None:
    rows = [{"q": f"{number} {'x ' * (number % 2)}"} for number in range(40)]
    made = recipe(kind="inline", rows=rows, eval_fraction=0.25, prompt=PROMPT, max_prompt_length=1)
    built = build(made)
    for split in (built.train, built.eval):
        assert all(split[at]["q"] == rows[split[at]["row_id"]]["q"] for at in range(len(split)))
        assert all(place % 2 == 0 for place in split["row_id"])
    assert built.report.dropped["training"]["too_long"] == 20


@pytest.mark.parametrize("images", [None, "image"])
def test_a_check_counts_the_prompts_that_a_fraction_divides(recipe, tmp_path, images) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    for number in range(3):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    # 40 rows of 5 questions; 20 of them show one of 3 pictures, and the other 20 none.
    rows = [
        {"q": f"q{number % 5}", "image": paths[number % 3] if number < 20 else None}
        for number in range(40)
    ]
    prompt = {**PROMPT, "images": images} if images else PROMPT
    made = recipe(kind="inline", rows=[*rows, {"q": "q0"}], prompt=prompt, eval_fraction=0.2)
    report = build(made, count_tokens=None).report
    seen = preview(made.dataset, 1)
    assert (seen.train_rows, seen.eval_rows) == (report.train_rows, report.eval_rows)
    assert report.eval_rows < 9 if images else report.eval_rows in (8, 9)
    assert report.exact_duplicates_between_splits == 0
    assert seen.is_exact


def test_without_a_counter_nothing_is_dropped_for_its_length(recipe) -> None:
    made = recipe(kind="inline", rows=ROWS, prompt=PROMPT, max_prompt_length=1)
    report = build(made, count_tokens=None).report
    assert (report.train_rows, report.prompt_tokens) == (3, None)


def test_an_empty_training_is_refused(recipe) -> None:
    made = recipe(kind="inline", rows=ROWS[1:], prompt=PROMPT, max_prompt_length=1)
    problem = problem_of(made)
    assert problem.path == "dataset.max_prompt_length"
    assert "shortest of 2 prompts has 2 tokens" in problem.seen
    assert "3" in problem.fix


def test_a_pattern_that_drops_every_row_is_refused(recipe) -> None:
    columns = {"a": {"from": "q", "regex": "z", "on_no_match": "drop"}}
    made = recipe(kind="inline", rows=ROWS, prompt=PROMPT, columns=columns)
    assert problem_of(made).path == "dataset.columns"


def test_rows_without_match_are_counted(recipe) -> None:
    columns = {"a": {"from": "q", "regex": "t", "on_no_match": "drop"}}
    built = build(recipe(kind="inline", rows=ROWS, prompt=PROMPT, columns=columns))
    assert built.report.dropped["training"]["no_match"] == 1
    assert built.train["row_id"][:] == [1, 2]


def test_columns_may_make_the_prompt(recipe) -> None:
    made = recipe(kind="inline", rows=ROWS, columns={"prompt": "q"})
    assert build(made).train["prompt"][:] == [row["q"] for row in ROWS]


def test_reserved_columns_may_be_read_but_are_not_passed_on(recipe) -> None:
    rows = [{"q": "a", "completion": "b", "images": None, "row_id": "x7"}]
    columns = {"gold": "completion"}
    built = build(
        recipe(kind="inline", rows=rows, prompt={"user": "{{ q }}{{ row_id }}"}, columns=columns)
    )
    assert built.report.dropped_columns == ("completion", "images", "row_id")
    assert built.train[0] == {
        "prompt": [{"role": "user", "content": "ax7"}],
        "row_id": 0,
        "q": "a",
        "gold": "b",
    }


def test_mixed_kinds_of_prompts_are_refused(recipe) -> None:
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}]
    assert "row 2" in problem_of(recipe(kind="inline", rows=rows)).seen


def test_messages_that_differ_in_their_keys_stay_messages(recipe) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    asked = {"role": "user", "content": "a"}
    prompts = [[asked, call, {"role": "tool", "content": "3", "name": "add"}], [asked]]
    built = build(recipe(kind="inline", rows=[{"prompt": each} for each in prompts]))
    assert [row["prompt"] for row in built.train] == prompts
    assert built.train[:]["prompt"] == prompts


def test_a_failing_row_is_named_by_its_place_in_the_source(recipe) -> None:
    rows = [*ROWS, {"q": " "}]
    made = recipe(kind="inline", rows=ROWS, eval_rows=rows, prompt=PROMPT)
    assert "evaluation row 4" in problem_of(made).seen


def test_a_system_message_needs_a_chat_template(recipe) -> None:
    made = recipe(kind="inline", rows=ROWS, prompt={**PROMPT, "system": "x"})
    assert problem_of(made, has_chat_template=False).path == "dataset.prompt.system"


def test_both_splits_share_their_types(recipe) -> None:
    made = recipe(
        kind="inline",
        rows=[{"q": "a", "n": 1}],
        eval_rows=[{"q": "b", "extra": {"k": 1}}],
        prompt=PROMPT,
    )
    built = build(made)
    assert built.train.features == built.eval.features
    assert built.eval[0]["n"] is None


def test_reasoning_gym_metadata_stays_as_drawn(recipe) -> None:
    pytest.importorskip("reasoning_gym")
    keys = {"kind": "reasoning_gym", "task": "graph_color", "size": 3, "eval_size": 2}
    made = recipe(**keys, prompt={"user": "{{question}}"})
    drawn, held = draw_rows(made.dataset, 1)
    built = build(made)
    for data, rows in ((built.train, drawn), (built.eval, held)):
        assert repr([row["metadata"] for row in data]) == repr([row["metadata"] for row in rows])


def test_the_fingerprint_tells_data_apart(recipe) -> None:
    def fingerprint(rows, **keys):
        return build(recipe(kind="inline", rows=rows, prompt=PROMPT, **keys)).report.fingerprint

    first = fingerprint(ROWS)
    assert len(first) == 64
    assert fingerprint(ROWS) == first
    assert fingerprint(ROWS, seed=9) == first
    assert fingerprint(ROWS[::-1]) != first
    assert fingerprint([{**row, "answer": 1} for row in ROWS]) != first
    assert fingerprint(ROWS[:2], eval_rows=ROWS[2:]) != first
    assert fingerprint([*ROWS, {"q": None}], limit=3) == first
    numbers = [{**row, "answer": 1} for row in ROWS]
    assert fingerprint([*numbers[:2], {**numbers[2], "answer": 1.0}]) != fingerprint(numbers)


def test_rows_of_both_splits_are_found_among_many(recipe) -> None:
    rows = [{"q": f"q{number}"} for number in range(9000)]
    rows[8999] = {"q": "q0"}
    made = recipe(kind="inline", rows=rows[:6000], eval_rows=rows[5998:], prompt=PROMPT)
    assert build(made, count_tokens=None).report.exact_duplicates_between_splits == 3
    divided = recipe(kind="inline", rows=rows, eval_fraction=0.5, prompt=PROMPT)
    report = build(divided, count_tokens=None).report
    assert (report.train_rows + report.eval_rows, report.exact_duplicates_between_splits) == (
        9000,
        0,
    )


def test_the_report_is_json(recipe) -> None:
    report = build(recipe(kind="inline", rows=ROWS, prompt=PROMPT)).report
    plain = json.loads(json.dumps(report.as_json()))
    assert plain["prompt_tokens"] == {"min": 1, "median": 2, "p95": 3, "max": 3}
    assert plain == report.as_json()


VALUES = {
    "a text among numbers": [3, 4, 0, "none"],
    "kinds of numbers": [1, 2.0, True, 2**80, -0.0, 0.1 + 0.2, None],
    "keys that differ": [{"args": {"room": "hall"}}, {"args": {"song": 1}}, {"args": {}}, {}],
    "absent and empty": [{"a": None}, {"b": None, "a": 1}, None, {"a": []}],
    "order of keys": [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    "lists": [["a", 1], [], [[1], [2.5]], [None], [{"x": 1}, {"y": [True]}]],
    "odd texts": ["1", 1, "[1]", '{"a": 1}', "null", ""],
    "numbers that are none": [float("inf"), "inf", float("-inf")],
    "dates": [date(2020, 1, 2), "2020-01-02", {"on": [datetime(2020, 1, 2, 3)]}],
    "other types": [(1, (2,)), {1: "a", (2, 3): "b"}, {"s": {"x"}}, Decimal("1.10"), b"\xff"],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("size", [1, 100])
def test_values_come_back_as_they_were(values, size) -> None:
    # In blocks of one row, a column begins as one type and becomes another.
    firsts = range(0, len(values), size)
    table = join([{"c": as_array("c", values[first : first + size])} for first in firsts])
    expected = repr(values)
    assert repr([row["c"] for row in iterate_rows(table)]) == expected
    data = as_dataset(table)
    assert repr([row["c"] for row in data]) == expected
    assert repr(data[:]["c"]) == expected
    assert repr([row["c"] for row in list_rows(data)]) == expected
    backwards = data.select(range(len(data) - 1, -1, -1))
    assert repr(backwards["c"][:]) == repr(values[::-1])


@pytest.mark.parametrize(
    "values",
    [
        [1, None, 2],
        [1.5, None],
        ["a", "b"],
        [True, False],
        [{"a": 1}, {"a": 2}, None],
        [["a"], ["b", "c"], []],
        [date(2020, 1, 2), None],
    ],
)
def test_what_arrow_holds_exactly_stays_plain(values) -> None:
    data = as_dataset(as_table({"c": value} for value in values))
    assert not isinstance(data.features["c"], ExactValue)
    assert [row["c"] for row in data] == values


def test_a_reward_changes_its_own_copy(recipe) -> None:
    rows = [{"q": "a", "spec": {"x": [1]}}, {"q": "b", "spec": {"y": 2}}]
    train = build(recipe(kind="inline", rows=rows, prompt=PROMPT)).train
    train[0]["spec"]["x"].append(2)
    assert [row["spec"] for row in train] == [row["spec"] for row in rows]


def test_half_a_character_is_refused(recipe) -> None:
    for value in ("\ud800", [1, {"a": "\ud800"}]):
        rows = [{"q": "a", "c": 1}, {"q": "b", "c": value}]
        assert "the column `c`" in problem_of(recipe(kind="inline", rows=rows, prompt=PROMPT)).seen


def test_rows_are_divided_over_blocks() -> None:
    table = join([as_table([{"n": first}, {"n": first + 1}]) for first in range(0, 8, 2)])
    kept = select_rows(table, [1, 3, 4, 5], without=True)
    assert [row["n"] for row in iterate_rows(kept)] == [0, 2, 6, 7]
    assert [row["n"] for row in iterate_rows(select_rows(table, [7, 0]))] == [0, 7]


def test_gsm8k_is_built_whole(recipe, gsm8k) -> None:
    made = recipe(
        kind="files",
        train=str(gsm8k / "train.jsonl"),
        eval=str(gsm8k / "test.jsonl"),
        prompt={"user": "{{ question }}"},
        columns={"answer": {"from": "answer", "regex": r"####\s*(.+)$"}},
    )
    built = build(made)
    assert (len(built.train), len(built.eval)) == (7473, 400)
    assert built.train[0]["answer"] == "72"
    assert built.report.exact_duplicates_between_splits == 0


def test_sources_become_one_dataset_in_the_order_of_their_ratio(recipe) -> None:
    sums = {"name": "sums", "kind": "inline", "ratio": 3, "columns": {"gold": "a"}}
    rows = [{"q": f"{number} + 1", "a": number + 1} for number in range(6)]
    words = [{"q": "spell", "answer": "x"}, {"q": "spell it", "answer": "y"}]
    made = recipe(
        prompt={"user": "{{ source }}: {{ q }}"},
        eval_fraction=0.5,
        sources=[
            {**sums, "rows": rows[:4], "eval_rows": rows[4:]},
            {"name": "words", "kind": "inline", "rows": [*words, *words], "prompt": PROMPT},
        ],
    )
    built = build(made)
    assert built.report.sources == {
        "sums": {"train_rows": 4, "eval_rows": 2, "ratio": 3.0},
        "words": {"train_rows": 2, "eval_rows": 2, "ratio": 1.0},
    }

    assert sorted(built.train["source"][:]) == ["sums"] * 5 + ["words"] * 2
    first = built.train[built.train["source"][:].index("sums")]
    text = first["prompt"][-1]["content"]
    assert (text[:6], first["gold"], first["answer"]) == ("sums: ", first["a"], None)
    # Numbers of rows are different; those of held-out rows of the first source, too.
    assert len({(row["row_id"], row["source"]) for row in built.train}) == 6
    assert built.eval["source"][:] == ["sums", "words", "sums", "words"]
    again = build(recipe(**made.model_dump(by_alias=True)["dataset"]))
    assert again.train["row_id"][:] == built.train["row_id"][:]
    assert again.report == built.report


def test_sources_of_two_styles_of_prompt_are_refused(recipe) -> None:
    rows = {"kind": "inline", "rows": ROWS, "prompt": PROMPT}
    text = {**rows, "name": "text", "prompt": {**PROMPT, "style": "text"}}
    problem = problem_of(recipe(sources=[{**rows, "name": "chat"}, text]))
    assert problem.seen.startswith("source `text` has a prompt of another kind than source `chat`")
