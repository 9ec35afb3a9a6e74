"""Rewards tried on made-up answers: good recipes pass, and each bad one is told what is wrong."""

import json
import textwrap
import time
from functools import partial

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import UsageError
from grpo_cli.reward_test import testing
from grpo_cli.reward_test.findings import check_golds
from grpo_cli.reward_test.run import try_recipe
from grpo_cli.reward_test.table import Table, TooSlowError
from grpo_cli.reward_test.testing import FORMS, wrong_answers
from grpo_cli.rewards.contract import Score
from grpo_cli.rewards.kinds.length import CosineLengthParams
from grpo_cli.rewards.scoring import Reward

ROWS = [{"question": f"What is {i} plus {i}?", "answer": f"{2 * i + 100}"} for i in range(12)]


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Tries the rewards of a recipe, given as YAML lines."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "tokenizer.json").touch()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")

    def run(rewards, lines=ROWS, budget_s=None, **options):
        limited = partial(testing.try_rewards, budget_s=budget_s)
        monkeypatch.setattr("grpo_cli.reward_test.run.try_rewards", limited)
        recipe = tmp_path / "recipe.yaml"
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in lines))
        recipe.write_text(
            textwrap.dedent("""\
            name: t
            model: {path: ./model}
            dataset:
              kind: files
              train: rows.jsonl
              prompt: {user: "{{ question }}"}
            generation: {num_generations: 2, max_completion_length: 16}
            training: {per_device_train_batch_size: 2, max_steps: 1}
            rewards:
            """)
            + textwrap.dedent(rewards)
        )
        return try_recipe(check_recipe(recipe), **options)

    return run


def found(trial, level):
    return [problem.seen for problem in trial.problems if problem.level == level]


def result(trial, name):
    [found] = [each for each in trial.results if each.name == name]
    return found


def test_a_right_answer_wins_and_nothing_is_said(attempt):
    trial = attempt("- {kind: math}\n- {kind: think_format, weight: 0.2}")
    assert not trial.failed
    assert trial.problems == ()
    assert result(trial, "gold").total == pytest.approx(1.2)
    assert result(trial, "wrong").rewards["math"] == 0.0
    assert trial.forms == {"math": "<think>…</think> GOLD"}
    assert trial.unreadable == {"math": 0.0}
    assert {each.name for each in trial.results} >= {
        "the prompt",
        "empty",
        "tags alone",
        "repetition",
    }


@pytest.mark.parametrize(
    ("rewards", "form"),
    [
        ("- {kind: math, extract: [boxed]}", r"\boxed{GOLD}"),
        ("- {kind: math, extract: [hashes]}", "#### GOLD"),
        ("- {kind: math}\n- {kind: answer_format}", "<think>…</think> <answer>GOLD</answer>"),
        (
            "- {kind: math}\n- {kind: answer_format, prefilled: true}",
            "…</think> <answer>GOLD</answer>",
        ),
        (
            r"""- {kind: math}
- {kind: regex, pattern: '^The answer is \d+\.$'}""",
            "The answer is GOLD.",
        ),
    ],
)
def test_the_form_is_the_one_the_rewards_want(attempt, rewards, form):
    trial = attempt(rewards)
    assert list(trial.forms.values()) == [form]
    assert not trial.failed


def test_golds_that_cannot_be_read_are_counted(attempt):
    rows = [
        *ROWS[:9],
        *({"question": f"{i}?", "answer": "It is hard to say: 12 or 14"} for i in range(3)),
    ]
    trial = attempt("- {kind: math}", rows)
    assert trial.unreadable == {"math": 0.25}
    [message] = found(trial, "error")
    assert "cannot be read in 3 of 12 rows (25.0%), the first in row 10" in message
    assert "hard to say" in message


def test_a_gold_that_does_not_win_is_an_error(attempt, tmp_path):
    (tmp_path / "own.py").write_text(
        "def f(completions, **kw):\n    return [0.0 for c in completions]\n"
    )
    trial = attempt("- {kind: math, clip: [0, 0.5]}\n- {kind: python, path: ./own.py:f}")
    assert not trial.failed
    assert found(trial, "warning") == [
        "`f` gives every answer tried the same score (0): it cannot teach anything"
    ]
    trial = attempt("- {kind: math}\n- {kind: json}")
    assert found(trial, "warning") == []
    assert (
        "`json` gives 0 to the answers tried, none of which has the form that it rewards"
        in found(trial, "note")
    )
    rows = [{**row, "answer": ["x", "y"][at % 2]} for at, row in enumerate(ROWS)]
    trial = attempt("- {kind: choice, choices: ABXY}", rows)
    assert not trial.failed


