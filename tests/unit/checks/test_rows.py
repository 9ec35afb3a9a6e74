"""Rows that are not what the recipe takes them for."""

import json

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.data.build import build_datasets
from grpo_cli.data.rows import say_dropped
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.kinds.exact import ExactParams
from tests.recipe_texts import GOOD, write_recipe

CHAT = '{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": 1}\n'
GOOD_ROW = '{"question": "q", "answer": "#### 1"}\n'
USER = 'prompt: {user: "{{ question }}"}'
REGEX = "columns: {answer: {from: answer, regex: '%s', on_no_match: drop}}"
CASES = [
    ({"a.jsonl": CHAT}, "prompt: {system: s}", "prompt.system", "no effect on 1 of the first 1"),
    ({"a.jsonl": r'{"prompt": "[{\"role\": \"user\"}]", "answer": 1}'}, "limit: 1", "prompt",
     "messages written as text"),
    ({"a.jsonl": GOOD_ROW + GOOD_ROW.replace("####", "") * 2}, f"{USER}\n  {REGEX % '####(.+)'}",
     "columns.answer.regex", "dropped 2 of 3 training rows (in which a pattern"),
    ({"a.jsonl": GOOD_ROW}, 'prompt: {user: "Q: {question}"}', "prompt.user",
     "is the text 'Q: {question}' for all rows"),
    ({"a.jsonl": GOOD_ROW}, f"{USER}\n  {REGEX % '####.+'}", "columns.answer.regex",
     "has no group, so '####' stays in every value, such as '#### 1'"),
    ({"a.csv": "How many apples has Ann now?,7\nAnd how many have you now?,8\n"}, USER, "train",
     "first line of a.csv is taken for the names"),
    ({"a.jsonl": GOOD_ROW, "b.jsonl": '{"query": "q", "answer": 1}'}, USER, "train.1",
     "b.jsonl has no column `question`"),
    ({"a.jsonl": '{"question": "q", "answer": NaN}'}, USER, "",
     "there is no gold, so the reward gives no score: None"),
    ({"a.jsonl": GOOD_ROW.replace("1", "1,169")}, f"{USER}\n  {REGEX % '#### ([0-9]+)'}", "columns.answer.regex",
     "takes '1' and leaves ',169' behind it"),
    ({"a.jsonl": r'{"question": "q", "answer": "2 and 1.\\n#### 3"}'}, f"{USER}\n  {REGEX % '([0-9]+)'}",
     "columns.answer.regex", "takes '2' and leaves '#### 3' behind it"),
    ({"a.jsonl": r'{"question": "q", "answer": "\\boxed{\\frac{1}{2}}"}'}, f"{USER}\n  {REGEX % r'boxed.(.+?)}'}",
     "columns.answer.regex", r"takes '\\frac{1' and leaves '}'"),
    ({"a.jsonl": GOOD_ROW + GOOD_ROW.replace("1", "2")}, f"{USER}\n  {REGEX % '(####) (.+)'}",
     "columns.answer.regex", "takes the first of its 2 groups, which is '####'"),
    ({"a.jsonl": GOOD_ROW}, f"{USER}\n  columns: {{question: answer}}", "prompt.user", "it is a copy of `answer`"),
    ({"a.jsonl": GOOD_ROW}, 'prompt: {user: "{{ pic }}", images: pic}\n  columns: {pic: answer}', "prompt.user",
     "where the image is stored"),
    ({"a.jsonl": GOOD_ROW}, 'prompt: {user: "{% for o in question %}{{ o }}{% endfor %}"}', "prompt.user",
     "goes through the letters of `question`, which is text: 'q'"),
    ({"a.jsonl": GOOD_ROW.replace('"q"', '"<|im_start|>user"')}, USER, "prompt", "marks of a chat template"),
    ({"a.jsonl": GOOD_ROW.replace('"q"', r'"Two.\\nThree?"')}, USER, "prompt", "a backslash and an n"),
    ({"a.jsonl": CHAT}, 'prompt: {user: "{{ prompt }}"}', "prompt.user", "printed as Python's list"),
    ({"a.jsonl": '{"prompt": {"role": "user", "content": "u"}, "answer": 1}'}, "limit: 1", "prompt",
     "has no prompt of its own"),
    ({"a.jsonl": GOOD_ROW}, f"{USER}\n  eval: missing", "eval", "save_to_disk"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "keys", "path", "seen"), CASES)
