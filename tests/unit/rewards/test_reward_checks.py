"""What `grpo check` says of rewards, from the recipe and the first rows: nothing is scored."""

import json
import subprocess
import sys

import pytest
import yaml

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from tests.recipe_texts import GOOD, write_recipe

SOLUTION = "Natalia sold 48 clips in April and half as many in May, which makes 72 in all"


@pytest.fixture
def check(tmp_path):
    """The problems of a recipe with these rewards and rows."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tiny" / "tokenizer.json").touch()
    (tmp_path / "tiny" / "chat_template.jinja").write_text("{{ messages }}")

    def run(rewards, rows, overrides=(), **dataset):
        recipe = yaml.safe_load(GOOD)
        rows = [{"question": f"question {at}", **row} for at, row in enumerate(rows)]
        recipe["dataset"] |= {"rows": rows, **dataset}
        recipe["rewards"] = rewards if isinstance(rewards, list) else [rewards]
        path = write_recipe(tmp_path, yaml.safe_dump(recipe))
        return list(check_recipe(path, hardware=Hardware(gpus=0, cpus=2)).problems)

    return run


@pytest.mark.parametrize(
    ("reward", "good", "bad", "path"),
    [
        ({"kind": "math"}, {"answer": "72"}, {"answer": SOLUTION}, "answer"),
        ({"kind": "math"}, {"answer": 72}, {"answer": None}, "answer"),
        ({"kind": "math", "answer": "gold"}, {"gold": r"\frac{1}{2}"}, {"gold": ""}, "answer"),
        ({"kind": "choice"}, {"answer": "B"}, {"answer": "Paris"}, "answer"),
        ({"kind": "exact"}, {"answer": ["Paris"]}, {"answer": []}, "answer"),
        ({"kind": "contains"}, {"answer": "Paris"}, {"answer": " "}, "answer"),
        (
            {"kind": "cosine_length", "of": {"kind": "math"}},
            {"answer": "72"},
            {"answer": SOLUTION},
            "of.answer",
        ),
        (
            {"kind": "code"},
            {"tests": [{"input": "1", "output": "1"}]},
            {"tests": [{"stdin": "1", "stdout": "1"}]},
            "tests",
        ),
        ({"kind": "code"}, {"tests": "assert f(1) == 1"}, {"tests": "f(1) ="}, "tests"),
        (
            {"kind": "reasoning_gym"},
            {"answer": "3", "metadata": {"source_dataset": "chain_sum"}},
            {"answer": "3", "metadata": {"level": "easy"}},
            "task",
        ),
        (
            {"kind": "reasoning_gym", "task": "chain_sum"},
            {"answer": "3", "metadata": "{}"},
            {"answer": "3", "metadata": "gsm8k"},
            "task",
        ),
    ],
)
def test_golds_and_tests_of_the_first_rows_are_read(check, reward, good, bad, path):
    assert check(reward, [good] * 4) == []
    (problem,) = check(reward, [bad] * 4)
    assert (problem.level, problem.path) == ("error", f"rewards.0.{path}")
    assert "(row 1; so it is in all 4 rows looked at)" in problem.seen
    assert problem.location is not None
    (problem,) = check(reward, [good, good, bad, good])
    level = "error" if reward["kind"] in ("code", "reasoning_gym") else "warning"
    assert (problem.level, problem.path) == (level, f"rewards.0.{path}")
    assert "(row 3; so it is in 1 of the 4 rows looked at)" in problem.seen


def test_a_gold_that_cannot_be_read_is_shown_with_the_edit(check):
    (problem,) = check({"kind": "math", "answer": "answer"}, [{"answer": SOLUTION}] * 4)
    assert "the gold cannot be read, so the reward gives no score: 'Natalia sold" in problem.seen
    assert r"`answer: {from: answer, regex: '####\s*(.+)$'}`" in problem.fix


def test_only_rows_that_the_reward_applies_to_are_looked_at(check):
    rows = [
        {"task": ["chat", "math"][at % 2], "answer": [SOLUTION, "7"][at % 2]} for at in range(4)
    ]
    everywhere = {"kind": "length", "target": 5}
    assert check([{"kind": "math", "when": "task == 'math'"}, everywhere], rows) == []
    (problem,) = check([{"kind": "math", "when": "task == 'chat'"}, everywhere], rows)
    assert "(row 1; so it is in all 2 rows looked at)" in problem.seen


def test_a_row_without_tests_is_no_fault(check):
    tests = {"tests": "assert f(1) == 1"}
    assert check({"kind": "code"}, [tests, {"tests": None}, {"tests": []}, tests]) == []


def test_rows_are_counted_in_the_data_where_some_are_dropped(check):
    columns = {"gold": {"from": "answer", "regex": "so (.*)", "on_no_match": "drop"}}
    rows = [{"answer": text} for text in ("?", "so 5", f"so {SOLUTION}", "so 6", "so 7")]
    _, problem = check({"kind": "math", "answer": "gold"}, rows, columns=columns)
    assert "(row 3; so it is in 1 of the 4 rows looked at)" in problem.seen


def test_a_condition_may_read_the_rows_number(check):
    assert check({"kind": "math", "when": "row_id >= 0"}, [{"answer": "5"}] * 4) == []


@pytest.mark.parametrize(
    ("reward", "path"),
    [
        ({"kind": "regex", "pattern": "abc["}, "rewards.0.pattern"),
        ({"kind": "regex", "pattern": "(", "flags": ["verbose"]}, "rewards.0.pattern"),
        (
            {
                "kind": "judge",
                "model": "m",
                "rubric": "r",
                "base_url": "http://localhost:1/v1",
                "scale": [9, 1],
            },
            "rewards.0.scale",
        ),
    ],
)
def test_a_wrong_parameter_is_cited_at_its_key(check, reward, path):
    (problem,) = check(reward, [{"answer": "5"}] * 4)
    assert problem.path == path


def test_a_single_equals_sign_is_refused(check):
    (problem,) = check(
        {"kind": "math", "when": "task = 'math'"}, [{"answer": "5", "task": "math"}] * 4
    )
    assert "`task = 'math'` is not one expression" in problem.seen
    assert "==" in problem.fix


def test_reading_golds_imports_no_mathematics(tmp_path):
    rows = "".join(json.dumps({"question": "q", "answer": r"\frac{x}{2}"}) + "\n" for _ in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    text = GOOD.replace("kind: inline", "kind: files\n  train: rows.jsonl")
    text = text[: text.index("  rows:")] + text[text.index("rewards:") :]
    path = write_recipe(tmp_path, text)
    script = (
        "import sys, pathlib; from grpo_cli.checks.recipe import check_recipe; "
        f"check_recipe(pathlib.Path({str(path)!r})); "
        "print({'sympy', 'math_verify', 'torch', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_answers_are_counted_in_one_spelling():
    from grpo_cli.rewards.answers import canonical_answer

    told = {canonical_answer(text, ("last_number",)) for text in ("so 1,000", "= 1000.0", "1000")}
    assert told == {"1000"}
    assert canonical_answer("<answer> New  York </answer>", ("answer_tag",)) == "new york"
    assert canonical_answer("no number", ("last_number",)) is None


@pytest.mark.parametrize("secret", ["sk-proj-0123456789", "gsk_aB3dE6gH9jK2mN5pQ8sT1vW4", "12 ab"])
def test_a_key_in_place_of_its_variables_name_is_never_shown(check, secret):
    reward = {"kind": "judge", "model": "m", "rubric": "r", "api_key_env": secret}
    (problem,) = check(reward, [{"answer": "72"}] * 4)
    assert problem.path == "rewards.0.api_key_env"
    assert "export OPENAI_API_KEY=…" in problem.fix
    assert secret not in json.dumps(problem.as_json())


@pytest.mark.parametrize(
    ("reward", "rows", "level", "path", "seen", "fix"),
    [
        (
            {"kind": "length", "target": 20, "clip": [0, 1]},
            [{}],
            "error",
            "clip",
            "with `clip: [0.0, 1.0]` every score is 0",
            "choose bounds within that range",
        ),
        (
            {"kind": "exact", "clip": [1, 2]},
            [{"answer": "x"}],
            "error",
            "clip",
            "(`exact` gives 0 to 1)",
            "or remove `clip`",
        ),
        (
            {"kind": "length", "target": 20, "max_penalty": 1},
            [{}],
            "warning",
            "max_penalty",
            "every length but 20 scores -1",
            "write `scale: 0.05`",
        ),
        (
            {"kind": "length", "target": 5000, "unit": "words"},
            [{}],
            "error",
            "target",
            "5000 words are more than a completion can have",
            "write at most 8",
        ),
        (
            {"kind": "regex", "pattern": ".*"},
            [{}],
            "warning",
            "pattern",
            "matches every text",
            "(`+` for `*`)",
        ),
        (
            {"kind": "regex", "pattern": r"^<think>\n.*\n</think>\s*<answer>.*?</answer>$"},
            [{}],
            "warning",
            "pattern",
            "does not match line breaks",
            "set `flags: [dotall]`",
        ),
        (
            {"kind": "choice"},
            [{"answer": 1}, {"answer": 4}, {"answer": 2}, {"answer": 3}],
            "error",
            "first_index",
            "the gold 4 is not a choice of ABCD counted from 0",
            "set `first_index: 1`",
        ),
        (
            {"kind": "choice", "first_index": 1},
            [{"answer": 1}, {"answer": 0}],
            "error",
            "first_index",
            "the gold 0 is not a choice of ABCD counted from 1",
            "set `first_index: 0`",
        ),
        (
            {"kind": "code"},
            [{"tests": "assert f(1) == 1"}, {"tests": "assert f(1) ="}],
            "error",
            "tests",
            "(row 2; so it is in ",
            "or correct them",
        ),
        (
            {"kind": "code"},
            [{"tests": "import numpy as np\nassert np.isclose(f(1), 1)"}],
            "error",
            "packages",
            "the tests import numpy",
            "set `packages: true`",
        ),
        (
            {"kind": "json", "column": "schema"},
            [{"schema": "{}"}, {"schema": "{'type': 'object'}"}],
            "error",
            "column",
            "the schema is not JSON",
            "`json.dumps`",
        ),
        (
            {
                "kind": "judge",
                "model": "m",
                "rubric": "Is it {{ gold }}?",
                "base_url": "http://localhost:1/v1",
            },
            [{}],
            "warning",
            "rubric",
            "`{{ gold }}` is not filled in",
            "write `reference: gold`",
        ),
        (
            {
                "kind": "judge",
                "model": "m",
                "rubric": "Is it {answer}, in {braces} or \\boxed{answer}?",
                "base_url": "http://localhost:1/v1",
            },
            [{}],
            "warning",
            "rubric",
            "`{answer}` is not filled in",
            "write `reference: answer`",
        ),
    ],
)
def test_common_mistakes_are_named_with_their_place_and_fix(
    check, reward, rows, level, path, seen, fix
):
    (problem,) = check(reward, rows * (4 // len(rows)))
    assert (problem.level, problem.path) == (level, f"rewards.0.{path}")
    assert seen in problem.seen
    assert fix in problem.fix
    assert problem.location is not None


def test_a_reward_with_both_signs_cancels(check):
    one = {"kind": "regex", "pattern": "a+", "name": "a"}
    [problem] = check([one, {**one, "name": "b", "weight": -1}], [{}] * 4)
    assert (problem.level, problem.path) == ("warning", "rewards.1")
    assert "they cancel each other out" in problem.seen


def test_a_task_of_reasoning_gym_other_than_the_rows_is_named(tmp_path):
    text = GOOD.partition("dataset:")[0] + (
        "dataset: {kind: reasoning_gym, task: countdown, size: 8, prompt: {user: '{{ question }}'}}\n"
        "rewards: [{kind: reasoning_gym, task: chain_sum}]\n"
    )
    text += "generation:" + GOOD.partition("generation:")[2]
    problems = check_recipe(
        write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2)
    ).problems
    [problem] = [each for each in problems if each.path == "rewards.0.task"]
    assert "as chain_sum does, and the rows are of countdown" in problem.seen
