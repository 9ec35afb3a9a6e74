import json
from types import SimpleNamespace

import pytest

from grpo_cli.data.rows import RESERVED, RowNames, keep_rows
from grpo_cli.errors import RecipeError
from grpo_cli.recipe.dataset import ColumnConfig

ROWS = [{"q": "a", "solution": "long #### 1"}, {"q": "b", "solution": "longer #### 2 "}]


def apply_columns(rows, columns, split="training"):
    """The rows that were kept, and how many were not."""
    dataset = SimpleNamespace(columns=columns, source_name=None)
    kept = [row for _, row in keep_rows(dataset, rows, RowNames(split))]
    return kept, len(rows) - len(kept)


def column(source: str, **keys) -> ColumnConfig:
    return ColumnConfig.model_validate({"from": source, **keys})


def problems_of(rows, columns, split="training"):
    with pytest.raises(RecipeError) as error:
        apply_columns(rows, columns, split)
    return error.value.problems


def test_a_renamed_column_keeps_its_source() -> None:
    rows, dropped = apply_columns(ROWS, {"answer": column("solution")})
    assert dropped == 0
    assert rows == [{**row, "answer": row["solution"]} for row in ROWS]
    assert "answer" not in ROWS[0]


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        (r"####\s*(.+)$", ["1", "2"]),
        (r"#### \d", ["#### 1", "#### 2"]),
        (r"(x)?#### (\d)", None),
    ],
)
def test_a_pattern_keeps_its_first_group_or_the_match(regex, expected) -> None:
    columns = {"answer": column("solution", regex=regex)}
    if expected is None:  # the first group took no part
        assert problems_of(ROWS, columns)
        return
    rows, _ = apply_columns(ROWS, columns)
    assert [row["answer"] for row in rows] == expected


def test_a_column_may_replace_its_source() -> None:
    rows, _ = apply_columns(ROWS, {"solution": column("solution", regex=r"\d")})
    assert [row["solution"] for row in rows] == ["1", "2"]


def test_every_column_reads_the_source_as_it_was() -> None:
    columns = {"solution": column("solution", regex=r"\d"), "whole": column("solution")}
    rows, _ = apply_columns(ROWS, columns)
    assert rows[0]["whole"] == "long #### 1"


def test_numbers_are_searched_as_text() -> None:
    rows, _ = apply_columns([{"n": 42}], {"answer": column("n", regex=r"\d$")})
    assert rows[0]["answer"] == "2"


def test_a_key_of_a_mapping_is_read_unless_a_column_has_its_name() -> None:
    rows = [{"a": {"b": {"c": "#### 1"}}}, {"a": {"b": None}, "a.b.c": "#### 2"}]
    kept, _ = apply_columns(rows, {"answer": column("a.b.c", regex=r"#### (\d)")})
    assert [row["answer"] for row in kept] == ["1", "2"]


def test_a_pattern_that_finds_nothing_names_row_and_text() -> None:
    rows = [*ROWS, {"q": "c", "solution": "none"}, {"q": "d", "solution": None}]
    columns = {"answer": column("solution", regex=r"####\s*(.+)$")}
    (problem,) = problems_of(rows, columns, "evaluation")
    assert problem.path == "dataset.columns.answer.regex"
    assert "2 of 4 evaluation rows; the first is evaluation row 3: 'none'" in problem.seen
    assert "on_no_match: drop" in problem.fix
    (problem,) = problems_of(rows[2:], columns, "evaluation")
    assert problem.fix == "correct the pattern"


def test_nothing_but_white_space_counts_as_nothing() -> None:
    assert problems_of([{"s": "####   "}], {"answer": column("s", regex="####(.*)")})


def test_rows_without_match_are_dropped_where_asked() -> None:
    rows = [ROWS[0], {"q": "c", "solution": "none"}]
    drop = column("solution", regex=r"####\s*(.+)$", on_no_match="drop")
    kept, dropped = apply_columns(rows, {"answer": drop})
    assert (len(kept), dropped) == (1, 1)
    # a row that is dropped anyway is not an error for another column
    strict = column("solution", regex=r"#### (\d)")
    assert apply_columns(rows, {"strict": strict, "answer": drop})[1] == 1


def test_a_missing_source_lists_columns_and_suggests() -> None:
    (problem,) = problems_of(ROWS, {"answer": column("soluton")})
    assert problem.path == "dataset.columns.answer.from"
    assert "`q`, `solution`" in problem.seen
    assert problem.fix == "write `solution`"


def test_all_problems_are_reported_at_once() -> None:
    columns = {
        "a": column("nowhere"),
        "b": column("q", regex="("),
        "completions": column("q"),
    }
    paths = {problem.path for problem in problems_of(ROWS, columns)}
    assert paths == {
        "dataset.columns.a.from",
        "dataset.columns.b.regex",
        "dataset.columns.completions",
    }


def test_trl_passes_the_reserved_names_itself() -> None:
    import ast
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    source = Path(spec.submodule_search_locations[0], "trainer/grpo_trainer.py").read_text()
    method = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_calculate_rewards"
    )
    given = {
        target.slice.value
        for node in ast.walk(method)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript)
        and getattr(target.value, "id", "") == "reward_kwargs"
        and isinstance(target.slice, ast.Constant)
    }
    assert given
    assert given <= RESERVED


def test_every_gold_answer_of_gsm8k_is_extracted(gsm8k) -> None:
    rows = [json.loads(line) for line in (gsm8k / "train.jsonl").open()]
    columns = {"answer": column("answer", regex=r"####\s*(.+)$")}
    made, dropped = apply_columns(rows, columns)
    assert (len(made), dropped) == (7473, 0)
    golds = [row["answer"].replace(",", "") for row in made]
    assert all(gold.lstrip("-").replace(".", "").isdigit() for gold in golds)