def test_rows_that_are_not_what_they_are_taken_for_are_named(tmp_path, files, keys, path, seen):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "state.json").touch()
    train = f"dataset:\n  kind: files\n  train: [{', '.join(files)}]\n  {keys}\nrewards:"
    text = f"{GOOD.partition('dataset:')[0]}{train}{GOOD.partition('rewards:')[2]}"
    found = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2)).problems
    place = f"dataset.{path}" if path else "rewards.0.answer"
    assert any(each.path == place and seen in each.seen and each.fix for each in found), found


def test_line_breaks_of_messages_are_no_escapes(tmp_path):
    row = CHAT.replace('"u"', r'"Two.\nThree?"')
    (tmp_path / "a.jsonl").write_text(row)
    train = "dataset:\n  kind: files\n  train: a.jsonl\nrewards:"
    text = f"{GOOD.partition('dataset:')[0]}{train}{GOOD.partition('rewards:')[2]}"
    found = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2)).problems
    assert not [each for each in found if "backslash" in each.seen]


FIXES = [
    (["dataset.difficulty=adaptive", "rewards=[{kind: length, target: 3}]"],
     "add one that does, such as `kind: math`"),
    (["dataset.difficulty=adaptive", "rewards=[{kind: tag_count, tags: [<a>]}]"], "`reward: tag_count`"),
    (["dataset={kind: inline, rows: [{prompt: one, extra: {gold: '1'}}]}", "rewards=[{kind: math, answer: gold}]"],
     "such as `gold: extra.gold`"),
    (["rewards=[{kind: math, when: question == one}]"], 'if `one` is a value, put it in quotes: "one"'),
    (["environment={kind: python, path: own.py:Game}"], "add `kwargs: {limit: …}`"),
    (["environment={kind: python, path: own.py:Levels}", "dataset={kind: environment, size: 8}"],
     "give `level` a default in reset()"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "fix"), FIXES)
def test_a_fix_can_be_carried_out(tmp_path, monkeypatch, flags, fix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "class Game:\n    def __init__(self, limit): ...\n    def reset(self, seed): ...\n"
        "class Levels:\n    def reset(self, seed, level): ...\n"
    )
    found = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2)).problems
    assert any(fix in each.fix for each in found), found


DROPPED = "dropped 1 of 5 training rows (in which a pattern of `dataset.columns` finds nothing)"


def test_rows_of_several_files_and_patterns_without_a_mark_are_left_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD_ROW * 4)
    (tmp_path / "b.jsonl").write_text('{"question": "q", "answer": 1, "hint": "", "level": 2}\n')
    for regex in (r"\d+", r"####\s*(.+)", "[A-D]|1"):
        train = f"dataset:\n  kind: files\n  train: [a.jsonl, b.jsonl]\n  {USER}\n  {REGEX % regex}"
        text = f"{GOOD.partition('dataset:')[0]}{train}\nrewards:{GOOD.partition('rewards:')[2]}"
        path = write_recipe(tmp_path, text)
        found = check_recipe(path, hardware=Hardware(gpus=0, cpus=2)).problems
        noted = [each.seen for each in found if each.path.startswith("dataset")]
        assert noted == ([] if regex != r"####\s*(.+)" else [DROPPED])


ODD = [
    (b"13", "is bytes"),
    ({"value": "13", "unit": "kg"}, "has keys (value, unit)"),
    ('["a", "b"]', "is a list written as text"),
    *(
        (gold, "")
        for gold in (
            "München, Łódź",
            "[1, 2]",
            ["a", "b"],
            "AT&T; x < 3",
            13,
            "a\tb",
        )
    ),
]


@pytest.mark.parametrize(("gold", "seen"), ODD)
def test_a_gold_that_no_answer_equals_is_named(gold, seen):
    batch = Batch([""], [""], columns={"answer": [gold]})
    fault = ExactParams.model_validate({}).gold(batch, 0).issue
    assert (fault is not None and seen in fault.seen and fault.fix) if seen else fault is None


ROWS = [{"question": f"q{number}", "answer": str(number)} for number in range(3000)]


def write_rows(path, rows, **options):
    path.write_text("".join(json.dumps(row, **options) + "\n" for row in rows))


