"""Whatever is written into a recipe, the checks answer with problems: never with a traceback."""

import copy
import importlib.util
import json
import random

import pytest
import yaml

from grpo_cli.checks.batch import plan_from_flags
from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import ProblemsError
from grpo_cli.machine import Hardware
from tests.recipe_texts import GOOD, write_recipe
from tests.tiny_models import make_tiny_model

ODDITIES = [
    None, True, 0, -1, 1.5, 2**70, float("nan"), float("inf"), "", " ", "x", "no", "1e-3", "²", "a.b",
    "..", "/", "~", "~nobody-here/x", "a\x00b", "日本", "a" * 300, "a/" * 200, "{{", "{{ x",
    "{% for i in range(10**9) %}{% endfor %}", "(", "package://", "package://x", "package://trl/",
    "x.gguf", "own.py:", ":f", "os:system", [], [[]], [None], {}, {"a": 1}, {"²": 1}, {"kind": []},
    {"kind": "math"}, {"from": 1}, ["model"], [{}], "hub", "auto", "http://x/y", ".", "a\nb", "[/red]",
]  # fmt: skip
KEYS = ["²", "a.b", "1", "kind", "extends", "é", "beta", "vllm_mode", "output_dir", "max_stesp"]


def paths_in(value, path=()):
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_in(child, (*path, key))


def spoil(recipe, dice):
    path = dice.choice(list(paths_in(recipe)))
    parent = recipe
    for step in path[:-1]:
        parent = parent[step]
    oddity = copy.deepcopy(dice.choice(ODDITIES))
    if isinstance(parent, dict) and dice.random() < 0.2:
        parent[dice.choice(KEYS)] = oddity
    elif dice.random() < 0.15:
        del parent[path[-1]]
    else:
        parent[path[-1]] = oddity


@pytest.mark.parametrize("seed", range(8))
def test_a_spoiled_recipe_gets_problems_with_a_place_and_a_fix(tmp_path, seed):
    dice = random.Random(seed)
    for _ in range(60):
        recipe = yaml.safe_load(GOOD)
        for _ in range(dice.choice([1, 1, 2, 3])):
            spoil(recipe, dice)
        path = write_recipe(tmp_path, yaml.safe_dump(recipe, allow_unicode=True))
        try:
            checked = check_recipe(path, hardware=Hardware(gpus=0, cpus=2))
        except ProblemsError as error:
            problems = error.problems
        else:
            problems = checked.errors
            checked.as_json()
        for problem in problems:
            assert problem.fix, problem
            assert problem.location is not None, problem


@pytest.mark.parametrize(
    "template",
    [
        "{{ question.zzz }}",
        "{{ ''.__class__ }}",
        "{{ none }}",
    ],
)
def test_a_template_that_fails_on_the_data_is_found_before_launch(tmp_path, template):
    path = write_recipe(tmp_path)
    checked = check_recipe(path, [f"dataset.prompt.user={template}"], Hardware(gpus=0, cpus=2))
    (problem,) = checked.errors
    assert problem.path == "dataset.prompt.user"


def test_a_pattern_that_finds_nothing_is_found_before_launch(tmp_path):
    flags = ["dataset.columns={gold: {from: answer, regex: zzz}}"]
    (problem,) = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2)).errors
    assert problem.path == "dataset.columns.gold.regex"


def test_rows_without_an_answer_are_counted_and_the_first_is_named(tmp_path):
    rows = [{"question": "q", "answer": "" if place in (24, 27) else "1"} for place in range(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = "dataset: {kind: files, train: train.jsonl, prompt: {user: '{{ question }}'}}\n"
    text = GOOD[: GOOD.index("dataset:")] + data + GOOD[GOOD.index("rewards:") :]
    found = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2)).problems
    (problem,) = [each for each in found if "`answer`" in each.seen]
    assert "is empty in 2 of 30 rows; the first is row 25 of train.jsonl" in problem.seen
    assert (problem.path, problem.level) == ("rewards.0", "warning")


def test_evaluation_rows_without_the_golds_column_are_told_so(tmp_path):
    lines = '    - {question: four, answer: "4"}\n'
    text = GOOD.replace(lines, f"{lines}  eval_rows:\n    - {{question: five, solution: 5}}\n")
    (problem,) = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(0, 2)).errors
    assert "the evaluation data lacks the column `answer`, which the training data" in problem.seen
    assert "(columns: question, solution)" in problem.seen
    assert problem.path == "rewards.0.answer"


