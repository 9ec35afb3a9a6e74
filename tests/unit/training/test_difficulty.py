"""Which prompts are drawn, by how often they are solved."""

import json
import random
from collections import Counter

import pytest
import torch
from datasets import Dataset

from grpo_cli.data.solve_rates import read_solve_rates
from grpo_cli.errors import RecipeError, RunError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.training import difficulty
from grpo_cli.training.difficulty import build_sampler

LEVELS = {"easy": 0.98, "medium": 0.5, "hard": 0.02}
"""True shares of right answers."""
GROUP = 8


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(difficulty, "gather_object", lambda values: values)


def rows(count):
    names = list(LEVELS)
    return [
        {"row_id": place, "level": names[place % 3], "rate": LEVELS[names[place % 3]]}
        for place in range(count)
    ]


def open_sampler(data, **config):
    recipe = Recipe.model_validate(
        {
            "name": "a",
            "model": {"path": "m"},
            "dataset": {"kind": "inline", "rows": [{"prompt": "a"}], "difficulty": config},
            "rewards": [{"kind": "exact"}],
        }
    )
    return build_sampler(recipe, recipe.dataset.difficulty, Dataset.from_list(data))


def play(sampler, data, batches, prompts=4):
    """Draw batches whose answers are right by chance; return the levels drawn in each."""
    chance, drawn = random.Random(1), []
    for _ in range(batches):
        places = sampler.take(prompts)
        answered = [data[place] for place in places for _ in range(GROUP)]
        right = [[float(chance.random() < LEVELS[row["level"]])] for row in answered]
        sampler.learn(answered, torch.tensor(right), ["exact"])
        drawn.append([data[place]["level"] for place in places])
    return drawn


def test_an_order_is_kept_pass_after_pass():
    data = [{"row_id": place, "level": level} for place, level in enumerate([3, 1, None, 2, 1])]
    sampler = open_sampler(data, kind="order", column="level")
    passes = [sampler.take(5) for _ in range(2)]
    assert passes[0] == passes[1]
    assert passes[0][2:] == [3, 0, 2]
    assert {*passes[0][:2]} == {1, 4}
    assert open_sampler(data, kind="order", column="level", descending=True).take(2) == [0, 3]


@pytest.mark.parametrize("known", [{}, {"by": "level"}, {"solve_rate": "rate"}])
def test_adaptive_draws_what_is_solved_half_of_the_time_and_starves_nothing(known):
    data = rows(90)
    sampler = open_sampler(data, kind="adaptive", **known)
    late = Counter(level for batch in play(sampler, data, 200)[100:] for level in batch)
    assert late["medium"] > 2 * max(late["easy"], late["hard"])
    assert sampler.metrics()["seen"] == 1.0
    assert min(late.values()) > 10


def test_what_prompts_like_it_do_tells_of_one_that_was_not_drawn():
    data = rows(3000)
    drawn = play(open_sampler(data, kind="adaptive", by="level"), data, 60)
    late = Counter(level for batch in drawn[30:] for level in batch)
    assert late["medium"] > 0.6 * late.total()


def test_pools_have_their_share_to_a_prompt():
    data = rows(300)
    sampler = open_sampler(
        data, kind="pools", solve_rate="rate", easy=0.9, hard=0.1, easy_share=0.1, hard_share=0.3
    )
    drawn = Counter(data[place]["level"] for _ in range(25) for place in sampler.take(4))
    assert drawn == {"easy": 10, "hard": 30, "medium": 60}


def test_pools_are_drawn_if_nothing_else_is_left():
    data = [row for row in rows(30) if row["level"] != "medium"]
    sampler = open_sampler(data, kind="pools", solve_rate="rate", easy=0.9, hard=0.1)
    assert len({*sampler.take(8)}) == 8


def test_what_is_in_use_is_passed_over_while_there_is_something_else():
    sampler = open_sampler(rows(9), kind="adaptive")
    assert sorted(sampler.take(4, avoid={0, 1, 2, 3, 4})) == [5, 6, 7, 8]
    assert len(sampler.take(4, avoid=set(range(7)))) == 4
    assert len(sampler.take(12)) == 12


def test_prompts_of_a_source_that_a_mixture_repeats_come_equally_often():
    sources = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}
    # The second pass over `a` ended early.
    data = [
        {"row_id": row, "source": sources[row]} for row in [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 0, 1, 0]
    ]
    sampler = open_sampler(data, kind="adaptive", floor=1)
    drawn = Counter(data[sampler.take(1)[0]]["row_id"] for _ in range(1300))
    assert len({data[place]["row_id"] for place in sampler.take(4)}) == 4
    assert max(drawn[0], drawn[1], drawn[2]) - min(drawn[0], drawn[1], drawn[2]) <= 3
    assert abs(drawn[3] - drawn[4]) <= 3
    assert drawn[0] > 3 * drawn[3]