def problems_of(folder, keys="", rewards="  - {kind: exact}"):
    text = f"dataset:\n  kind: files\n  train: t.jsonl\n  {USER}\n{keys}rewards:\n{rewards}\n"
    start, _, rest = GOOD.partition("dataset:")
    end = (
        rest[rest.index("generation:") :]
        if "generation:" in rest
        else rest[rest.index("training:") :]
    )
    path = folder / "recipe.yaml"
    path.write_text(f"{start}{text}{end}")
    return check_recipe(path, None, Hardware(gpus=0, cpus=2), environment=False).problems


@pytest.mark.parametrize(
    ("held", "level", "seen"),
    [
        (ROWS, "warning", "all 3,000"),
        (ROWS[::-1], "warning", "all 3,000"),
        ([{"answer": "x", **row} for row in ROWS[2000:2010]], "warning", "all 10"),
        ([{"question": "new", "answer": "1"}, ROWS[2500]], "warning", "1 of 2"),
        ([{"question": "new", "answer": "1"}], None, None),
    ],
    ids=["copy", "other order", "other columns", "one row", "none"],
)
def test_evaluation_rows_that_are_trained_on_are_named(tmp_path, held, level, seen):
    write_rows(tmp_path / "t.jsonl", ROWS)
    write_rows(tmp_path / "e.jsonl", held, separators=(",", ":"))
    issues = [
        each for each in problems_of(tmp_path, "  eval: e.jsonl\n") if "word for word" in each.seen
    ]
    assert [each.level for each in issues] == ([level] if level else [])
    assert not level or (issues[0].path == "dataset.eval" and issues[0].seen.startswith(seen))


def write_half_dropped(folder):
    """Writes 3,000 training rows of which two thirds have an answer, and four to evaluate on."""
    folder.mkdir(exist_ok=True)
    rows = [
        {**row, "answer": f"#### {row['answer']}" if at % 3 else "?"} for at, row in enumerate(ROWS)
    ]
    write_rows(folder / "t.jsonl", rows)
    held = [{"question": f"new {number}", "answer": f"#### {number}"} for number in (0, 1, 23)]
    write_rows(folder / "e.jsonl", [*held, rows[2700]])


def test_dropped_rows_are_counted_alike_before_and_after_loading(tmp_path):
    """Evaluation rows that are dropped count, and are warned about in no other way."""
    write_half_dropped(tmp_path)
    pattern = REGEX % "#### ([0-9]+)"
    keys = f"  eval: e.jsonl\n  max_prompt_length: 5\n  {pattern}\n"
    found = problems_of(tmp_path, keys)
    (issue,) = [each for each in found if each.subject == "data: rows"]
    missed = "in which a pattern of `dataset.columns` finds nothing"
    train = f"1,000 of 3,000 training rows ({missed})"
    line, _, more = issue.seen.partition("; ")
    assert line == f"dropped {train} and 1 of 4 evaluation rows ({missed})"
    assert "max_prompt_length" in more
    assert (issue.level, issue.location.line) == ("note", 10)
    assert "row 1 of t.jsonl" in issue.fix
    assert not [each for each in found if "word for word" in each.seen]
    recipe = load_recipe(tmp_path / "recipe.yaml")
    report = build_datasets(
        recipe, has_chat_template=False, count_tokens=len, most_counted=10
    ).report
    long = "1 longer than `max_prompt_length`"
    assert say_dropped(report.dropped) == f"{train} and 2 of 4 evaluation rows (1 {missed}, {long})"


def test_rows_that_a_mixture_repeats_are_dropped_once(tmp_path):
    for name in ("a", "b"):
        write_half_dropped(tmp_path / name)
    sources = "".join(
        f"    - {{kind: files, name: {name}, train: {name}/t.jsonl, eval: {name}/e.jsonl, limit: {limit},\n"
        f"       {USER}, {REGEX % '#### ([0-9]+)'}}}\n"
        for name, limit in (("a", 30), ("b", 300))
    )
    start, _, rest = GOOD.partition("dataset:")
    text = f"{start}dataset:\n  kind: mixture\n  sources:\n{sources}rewards:{rest.partition('rewards:')[2]}"
    checked = check_recipe(
        write_recipe(tmp_path, text), None, Hardware(gpus=0, cpus=2), environment=False
    )
    (issue,) = [each for each in checked.problems if each.subject == "data: rows"]
    report = build_datasets(checked.recipe, has_chat_template=False, count_tokens=None).report
    assert report.train_rows == 400  # 20 rows of `a` are drawn ten times.
    assert issue.seen == f"dropped {say_dropped(report.dropped)}"
    assert issue.seen.startswith("dropped 110 of 330 training rows")
    assert " 2 of 8 evaluation rows" in issue.seen
    assert issue.path == "dataset.sources.0.columns.answer.regex"


