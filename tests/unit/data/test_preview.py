import json
import subprocess
import sys

import pytest

from grpo_cli.data.preview import preview
from grpo_cli.data.sources import has_eval, hold_out, read_rows

ROWS = [{"question": str(number), "answer": number} for number in range(37)]


@pytest.fixture
def rows_file(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return str(path)


LIMITS = [
    {},
    {"limit": 5},
    {"limit": 500},
    {"eval_fraction": 0.1},
    {"eval_fraction": 0.001},
    {"eval_fraction": 0.999},
    {"eval_fraction": 0.3, "limit": 4, "eval_limit": 3},
    {"eval_fraction": 0.3, "limit": 400, "eval_limit": 300},
]


@pytest.mark.parametrize("limits", LIMITS)
def test_counts_are_those_read_rows_gives(section, rows_file, limits) -> None:
    sources = [
        {"kind": "files", "train": [rows_file, rows_file]},
        {"kind": "inline", "rows": ROWS},
        {"kind": "reasoning_gym", "task": "chain_sum", "size": 30},
    ]
    if "eval_fraction" not in limits:
        sources += [
            {"kind": "files", "train": rows_file, "eval": rows_file, "eval_limit": 7},
            {"kind": "inline", "rows": ROWS, "eval_rows": ROWS[:9], "eval_limit": 20},
            {"kind": "reasoning_gym", "task": "chain_sum", "size": 30, "eval_size": 6},
        ]
    for source in sources:
        dataset = section(**{**source, **limits})
        seen, read = preview(dataset, 3), read_rows(dataset, 3)
        train, held = read.train, read.eval
        if dataset.eval_fraction:
            prompts = [str(place) for place in range(len(train))]
            chosen = hold_out(prompts, dataset.eval_fraction, 1)
            held = [train[place] for place in chosen][: dataset.eval_limit]
            train = train[: len(train) - len(chosen)][: dataset.limit]
        assert seen.train_rows == len(train)
        assert seen.eval_rows == (None if held is None else len(held))
        assert has_eval(dataset) is (held is not None)
        assert seen.columns == read.train[0].keys()


def test_many_rows_are_counted_as_a_prompt_each(section, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "same"}\n{"question": "other"}\n' * 1000)
    source = {"kind": "files", "train": str(path), "prompt": {"user": "{{ question }}"}}
    seen = preview(section(**source, eval_fraction=0.1), 0)
    assert (seen.train_rows, seen.eval_rows, seen.is_exact) == (1800, 200, False)
    assert preview(section(**source), 0).is_exact


def test_the_sample_is_the_first_rows(section, rows_file) -> None:
    dataset = section(kind="files", train=rows_file)
    assert preview(dataset, 0).sample == tuple(ROWS[:20])
    assert preview(section(kind="inline", rows=ROWS), 0).sample == tuple(ROWS[:20])


def test_the_hub_is_not_asked(section) -> None:
    dataset = section(kind="hub", path="a/b", eval_split="test")
    seen = preview(dataset, 0)
    assert (seen.columns, seen.train_rows, seen.eval_rows, seen.sample) == (None, None, None, ())
    assert "a/b" in seen.note
    assert has_eval(dataset)


@pytest.mark.parametrize("text", ["", "\n", "{", "[1]"])
def test_unusable_files_are_found_before_training(section, tmp_path, text) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert preview(section(kind="files", train=str(path)), 0).problems


def test_a_missing_eval_file_is_found(section, rows_file) -> None:
    lost = rows_file.replace("rows.", "row.")
    (problem,) = preview(section(kind="files", train=rows_file, eval=lost), 0).problems
    assert (problem.path, problem.fix) == ("dataset.eval", "write `rows.jsonl`")


HEAVY = {"torch", "transformers", "datasets", "pyarrow", "jinja2", "reasoning_gym", "pandas"}


def test_importing_the_room_and_peeking_load_nothing_heavy(rows_file) -> None:
    code = f"""
import sys
from pydantic import TypeAdapter
from grpo_cli.data import files, prompts, rows, sources, tasks
from grpo_cli.data import rows
from grpo_cli.data.preview import preview
from grpo_cli.recipe.dataset import DatasetConfig
adapter = TypeAdapter(DatasetConfig)
preview(adapter.validate_python({{"kind": "files", "train": {rows_file!r}}}), 0)
if tasks.find_tasks():
    preview(adapter.validate_python({{"kind": "reasoning_gym", "task": "chain_sum"}}), 0)
print(*({HEAVY!r} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
