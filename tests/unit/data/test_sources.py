import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_cli.data.rows import keep_rows
from grpo_cli.data.sources import held_out_count, hold_out, read_rows
from grpo_cli.errors import RecipeError, SetupError


def problem_of(dataset):
    with pytest.raises(RecipeError) as error:
        read_rows(dataset, 0)
    return error.value.problems[0]


def numbered(count: int) -> list[dict]:
    return [{"n": number} for number in range(count)]


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_files_are_read_in_order_and_limited(tmp_path, section) -> None:
    paths = [
        write_rows(tmp_path / "a.jsonl", numbered(3)),
        write_rows(tmp_path / "b.jsonl", numbered(3)),
    ]
    held = write_rows(tmp_path / "c.jsonl", numbered(9))
    rows = read_rows(section(kind="files", train=paths, eval=held, limit=4, eval_limit=2), 0)
    assert [row["n"] for row in rows.train] == [0, 1, 2, 0]
    assert rows.eval == numbered(2)


def test_missing_values_become_none(section) -> None:
    rows = read_rows(section(kind="inline", rows=[{"a": 1}, {"b": 2}]), 0)
    assert rows.train == [{"a": 1, "b": None}, {"a": None, "b": 2}]
    assert rows.eval is None


def test_a_fraction_divides_the_rows_by_the_seed_of_evaluation() -> None:
    prompts = [str(n) for n in range(100)]
    held = hold_out(prompts, 0.1, 3)
    assert len(held) == 10
    assert hold_out(prompts, 0.1, 3) == held
    assert hold_out(prompts, 0.1, 4) != held


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2), st.floats(0.01, 0.99), st.integers(0))
def test_rows_that_ask_the_same_are_never_divided(prompts, fraction, seed) -> None:
    assume(len(set(prompts)) > 1)
    held = hold_out(prompts, fraction, seed)
    asked = {prompts[place] for place in held}
    rest = {prompt for place, prompt in enumerate(prompts) if place not in held}
    assert asked
    assert rest
    assert not asked & rest


@given(st.integers(2, 5000), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_both_sides_of_a_fraction_have_rows(rows: int, fraction: float) -> None:
    held = held_out_count(rows, fraction)
    assert 1 <= held <= rows - 1
    assert abs(held - rows * fraction) <= 1


def test_one_row_cannot_be_divided() -> None:
    with pytest.raises(RecipeError) as error:
        hold_out(["?"], 0.5, 0)
    assert error.value.problems[0].path == "dataset.eval_fraction"


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"rows": [], "eval_rows": None}, "dataset.rows"),
        ({"rows": [{"a": 1}], "eval_rows": []}, "dataset.eval_rows"),
        (
            {"rows": [{"a": 1}], "eval_rows": [{"a": 1}], "eval_fraction": 0.5},
            "dataset.eval_fraction",
        ),
        ({"rows": [{"a": 1}], "eval_limit": 3}, "dataset.eval_limit"),
    ],
)
def test_contradictions_are_refused(section, keys, path) -> None:
    assert problem_of(section(kind="inline", **keys)).path == path


def test_reasoning_gym_keeps_metadata_as_a_dict(section) -> None:
    pytest.importorskip("reasoning_gym")
    dataset = section(kind="reasoning_gym", task="chain_sum", size=9, eval_size=5, eval_limit=2)
    rows = read_rows(dataset, 0)
    assert (len(rows.train), len(rows.eval)) == (9, 2)
    assert rows.train[0].keys() == {"question", "answer", "metadata"}
    assert isinstance(rows.train[0]["metadata"], dict)


@pytest.fixture
def repository(tmp_path, monkeypatch) -> str:
    """A folder that `datasets` loads as it would a hub repository."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    folder.mkdir()
    write_rows(folder / "train.jsonl", numbered(5))
    write_rows(folder / "test.jsonl", numbered(4))
    return str(folder)


def test_hub_splits_are_read_and_limited(section, repository) -> None:
    keys = {"kind": "hub", "path": repository, "limit": 3}
    rows = read_rows(section(**keys, eval_split="test", eval_limit=2), 0)
    assert (rows.train, rows.eval) == (numbered(3), numbered(2))


@pytest.mark.parametrize(
    ("keys", "path", "expected"),
    [
        ({"split": "trian"}, "dataset.split", "Unknown split"),
        ({"eval_split": "val"}, "dataset.eval_split", "['train', 'test']"),
        ({"name": "main"}, "dataset.name", "BuilderConfig 'main' not found"),
    ],
)
def test_a_wrong_split_or_subset_is_named(section, repository, keys, path, expected) -> None:
    problem = problem_of(section(kind="hub", path=repository, **keys))
    assert problem.path == path
    assert expected in problem.seen


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"), "kind: files"),
        ("DatasetNotFoundError", "hf auth login"),
        ("DatasetGenerationError", "dataset.revision"),
    ],
)
def test_an_unreachable_hub_is_an_error_of_the_machine(
    section, monkeypatch, error, expected
) -> None:
    datasets = pytest.importorskip("datasets")
    if isinstance(error, str):
        error = getattr(datasets.exceptions, error)("said why")

    def refuse(*args, **keys):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(SetupError, match=r"a/b cannot be loaded") as caught:
        read_rows(section(kind="hub", path="a/b"), 0)
    assert expected in str(caught.value)


def test_a_bug_keeps_its_traceback(section, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(*args, **keys):
        raise ValueError("something else")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match="something else"):
        read_rows(section(kind="hub", path="a/b"), 0)


def test_messages_count_rows_from_1_and_name_their_file(section, tmp_path) -> None:
    for name, answers in (("a.jsonl", ["1", "2"]), ("b.jsonl", ["3", "no digit"])):
        rows = [{"question": "q", "answer": answer} for answer in answers]
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    dataset = section(kind="files", train=paths, columns={"n": {"from": "answer", "regex": r"\d"}})
    source = read_rows(dataset, 0)
    assert source.train_names(0) == "row 1 of a.jsonl"
    with pytest.raises(RecipeError, match=r"the first is row 2 of b\.jsonl: 'no digit'"):
        list(keep_rows(dataset, source.train, source.train_names))
    assert read_rows(section(kind="inline", rows=[{"a": 1}]), 0).train_names(0) == "training row 1"
