import gzip
import json
from pathlib import Path

import pytest

from grpo_cli.data.files import PREVIEW_ROWS, find_files, iterate_rows, preview_file
from grpo_cli.errors import RecipeError

ROWS = [{"question": "1 + 1", "answer": "2"}, {"question": "2 + 2\nplease", "answer": "4"}]


def read(path: Path) -> list[dict]:
    (file,) = find_files([str(path)], "dataset.train")
    return list(iterate_rows(file))


def fail(path: Path) -> str:
    with pytest.raises(RecipeError) as error:
        read(path)
    (problem,) = error.value.problems
    assert problem.path == "dataset.train"
    assert problem.fix
    return problem.seen


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


JSONL = "\n".join(json.dumps(row) for row in ROWS)
CSV = 'question,answer\r\n1 + 1,2\r\n"2 + 2\nplease",4\r\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps({"data": ROWS})),
        ("a.json", JSONL),
        ("a.jsonl", JSONL + "\n\n  \n"),
        ("a.v2.ndjson", JSONL),
        ("a.CSV", CSV),
        ("a.csv", "\ufeff" + CSV),
    ],
)
def test_every_text_format_gives_the_same_rows(tmp_path: Path, name: str, text: str) -> None:
    assert read(write(tmp_path / name, text)) == ROWS


def test_lines_are_counted_over_blocks(tmp_path: Path) -> None:
    row = json.dumps({"q": "x" * 2000})
    path = write(tmp_path / "a.jsonl", f"{row}\n\n" * 900)
    assert len(read(path)) == 900
    assert "line 1801 is not JSON" in fail(write(path, f"{row}\n\n" * 900 + '{"q":'))
    # Together, these lines would be rows.
    assert "line 1 is not JSON" in fail(write(path, '{"q": [1\n2]}\n'))


def test_packed_text_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(JSONL.encode()))
    assert read(path) == ROWS
    (file,) = find_files([str(path)], "dataset.train")
    assert preview_file(file)[1] == 2


def test_parquet_keeps_types(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"question": "a", "n": 1, "tags": ["x"]}] * 3000
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows
    (file,) = find_files([str(tmp_path / "a.parquet")], "dataset.train")
    first, count, columns = preview_file(file)
    assert (count, len(first), columns) == (3000, PREVIEW_ROWS, {"question", "n", "tags"})


def test_csv_values_stay_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.csv", "q,n\na,007\n")) == [{"q": "a", "n": "007"}]


def test_malformed_jsonl_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"q": 1}\n\n{"q": 2\n')
    message = fail(path)
    assert f"{path}: line 3 is not JSON" in message
    assert '{"q": 2' in message


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"q": 1}\n[1, 2]\n', "line 2 is not an object but [1, 2]"),
        ("a.json", '[{"q": 1}, "x"]', "row 2 is not an object but 'x'"),
        ("a.json", '{"q": 1}', "holds {'q': 1}"),
        ("a.json", '[{"q": 1},\n ]', "is not JSON: "),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.json", " ", "has no rows"),
        ("a.csv", "q,a\n", "has no rows"),
        ("a.csv", "q,a\n1,2\n1,2,3\n", "line 3 has more cells than the header's 2"),
        ("a.csv", "q;a\n1;2\n", "the columns are separated by `;`, not commas"),
        ("a.csv", "q\ta\n1\t2\n", "the columns are separated by tabs, not commas"),
        ("a.csv", "q,q\n1,2\n", "the header names `q` twice"),
        ("a.csv", 'q,a\n1,"2\n3,4\n', "is not CSV: unexpected end of data"),
        ("a.parquet", "no", "is not parquet"),
        ("a.jsonl.gz", '{"q": 1}', "cannot be read: Not a gzipped file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    assert expected in fail(write(tmp_path / name, text))


def test_other_encodings_are_refused_not_garbled(tmp_path: Path) -> None:
    assert "is not UTF-8" in fail(write(tmp_path / "a.csv", "q\né\n", "latin-1"))


def test_a_misspelt_file_is_suggested(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", JSONL)
    with pytest.raises(RecipeError) as error:
        read(tmp_path / "trian.jsonl")
    assert error.value.problems[0].fix == "write `train.jsonl`"


def test_every_bad_path_of_a_list_is_reported(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", JSONL)
    paths = [str(path) for path in (tmp_path / "b.jsonl", good, tmp_path, __file__)]
    with pytest.raises(RecipeError) as error:
        find_files(paths, "dataset.eval")
    fields = [problem.path for problem in error.value.problems]
    assert fields == ["dataset.eval.0", "dataset.eval.2", "dataset.eval.3"]


def test_a_preview_reads_only_the_first_rows_of_jsonl(tmp_path: Path) -> None:
    text = '{"a": 1}\n' * PREVIEW_ROWS + 'not json\n  \n{"c": 3}'
    (file,) = find_files([str(write(tmp_path / "a.jsonl", text))], "dataset.train")
    first, count, columns = preview_file(file)
    assert (len(first), count, columns) == (PREVIEW_ROWS, PREVIEW_ROWS + 2, {"a"})


def test_a_preview_counts_csv_records_not_lines(tmp_path: Path) -> None:
    (file,) = find_files([str(write(tmp_path / "a.csv", CSV))], "dataset.train")
    assert preview_file(file)[1] == 2
