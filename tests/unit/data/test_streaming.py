"""Streamed rows are those of data that is read whole, pass after pass."""

import json
from itertools import islice, pairwise

import pytest

pytest.importorskip("datasets")

from grpo_cli.data.build import build_datasets
from grpo_cli.data.preview import preview
from grpo_cli.data.streaming import shuffle, stream_rows
from grpo_cli.errors import RecipeError
from grpo_cli.recipe.dataset import FIRST_ROWS

PROMPT = {"system": "Hi", "user": "{{ question }}"}
COLUMNS = {"gold": {"from": "answer", "regex": r"#(\d+)", "on_no_match": "drop"}}


def write(path, rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Two files; the fifth row of each matches no pattern, the sixth is long, and columns are of many types."""

    def row(number: int) -> dict:
        text = "no" if number % 10 == 4 else f"#{number}"
        length = 9 if number % 10 == 5 else 2
        own = {"odd": number} if number % 2 else {}
        mixed = [number, str(number), {"a": number}, None][number % 4]
        return {"question": " ".join(["w"] * length), "answer": text, "mixed": mixed, **own}

    halves = range(10), range(10, 20)
    return [write(tmp_path / f"{half[0]}.jsonl", map(row, half)) for half in halves]


def build(made):
    options = {"has_chat_template": True, "count_tokens": lambda p: len(p[-1]["content"].split())}
    data = build_datasets(made, **options)
    return data, stream_rows(made, data, **options) if made.dataset.streams else None


def test_every_pass_has_the_rows_of_data_that_is_read_whole(recipe, files, tmp_path) -> None:
    held = write(tmp_path / "held.jsonl", [{"question": "held out", "answer": "#1"}])
    keys = {"kind": "files", "train": files, "eval": held, "prompt": PROMPT, "columns": COLUMNS}
    keys |= {"max_prompt_length": 5, "limit": 18}
    whole, _ = build(recipe(**keys))
    data, stream = build(recipe(**keys, streaming={"buffer_size": 5}))
    assert list(data.train) == list(whole.train)
    assert list(data.eval) == list(whole.eval)
    assert (whole.report.train_rows, data.report.train_rows) == (14, None)
    passes = list(islice(stream, 42))
    assert passes == list(islice(stream, 42))
    passes = [passes[first : first + 14] for first in (0, 14, 28)]
    assert len({tuple(row["row_id"] for row in each) for each in passes}) == 3
    for each in passes:
        assert sorted(each, key=lambda row: row["row_id"]) == list(whole.train)


def test_a_shuffled_row_comes_at_most_a_buffer_early() -> None:
    order = list(shuffle(range(1000), 50, "seed"))
    assert sorted(order) == list(range(1000))
    assert all(item < place + 50 for place, item in enumerate(order))
    assert order != list(shuffle(range(1000), 50, "other"))
    assert sum(first > second for first, second in pairwise(order)) > 300


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ('{"question": "x"', f"late.jsonl: line {FIRST_ROWS + 7} is not JSON"),
        ('{"question": " "}', f"row {FIRST_ROWS + 7} of late.jsonl has an empty prompt"),
        (r'{"question": "\ud800"}', f"row {FIRST_ROWS + 7} of late.jsonl holds half a character"),
    ],
)
def test_a_late_mistake_is_named_when_it_is_read(recipe, tmp_path, late, message) -> None:
    lines = [json.dumps({"question": "q"})] * (FIRST_ROWS + 6)
    (tmp_path / "late.jsonl").write_text("\n".join([*lines, late]))
    train = str(tmp_path / "late.jsonl")
    made = recipe(kind="files", train=train, streaming=True, prompt=PROMPT)
    seen = preview(made.dataset, 1)
    assert (seen.problems, seen.train_rows, len(seen.train.rows)) == ((), None, FIRST_ROWS)
    data, stream = build(made)
    assert len(data.train) == FIRST_ROWS
    with pytest.raises(RecipeError) as error:
        list(islice(stream, FIRST_ROWS + 7))
    assert message in error.value.problems[0].seen


def test_later_columns_are_left_out_and_missing_ones_are_empty(recipe, tmp_path) -> None:
    rows = [{"question": "q", "answer": "1"}] * FIRST_ROWS + [{"question": "last", "more": 1}]
    made = recipe(
        kind="files",
        train=write(tmp_path / "rows.jsonl", rows),
        streaming={"buffer_size": 1},
        prompt=PROMPT,
    )
    *_, last = islice(build(made)[1], FIRST_ROWS + 1)
    assert last.keys() == {"prompt", "row_id", "question", "answer"}
    assert (last["question"], last["answer"]) == ("last", None)


def test_a_changed_file_has_another_fingerprint(recipe, tmp_path) -> None:
    rows = [{"question": "q"}] * (FIRST_ROWS + 1)
    made = recipe(
        kind="files", train=write(tmp_path / "rows.jsonl", rows), streaming=True, prompt=PROMPT
    )
    before = build(made)[0].report.fingerprint
    assert build(made)[0].report.fingerprint == before
    write(tmp_path / "rows.jsonl", [*rows, {"question": "q"}])
    assert build(made)[0].report.fingerprint != before


def test_hub_datasets_are_streamed_with_their_held_out_rows(recipe, tmp_path, monkeypatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    folder.mkdir()
    for split, count in (("train", 30), ("test", 4)):
        write(folder / f"{split}.jsonl", [{"question": f"{split} {n}"} for n in range(count)])
    keys = {"kind": "hub", "path": str(folder), "eval_split": "test", "prompt": PROMPT}
    whole, _ = build(recipe(**keys))
    data, stream = build(recipe(**keys, streaming=True))
    assert list(data.eval) == list(whole.eval)
    rows = sorted(islice(stream, 30), key=lambda row: row["row_id"])
    assert rows == whole.train.to_list()


def test_json_is_read_whole_and_so_not_streamed(section, tmp_path) -> None:
    path = write(tmp_path / "rows.json", [{"question": "q"}])
    (problem,) = preview(section(kind="files", train=path, streaming=True), 1).problems
    assert "cannot be streamed" in problem.seen
