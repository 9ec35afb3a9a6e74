"""Held-out answers as `eval/*.jsonl` holds them, whole and damaged."""

import json

from grpo_cli.analysis.diagnosis.answers import read_answers


def line(row, text, total, **rewards):
    prompt = [{"role": "user", "content": f"prompt {row}"}]
    told = {"row": row, "prompt": prompt, "text": text, "rewards": rewards, "total": total}
    return json.dumps(told, ensure_ascii=False)


def test_answers_are_counted_by_text_and_scored_by_row(tmp_path):
    path = tmp_path / "after.jsonl"
    lines = [
        line(0, "yes\u2028", 1.0, right=1.0, form=None),
        line(0, " yes", 0.0, right=0.0, form=None),
        line(1, "no", 0.5, right=0.25, form=0.25),
        '{"row": 2, "text": "torn", "rew',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = read_answers(path)
    assert (found.prompts, found.commonest, found.share) == (2, "yes", 2 / 3)
    assert found.scores == {"right": {0: 0.5, 1: 0.25}, "form": {1: 0.25}}
    assert found.totals == {0: 0.5, 1: 0.5}


def test_what_cannot_be_read_gives_none(tmp_path):
    path = tmp_path / "after.jsonl"
    assert read_answers(path) is None
    path.write_bytes(
        b'\xff\n[1]\n{"row": 1, "text": 3, "rewards": {}}\n{"text": "", "rewards": []}\n'
    )
    assert read_answers(path) is None
    assert read_answers(tmp_path) is None
