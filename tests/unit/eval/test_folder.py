"""What of an evaluation's samples counts, however they were written."""

from grpo_cli.eval.folder import EvalFolder, as_scored
from grpo_cli.measure.chunks import Chunk
from grpo_cli.measure.samples import ScoredCompletion


def completion(row, text):
    return ScoredCompletion(
        row, row, f"question\u2028{row}", text, 3, False, {"m": 1.0}, {}, {}, 1.0
    )


def test_texts_with_every_kind_of_line_end_are_read_back(tmp_path):
    folder = EvalFolder(tmp_path)
    (tmp_path / "samples").mkdir()
    texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\r\nb", "a\x0bb\x0c", "\x1c\x1d\x1e"]
    given = [completion(row, text) for row, text in enumerate(texts)]
    folder.append("final", 0, Chunk(0, tuple(range(6)), 1), 0.5, given)
    (records,) = folder.read_samples("final").values()
    assert [as_scored(record) for record in records] == given


def test_a_torn_chunk_is_left_out_and_taken_away(tmp_path):
    folder = EvalFolder(tmp_path)
    (tmp_path / "samples").mkdir()
    for number in (0, 1):
        rows = [completion(2 * number, "x"), completion(2 * number + 1, "y")]
        folder.append("final", 0, Chunk(number, (0, 1), 1), 0.5, rows)
    path = folder.samples("final", 0)
    path.write_text(path.read_text()[:-40])
    assert list(folder.read_samples("final")) == [0]
    folder.forget_torn()
    assert len(path.read_text().splitlines()) > 0
    assert list(folder.read_samples("final")) == [0]
    assert '"chunk": 1' not in path.read_text()
