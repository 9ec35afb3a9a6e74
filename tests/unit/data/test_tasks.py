import types

import pytest

from grpo_cli.data import tasks
from grpo_cli.data.tasks import check_task, draw_rows, find_tasks
from grpo_cli.errors import RecipeError, install_extra

pytest.importorskip("reasoning_gym")


def draw(section, limit=None, seed=7, **keys):
    return draw_rows(section(kind="reasoning_gym", **{"task": "chain_sum", **keys}), seed, limit)


def questions(rows):
    return [row["question"] for row in rows]


def problem_of(section, **keys):
    with pytest.raises(RecipeError) as error:
        check_task(section(kind="reasoning_gym", **keys))
    return error.value.problems[0]


def test_held_out_questions_are_distinct_and_never_trained_on(section) -> None:
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held = draw(section, size=1500, eval_size=40, params=small)
    assert (len(train), len(held)) == (1500, 40)
    assert len(set(questions(held))) == 40
    assert not set(questions(held)) & set(questions(train))


def test_rows_depend_on_the_seed_alone(section) -> None:
    first = draw(section, size=600, eval_size=5)
    assert draw(section, size=600, eval_size=5) == first
    other = draw(section, size=600, eval_size=5, seed=8)
    assert other[0] != first[0]
    # Runs with different seeds are measured on the same rows.
    assert other[1] == first[1]
    assert draw(section, size=600, eval_size=5, eval_seed=8)[1] != first[1]


def test_what_is_held_out_does_not_depend_on_the_sizes(section) -> None:
    _, few = draw(section, size=5, eval_size=5)
    _, more = draw(section, size=500, eval_size=20)
    assert more[:5] == few


def test_levels_share_the_rows_and_never_ask_what_is_held_out(section) -> None:
    levels = [{"max_terms": 2}, {"min_terms": 2, "max_terms": 4}]
    small = {"min_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held = draw(section, size=801, eval_size=41, params=small, levels=levels)
    assert [row["level"] for row in train] == [1, 2] * 400 + [1]
    assert [row["level"] for row in held] == [1, 2] * 20 + [1]
    # Some questions with two terms are of both levels.
    assert len(set(questions(held))) == 41
    assert not set(questions(held)) & set(questions(train))
    terms = {row["metadata"]["num_terms"] for row in train if row["level"] == 2}
    assert terms == {2, 3, 4}
    assert draw(section, limit=7, size=801, eval_size=41, params=small, levels=levels) == (
        train[:7],
        held,
    )


def test_neighbouring_seeds_share_no_rows(section) -> None:
    # reasoning-gym seeds row i with seed + i, so seeds 7 and 8 would be shifted copies
    wide = {"min_terms": 6, "max_terms": 8, "min_digits": 6, "max_digits": 8}
    first, _ = draw(section, size=300, params=wide)
    second, _ = draw(section, size=300, params=wide, seed=8)
    assert not set(questions(first)) & set(questions(second))


def test_chunks_go_on_with_fresh_rows(section) -> None:
    wide = {"min_terms": 6, "max_terms": 8, "min_digits": 6, "max_digits": 8}
    train, _ = draw(section, size=tasks.CHUNK_ROWS * 2 + 1, params=wide)
    assert len(set(questions(train))) == len(train)


def test_limit_draws_the_first_rows(section) -> None:
    whole, _ = draw(section, size=20)
    assert draw(section, size=20, limit=3)[0] == whole[:3]


@pytest.mark.parametrize(
    ("sizes", "field"),
    [({"eval_size": 5000}, "dataset.eval_size"), ({"eval_size": 4, "size": 10}, "dataset.size")],
)
def test_too_few_questions_are_counted_and_said(section, monkeypatch, sizes, field) -> None:
    class Four:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def __getitem__(self, index: int) -> dict:
            number = (self.seed + index) % 4
            return {"question": f"{number}?", "answer": str(number), "metadata": {}}

    import reasoning_gym.factory as factory

    monkeypatch.setattr(factory, "create_dataset", lambda name, seed, size, **_: Four(seed))
    with pytest.raises(RecipeError) as error:
        draw(section, **sizes)
    (problem,) = error.value.problems
    assert problem.path == field
    assert "asks only 4 distinct questions" in problem.seen


def test_a_task_that_refuses_its_parameters_is_quoted(section) -> None:
    with pytest.raises(RecipeError) as error:
        draw(section, params={"min_terms": 9, "max_terms": 2})
    assert "max_terms must be >= min_terms" in error.value.problems[0].seen


def test_nothing_a_task_prints_reaches_stdout(section, capsys, monkeypatch) -> None:
    import reasoning_gym.factory as factory

    class Loud(list):
        def __getitem__(self, index):
            print("noise")
            return {"question": str(index), "answer": "", "metadata": {}}

    monkeypatch.setattr(factory, "create_dataset", lambda name, **_: Loud())
    draw(section, size=2)
    assert capsys.readouterr().out == ""


def test_composites_take_plain_mappings(section) -> None:
    parts = [{"name": "chain_sum", "weight": 1.0, "config": {"max_terms": 3}}]
    train, _ = draw(section, task="composite", size=3, params={"datasets": parts})
    assert {row["metadata"]["source_dataset"] for row in train} == {"chain_sum"}


def test_scanning_the_sources_finds_what_importing_registers() -> None:
    import reasoning_gym  # noqa: F401
    from reasoning_gym.factory import DATASETS

    assert set(find_tasks()) == set(DATASETS)
    for name, (_, config) in DATASETS.items():
        expected = set(config.__dataclass_fields__) - {"seed", "size"}
        assert tasks.read_parameters(find_tasks()[name]) == expected, name


def test_a_misspelt_task_is_suggested(section) -> None:
    problem = problem_of(section, task="chainsum")
    assert (problem.path, problem.fix) == ("dataset.task", "write `chain_sum`")


def test_a_misspelt_parameter_is_suggested(section) -> None:
    problem = problem_of(section, task="chain_sum", params={"max_termss": 3})
    assert (problem.path, problem.fix) == ("dataset.params.max_termss", "write `max_terms`")


def test_a_misspelt_parameter_of_a_level_is_suggested(section) -> None:
    problem = problem_of(section, task="chain_sum", levels=[{}, {"max_termss": 3}])
    assert problem.path == "dataset.levels.1.max_termss"


@pytest.mark.parametrize("eval_size", [0, 4])
def test_parameters_that_a_task_refuses_are_those_of_their_level(section, eval_size) -> None:
    levels = [{}, {"min_terms": 9, "max_terms": 3}]
    with pytest.raises(RecipeError) as error:
        draw(section, levels=levels, size=8, eval_size=eval_size)
    assert error.value.problems[0].path == "dataset.levels.1"


@pytest.mark.parametrize("name", ["seed", "size"])
def test_parameters_with_another_home_are_refused(section, name) -> None:
    assert problem_of(section, task="chain_sum", params={name: 3}).path == f"dataset.params.{name}"


def test_a_missing_package_names_the_install(section, monkeypatch) -> None:
    find_tasks.cache_clear()
    finder = types.SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(tasks, "importlib", types.SimpleNamespace(util=finder))
    try:
        problem = problem_of(section, task="chain_sum")
    finally:
        find_tasks.cache_clear()
    assert problem.fix == install_extra("reasoning-gym")
