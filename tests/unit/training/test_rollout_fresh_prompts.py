"""The order of fresh prompts: seeded, without repeats, and rebuilt from a count."""

import pytest

from grpo_cli.training.rollout.dynamic_sampling import FreshPrompts


def test_a_pass_holds_every_prompt_once_and_the_next_is_in_another_order():
    fresh = FreshPrompts(50, seed=1)
    first, second = (fresh.take(50, set()) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert FreshPrompts(50, seed=2).take(50, set()) != first


def test_what_is_in_use_is_passed_over():
    fresh = FreshPrompts(10, seed=1)
    assert sorted(fresh.take(4, set(range(6)))) == [6, 7, 8, 9]


def test_no_prompt_comes_twice_at_a_time_where_a_pass_ends():
    fresh = FreshPrompts(5, seed=3)
    fresh.take(3, set())
    for _ in range(20):
        assert len(set(fresh.take(4, set()))) == 4


@pytest.mark.parametrize("before", [0, 3, 10, 27])
def test_a_count_is_enough_to_go_on(before):
    fresh = FreshPrompts(10, seed=4)
    for _ in range(before):
        fresh.take(1, {2, 5})
    rebuilt = FreshPrompts(10, seed=4, taken=fresh.taken)
    assert rebuilt.take(8, set()) == fresh.take(8, set())
    assert rebuilt.taken == fresh.taken