def test_lines_of_long_files_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_cli.checks.rows.WHOLE_ROWS", 1500)
    write_rows(tmp_path / "t.jsonl", ROWS)
    write_rows(tmp_path / "e.jsonl", [{"question": "new", "answer": "1"}, ROWS[2500]])
    assert any(
        "1 of 2 evaluation rows" in each.seen for each in problems_of(tmp_path, "  eval: e.jsonl\n")
    )


def test_an_empty_answer_is_found_in_any_row(tmp_path):
    rows = [{**row} for row in ROWS]
    rows[2000]["answer"], rows[2500] = None, {"question": "q"}
    write_rows(tmp_path / "t.jsonl", rows)
    (issue,) = [each for each in problems_of(tmp_path) if "is empty in" in each.seen]
    assert "2 of 3000 rows; the first is row 2001 of t.jsonl" in issue.seen


def test_rows_that_are_dropped_or_not_rewarded_are_counted(tmp_path):
    write_rows(tmp_path / "t.jsonl", ROWS[:100])
    columns = "  columns: {answer: {from: answer, regex: '^\\d\\d', on_no_match: drop}}\n"
    issues = {each.path: each for each in problems_of(tmp_path, columns)}
    dropped = issues["dataset.columns.answer.regex"]
    assert (dropped.level, "10 of 100 training rows" in dropped.seen) == ("note", True)
    rewards = "  - {kind: exact, when: answer != '7'}"
    assert "1 of the 100 rows" in next(
        each.seen
        for each in problems_of(tmp_path, rewards=rewards)
        if "no reward applies" in each.seen
    )


def check_dropping(folder, keys, on_no_match="drop"):
    """Check 100 rows of which 3 have no number: empty, another text, or no answer at all."""
    rows = [{**row} for row in ROWS[:100]]
    rows[40]["answer"], rows[50]["answer"], rows[60] = None, "none", {"question": "q"}
    write_rows(folder / "t.jsonl", rows)
    pattern = f"columns: {{answer: {{from: answer, regex: '\\d+', on_no_match: {on_no_match}}}}}"
    text = f"dataset:\n  kind: files\n  train: t.jsonl\n  {USER}\n  {pattern}\n{keys}rewards:"
    path = write_recipe(
        folder, f"{GOOD.partition('dataset:')[0]}{text}{GOOD.partition('rewards:')[2]}"
    )
    return check_recipe(path, hardware=Hardware(gpus=0, cpus=2))


def test_rows_that_are_dropped_are_counted_nowhere(tmp_path):
    checked = check_dropping(tmp_path, "")
    assert [each.seen for each in checked.problems if "3 of 100" not in each.seen] == []
    assert (checked.preview.train_rows, checked.preview.is_exact) == (97, True)
    assert check_dropping(tmp_path, "  limit: 55\n").preview.train_rows == 53
    fraction = check_dropping(tmp_path, "  eval_fraction: 0.1\n").preview
    assert (fraction.train_rows, fraction.eval_rows) == (87, 10)


def test_a_pattern_that_must_match_is_tried_on_every_row_that_is_read(tmp_path):
    (issue,) = check_dropping(tmp_path, "", "error").errors
    assert "3 of 100 training rows; the first is row 41" in issue.seen
    assert check_dropping(tmp_path, "  limit: 30\n", "error").errors == []


def test_prompts_that_do_not_exist_are_not_compared(tmp_path):
    write_rows(tmp_path / "t.jsonl", ROWS[:30])
    write_rows(tmp_path / "e.jsonl", ROWS[30:40])
    for keys in ("", '  prompt: {user: "{{ wrong }}"}\n'):
        text = f"dataset:\n  kind: files\n  train: t.jsonl\n  eval: e.jsonl\n{keys}rewards:"
        text = f"{GOOD.partition('dataset:')[0]}{text}{GOOD.partition('rewards:')[2]}"
        checked = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2))
        assert checked.errors
        assert not [each for each in checked.problems if "ask" in each.seen]