def test_rewards_that_can_be_hacked_are_errors(attempt):
    rows = [{"question": f"Is {i} a or b?", "answer": "ab"[i % 2]} for i in range(12)]
    trial = attempt("- {kind: contains, whole_words: false}", rows)
    messages = " | ".join(found(trial, "error"))
    assert "repetition counts as right in 6 of 12 rows" in messages
    trial = attempt("- {kind: math, weight: 0.1}\n- {kind: length, target: 0, scale: 0.1}")
    messages = " | ".join(found(trial, "error"))
    assert "an empty answer gets 0 in total" in messages
    assert "training will find it" in messages


def test_a_reward_beside_which_right_answers_hardly_count_is_warned_of(attempt):
    trial = attempt("- {kind: math}\n- {kind: length, target: 100}")
    (problem,) = [each for each in trial.problems if "hardly" in each.seen]
    assert (problem.path, problem.level) == ("rewards.1", "warning")
    trial = attempt("- {kind: math}\n- {kind: length, target: 100, scale: 0.01}")
    assert not [each for each in trial.problems if "hardly" in each.seen]


def test_without_right_answers_there_is_only_the_table(attempt):
    trial = attempt("- {kind: length, target: 5}")
    assert trial.forms == {}
    assert not trial.failed
    assert "declare no gold answer" in found(trial, "note")[0]
    assert result(trial, "empty").total == -5.0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("abs(5 - len(c[0]['content']))", "a long repetition gets"),
        ("-len(c[0]['content'])", "an empty answer gets"),
        ("c[0]['content'].count('let')", "a long repetition gets"),
        ("-abs(20 - len(c[0]['content']))", ""),
        ("float('answer is' in c[0]['content'])", ""),
    ],
)
def test_a_degenerate_answer_that_beats_all_others_is_an_error_without_a_gold(
    attempt, tmp_path, body, told
):
    (tmp_path / "mine.py").write_text(f"def f(completions): return [{body} for c in completions]")
    trial = attempt("- {kind: python, path: mine.py:f}", [{"question": "Say something."}] * 4)
    errors = found(trial, "error")
    assert [told in each and "answers with content" in each for each in errors] == [True] * bool(
        told
    )


def test_the_mean_total_is_over_the_rows_that_a_reward_applies_to(attempt):
    rows = [{**row, "task": "math" if at < 9 else "chat"} for at, row in enumerate(ROWS)]
    trial = attempt(
        """\
        - {kind: math, when: 'task == "math"'}
        - {kind: length, target: 3, weight: 0, when: 'task == "math"'}
        """,
        rows,
        answers=["{{ answer }}"],
    )
    assert result(trial, "--answer").total == 1.0


def test_answers_of_ones_own_are_templates(attempt):
    trial = attempt(
        "- {kind: math}\n- {kind: regex, pattern: '^So: '}",
        answers=["So: {{ answer }}", "So: nothing"],
    )
    assert result(trial, "--answer 1").total == 2.0
    assert result(trial, "--answer 2").total == 1.0
    assert found(trial, "warning") == []
    with pytest.raises(UsageError, match="--answer"):
        attempt("- {kind: math}", answers=["{{ nothing }}"])


def test_a_form_that_no_answer_has_is_a_note(attempt):
    trial = attempt("- {kind: math}\n- {kind: regex, pattern: '^So: '}")
    assert found(trial, "warning") == []
    assert "`regex` gives 0 to the answers tried, none of which" in found(trial, "note")[0]
    trial = attempt("- {kind: code}", [{**row, "tests": "assert f() == 1"} for row in ROWS])
    assert found(trial, "warning") == []
    assert "as the data has no right ones to try" in "".join(found(trial, "note"))


def test_rewards_under_a_condition_are_tried_where_it_holds(attempt):
    tasks = ["math", "chat"]
    rows = [{**row, "task": tasks[at % 2], "source": "a"} for at, row in enumerate(ROWS)]
    trial = attempt(
        """\
- {kind: math, when: 'task == "math"'}
- {kind: length, target: 3, when: 'task == "chat"', scale: 0.01}
- {kind: length, target: 3, name: never, when: 'task == "poetry"'}
""",
        rows,
    )
    assert result(trial, "gold").rows == 6
    assert result(trial, "gold").rewards["math"] == 1.0
    assert '`task == "poetry"` holds for none of 12 rows looked at (task: math, chat)' in found(
        trial, "warning"
    )