@pytest.mark.parametrize("config", [{"kind": "adaptive"}, {"kind": "order", "column": "rate"}])
def test_its_state_is_enough_to_go_on(config):
    data = rows(60)
    whole, stopped, resumed = (open_sampler(data, **config) for _ in range(3))
    play(whole, data, 5)
    play(stopped, data, 5)
    resumed.restore(stopped.state())
    assert play(whole, data, 10) == play(resumed, data, 10)
    assert whole.metrics() == resumed.metrics()


def test_what_becomes_learnable_is_not_drawn_without_end():
    data = [{"row_id": place} for place in range(40)]
    sampler, counts = open_sampler(data, kind="adaptive"), []
    for step in range(500):
        places = sampler.take(8)
        # A tenth is hopeless for 200 steps.
        right = [0.0 if place < 4 and step < 200 else 0.5 for place in places]
        sampler.learn([data[place] for place in places], torch.tensor([right]).T, ["exact"])
        counts.append(sum(place < 4 for place in places))
    assert sum(counts[100:200]) < 20
    assert 60 < sum(counts[400:]) < 100
    assert max(sum(counts[at : at + 10]) for at in range(200, 490)) < 20


def test_a_reward_beyond_a_right_answer_is_refused():
    sampler = open_sampler(rows(9), kind="adaptive")
    with pytest.raises(RunError, match=r"gave 1\.7, and a right answer counts as 1"):
        sampler.learn(rows(9)[:1], torch.tensor([[1.7]]), ["exact"])


def test_prompts_begin_with_what_samples_from_before_say(tmp_path):
    def sample(prompt, score):
        return {"prompt": [{"content": prompt, "role": "user"}], "rewards": {"exact": score}}

    samples = [sample("a", 1.0), sample("a", 0.0), sample("b", 1.0), sample("c", None)]
    probed, folder = tmp_path / "probe.json", tmp_path / "measured"
    probed.write_text(json.dumps({"samples": samples}, indent=2))
    (folder / "samples").mkdir(parents=True)
    (folder / "result.json").touch()
    lines = [json.dumps(each) + "\n" for each in samples]
    (folder / "samples" / "model.0.jsonl").write_text("".join(lines[:2]))
    (folder / "samples" / "model.1.jsonl").write_text("".join(lines[2:]))
    data = [
        {"row_id": place, "rate": 0.25, "prompt": [{"role": "user", "content": prompt}]}
        for place, prompt in enumerate("abcd")
    ]
    for path in (probed, folder):
        sampler = open_sampler(data, kind="adaptive", samples=str(path))
        # The mean of all prompts that are not known.
        assert sampler._estimates.all().tolist() == [0.5, 1.0, 0.5, 0.5]
        assert sampler._estimates.known().tolist() == [True, True, False, False]
    sampler = open_sampler(data, kind="pools", samples=str(folder), solve_rate="rate")
    assert sampler._estimates.all().tolist() == [0.5, 1.0, 0.25, 0.25]
    others = [{**row, "prompt": "a"} for row in data]
    with pytest.raises(RecipeError, match="none of the 2 prompts of"):
        open_sampler(others, kind="adaptive", samples=str(folder))
    with pytest.raises(RecipeError, match="no reward `math`; they have `exact`"):
        open_sampler(data, kind="adaptive", samples=str(folder), reward="math")
    (folder / "samples" / "base.0.jsonl").write_text(lines[0])
    with pytest.raises(RecipeError, match="samples of several models: `base`, `model`"):
        open_sampler(data, kind="adaptive", samples=str(folder))
    with pytest.raises(RecipeError, match="there is no file"):
        open_sampler(data, kind="adaptive", samples=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"prompt": "a"\n{}\n', "cannot be read as samples .*JSONDecodeError"),
        ("a.jsonl", b"\xff\xfe\n", "cannot be read as samples"),
        ("a.json", b'{"samples": 5}', "cannot be read as samples"),
        ("a.jsonl", b'{"prompt": "a", "rewards": 5}\n', "whose `rewards` are 5, not a number for"),
        ("a.jsonl", b'{"prompt": "a", "rewards": {"exact": "x"}}\n', "whose `rewards` are .*'x'"),
        ("a.jsonl", b'{"question": "a"}\n', "has no samples"),
    ],
)
def test_samples_that_cannot_be_read_are_named(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=problem):
        read_solve_rates(str(tmp_path / name), {"exact": 1.0})


def test_samples_of_an_evaluation_that_was_killed_are_refused_and_torn_lines_left_out(tmp_path):
    file = tmp_path / "samples" / "model.0.jsonl"
    file.parent.mkdir()
    file.write_text('{"prompt": "a", "rewards": {"exact": 1.0}}\n{"prompt": "b", "rew')
    assert read_solve_rates(str(file), {"exact": 1.0}) == {'"a"': 1.0}
    with pytest.raises(
        RecipeError, match=r"was not finished\. Fix: repeat its `grpo eval` with --resume"
    ):
        read_solve_rates(str(tmp_path), {"exact": 1.0})
