"""What of an evaluation's samples counts, however they were written."""

import pytest

from grpo_cli.analysis.samples import ScoredCompletion, as_scored
from grpo_cli.errors import UsageError
from grpo_cli.eval.folder import Chunk, EvalFolder


def make_folder(path):
    folder = EvalFolder(path)
    folder.samples.mkdir()
    return folder


def completion(row, text):
    return ScoredCompletion(
        row, row, f"question\u2028{row}", text, 3, False, {"m": 1.0}, {}, [], {}, 1.0
    )


def test_texts_with_every_kind_of_line_end_are_read_back(tmp_path):
    folder = make_folder(tmp_path)
    texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\r\nb", "a\x0bb\x0c", "\x1c\x1d\x1e", "\ud800"]
    given = [completion(row, text) for row, text in enumerate(texts)]
    folder.append("final", 0, Chunk(0, tuple(range(7)), 1), 0.5, given)
    (records,) = folder.read_chunks("final").values()
    assert [as_scored(record) for record in records] == given


def test_a_torn_chunk_is_left_out_and_taken_away(tmp_path):
    folder = make_folder(tmp_path)
    for number in (0, 1):
        rows = [completion(2 * number, "x"), completion(2 * number + 1, "y")]
        folder.append("final", 0, Chunk(number, (0, 1), 1), 0.5, rows)
    path = tmp_path / "samples" / "final.0.jsonl"
    path.write_text(path.read_text()[:-40])
    assert list(folder.read_chunks("final")) == [0]
    folder.drop_torn_chunks()
    assert len(path.read_text().splitlines()) > 0
    assert list(folder.read_chunks("final")) == [0]
    assert '"chunk": 1' not in path.read_text()


@pytest.mark.parametrize("tail", [b'{"text": "\xc3', b"\xff\xfe"])
def test_what_is_no_record_is_passed_over(tmp_path, tail):
    files = make_folder(tmp_path)
    files.append("final", 0, Chunk(0, (0,), 1), 0.5, [completion(0, "x")])
    path = tmp_path / "samples" / "final.0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert list(files.read_chunks("final")) == [0]
    files.drop_torn_chunks()
    assert path.read_bytes() == whole


def test_one_command_at_a_time_measures_into_a_folder(tmp_path):
    folder = EvalFolder(tmp_path)
    with folder.lock(), pytest.raises(UsageError, match="another command"), folder.lock():
        pass
    with folder.lock():
        pass


def test_samples_without_their_data_are_not_taken_up(tmp_path):
    folder = EvalFolder(tmp_path)
    folder.samples.mkdir()
    folder.check_data({"rows": 1})
    folder.append("final", 0, Chunk(0, (0,), 1), 0.5, [completion(0, "x")])
    with pytest.raises(UsageError, match=r"data.json is missing"):
        folder.check_data({"rows": 1})
    folder.data.write_text('{"rows": 1}')
    folder.check_data({"rows": 1})
    with pytest.raises(UsageError, match="the data changed"):
        folder.check_data({"rows": 2})