def test_tokens_are_counted_with_the_models_own_tokenizer(attempt):
    """The folder's tokenizer is an empty file: what needs one says so."""
    with pytest.raises(Exception, match="one of its files is damaged"):
        attempt("- {kind: math}\n- {kind: soft_overlong, cache: 4}")


def test_wrong_answers_are_other_rows_answers():
    assert wrong_answers({0: "1", 1: "2", 3: "1"}) == {0: "2", 1: "1", 3: "2"}
    assert wrong_answers({0: "7", 1: "7"}) == {0: "8", 1: "8"}
    assert wrong_answers({0: "yes", 1: "yes"}) == {}


def test_forms_are_distinct_and_hold_the_gold():
    assert next(iter(FORMS.values())) == "GOLD"
    assert len(set(FORMS.values())) == len(FORMS)
    assert all(text.count("GOLD") == 1 for text in FORMS.values())


def test_forgiven_failures_are_told(attempt, tmp_path):
    (tmp_path / "own.py").write_text(
        "def f(completions, **kw):\n    return [1 / 0 for _ in completions]\n"
    )
    trial = attempt("- {kind: math}\n- {kind: python, path: ./own.py:f, on_error: zero}")
    [message] = found(trial, "error")
    assert "`f` failed on 72 of 72 answers" in message
    assert "division by zero" in message


def test_a_function_that_gives_one_score_is_found(attempt, tmp_path):
    source = "def f(completions, **kw):\n    return [float(len(c)) for c in completions]\n"
    (tmp_path / "own.py").write_text(source)
    warnings = found(attempt("- {kind: python, path: ./own.py:f}"), "warning")
    assert any("gives every answer tried the same score (1)" in each for each in warnings)


LONG = "First we add the two numbers, then we look at the sum again, and it is {}"


@pytest.mark.parametrize(
    ("rewards", "answer", "path"),
    [
        ("- {kind: exact}", LONG, "rewards.0.answer"),
        ("- {kind: contains}", LONG, "rewards.0.answer"),
        ("- {kind: exact}", "So it is\n#### {}", "rewards.0.answer"),
        ("- {kind: exact}", "{}", None),
        ("- {kind: math}", "So it is\n#### {}", None),
    ],
)
def test_whole_solutions_as_golds_are_a_warning(attempt, rewards, answer, path):
    rows = [{**row, "answer": answer.format(row["answer"])} for row in ROWS]
    problems = [each for each in attempt(rewards, rows).problems if "golds are long" in each.seen]
    assert [each.path for each in problems] == ([path] if path else [])
    for problem in problems:
        assert problem.level == "warning"
        assert "row 1: " in problem.seen
        assert "regex: '####" in problem.fix


def test_equal_prompts_with_different_golds_are_found(attempt):
    rows = [{"question": "How many?", "answer": str(at)} for at in (3, 4)]
    trial = attempt("- {kind: math}", [*ROWS, *rows])
    [problem] = [each for each in trial.problems if "a different gold" in each.seen]
    assert "row 13 ('3') and row 14 ('4')" in problem.seen


def test_one_gold_for_all_rows_is_a_warning(attempt):
    trial = attempt("- {kind: math}", [{**row, "answer": "7"} for row in ROWS])
    assert any("the gold is '7' in all rows" in each for each in found(trial, "warning"))


@pytest.mark.parametrize(
    ("covered", "level"), [(12, None), (11, "warning"), (6, "warning"), (5, "error")]
)
def test_rows_without_any_reward_are_counted_over_all_rows(attempt, covered, level):
    rows = [{**row, "task": "math" if at < covered else "chat"} for at, row in enumerate(ROWS)]
    trial = attempt("- {kind: math, when: 'task == \"math\"'}", rows, rows=2)
    problems = [each for each in trial.problems if "no reward applies" in each.seen]
    assert [each.level for each in problems] == ([level] if level else [])
    for problem in problems:
        assert f"to {12 - covered} of 12 rows" in problem.seen
        assert f"the first is row {covered + 1} (task: 'chat')" in problem.seen


def test_the_gold_of_a_nested_reward_is_shown_with_its_column():
    params = CosineLengthParams.model_validate({"of": {"kind": "math", "answer": "gold"}})
    reward = Reward("mine", 1.0, "cosine_length", params, lambda batch: [])
    columns = {"prompt": ["p"], "gold": ["hard to say: 12 or 14"], "row_id": [6]}
    [problem] = check_golds(Table([reward], columns, None, lambda what: None), 0)
    assert "the first in row 7: 'hard to say" in problem.seen
    assert "`gold: {from: gold" in problem.fix