def test_a_wrong_value_by_flag_is_cited_as_the_flag(tmp_path):
    (problem,) = plan_from_flags(write_recipe(tmp_path), None, {"max_steps": 0}).problems
    assert str(problem).startswith("--max-steps 0: training.max_steps: max_steps is 0")


@pytest.mark.parametrize(
    ("limit", "context", "told"),
    [(8, 512, "the answer of training row 1 has 14 tokens, and a completion 8 at most"),
     (64, 16, "the prompt and the answer of training row 1 have 17 tokens or more"), (14, 512, None)],
)  # fmt: skip
def test_an_answer_of_a_warmup_that_is_too_long_is_told(tmp_path, limit, context, told):
    make_tiny_model(tmp_path / "tiny", context_length=context)
    flags = ["warmup={answer: 'the answer: {{ answer }}'}", "dataset.rows.0.answer='1'"]
    flags += [f"model.path={tmp_path / 'tiny'}", f"generation.max_completion_length={limit}"]
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
    found = [each.seen for each in checked.errors if each.path == "warmup.answer"]
    assert [told in each for each in found] == [True] * bool(told)


def test_mistakes_that_do_not_depend_on_each_other_are_told_at_once(tmp_path):
    flags = [
        "model.path=./nowhere",
        "model.lora={rank: 8}",
        "teacher.path=./nobody",
        "training.beta=0.1",
    ]
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
    fixes = {each.path: each.fix for each in checked.errors}
    assert {"model.path", "model.lora.rank", "teacher.path"} <= fixes.keys()
    assert fixes["model.lora.rank"] == "write `r`"


def test_a_key_that_stands_twice_hides_no_other_mistake(tmp_path):
    text = GOOD.replace("model:\n", "name: better\nmodel:\n").replace("max_steps: 2", "max_step: 2")
    twice = "generation: {num_generations: 3}\n"
    checked = check_recipe(write_recipe(tmp_path, text + twice), hardware=Hardware(gpus=0, cpus=2))
    seen = {(each.location.line, each.path): each.seen for each in checked.errors}
    assert seen[2, ""] == "the key `name` stands twice in this mapping (first in line 1)"
    assert seen[text.count("\n") + 1, ""].startswith("the key `generation` stands twice")
    assert [path for _, path in seen if path.startswith("training")] == ["training.max_step"]
    # The second `generation` is read together with the first, as its fix says.
    tree = checked.loaded.tree.plain()
    assert (tree["name"], tree["generation"]["max_completion_length"]) == ("better", 8)


JUDGE = "{kind: judge, model: m, rubric: 'good?'}"


@pytest.mark.parametrize(
    ("package", "flags", "path", "other"),
    [
        (
            "openai",
            [
                f"rewards=[{JUDGE}, {{kind: math, answer: answer}}, {JUDGE}]",
                "rewards.2.name=second",
            ],
            "rewards.0.kind",
            "rewards.2.kind",
        ),
        # What is to be done instead differs.
        (
            "bitsandbytes",
            ["model.quantization=4bit", "model.lora={r: 8}", "training.optim=paged_adamw_8bit"],
            "model.quantization",
            "training.optim",
        ),
    ],
)
def test_a_missing_package_is_named_once_with_all_that_need_it(
    tmp_path, monkeypatch, package, flags, path, other
):
    find = importlib.util.find_spec
    gone = lambda name, *more: None if name == package else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", gone)
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=1, cpus=2))
    [missing] = [each for each in checked.errors if each.package]
    assert (missing.package, missing.path) == (package, path)
    assert missing.why == f"it is also needed by `{other}`"


def test_a_missing_package_is_told_beside_a_wrong_parameter(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    gone = lambda name, *more: None if name == "openai" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", gone)
    flags = ["rewards=[{kind: judge, model: m, rubric: 'good?', scal: 3}]"]
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
    told = {each.path: each.seen for each in checked.errors}
    assert told["rewards.0.scal"] == "unknown key `scal`"
    assert told["rewards.0.kind"] == "openai is not installed"