def test_the_slow_reward_is_named_and_its_first_call_left_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def scorer(first_s, each_s):
        calls = []

        def score(batch):
            clock[0] += each_s * len(batch.completions) if calls else first_s
            calls.append(batch)
            return [Score(0.0)] * len(batch.completions)

        return score

    params = CosineLengthParams.model_validate({"of": {"kind": "math", "answer": "gold"}})
    slow = Reward("slow", 1.0, "x", params, scorer(first_s=90.0, each_s=0.5))
    quick = Reward("quick", 1.0, "x", params, scorer(first_s=0.1, each_s=0.0))
    table = Table([slow, quick], {"prompt": ["?"] * 32}, None, lambda what: None, budget_s=10.0)
    with pytest.raises(TooSlowError, match=r"`slow` takes 0\.5 s a completion"):
        table.score(dict.fromkeys(range(32), "a"), "answers")


@pytest.mark.parametrize("signature", ["completions, answer", "completions, answer=None, **kw"])
def test_a_function_that_names_a_column_is_tried_on_what_the_column_holds(
    attempt, tmp_path, signature
):
    (tmp_path / "own.py").write_text(
        f"def f({signature}):\n"
        "    return [float(c[0]['content'] == f'#### {a}') for c, a in zip(completions, answer)]\n"
    )
    trial = attempt("- {kind: python, path: ./own.py:f}")
    assert found(trial, "warning") == []
    answers = result(trial, "column answer")
    assert (answers.rewards, answers.example) == ({"f": 1.0}, "#### 100")
    trial = attempt("- {kind: math}\n- {kind: python, path: ./own.py:f}")
    assert trial.problems == ()
    text = (tmp_path / "own.py").read_text().replace("a}'", "a}.'")
    brief = (
        "\ndef brief(completions): return [1 - len(c[0]['content']) / 200 for c in completions]\n"
    )
    (tmp_path / "never.py").write_text(text + brief)
    trial = attempt(
        "- {kind: python, path: ./never.py:f}\n- {kind: python, path: ./never.py:brief}"
    )
    assert any("an empty answer gets 1 in total" in each for each in found(trial, "warning"))
    (tmp_path / "flat.py").write_text(f"def f({signature}):\n    return [0.5] * len(completions)\n")
    trial = attempt("- {kind: python, path: ./flat.py:f}")
    assert "same score (0.5)" in found(trial, "warning")[0]


PROGRAMS = [
    {
        "question": f"Add {i}.",
        "tests": f"assert f(1) == {i + 1}",
        "answer": f"def f(x): return x + {i}",
    }
    for i in range(12)
]


def test_solutions_of_programs_are_run_although_time_is_limited(attempt):
    rewards = "- {kind: code, solution: answer}\n- {kind: think_format, weight: 0.1}"
    trial = attempt(rewards, PROGRAMS, budget_s=60)
    assert result(trial, "gold").rewards == {"code": 1.0, "think_format": 1.0}
    assert trial.forms == {"code": "<think>…</think> GOLD"}
    assert found(trial, "error") == []
    wrong = [{**row, "answer": f"{row['answer']} + 1"} for row in PROGRAMS]
    trial = attempt(rewards, wrong, budget_s=60)
    assert "the gold itself does not get 1 in 12 of 12 rows" in found(trial, "error")[0]


def test_failures_before_the_time_was_up_are_reported(attempt, tmp_path, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 10)
    (tmp_path / "own.py").write_text("def f(completions, **kw):\n    return 1 / 0\n")
    own = "- {kind: python, path: ./own.py:f, on_error: zero}"
    trial = attempt(own, budget_s=0.15)
    assert "not all answers were scored" in found(trial, "note")[-1]
    assert "`f` failed on" in found(trial, "error")[0]


def test_what_was_scored_before_the_time_was_up_is_reported(attempt, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 10)
    rows = [{**row, "answer": "hard to say: 12 or 14"} for row in ROWS[:2]]
    trial = attempt("- {kind: math}\n- {kind: length, target: 3}", [*ROWS, *rows], budget_s=1)
    assert "not all answers were scored" in found(trial, "note")[0]
    assert "cannot be read in 2 of 14 rows" in found(trial, "error")[0]
