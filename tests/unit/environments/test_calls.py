"""Calls on threads."""

import asyncio
import threading
import time

import pytest

from grpo_cli.environments import calls
from grpo_cli.environments.calls import run_call, run_chains, settle
from grpo_cli.environments.contract import EpisodeError


def run_all(calls, **limits):
    return run_chains(list(map(run_call, calls)), **limits)


def test_calls_run_side_by_side_and_those_of_a_chain_in_order():
    together = threading.Barrier(16)
    outcomes = run_all([lambda: together.wait(60)] * 16, parallel=16, timeout_s=60)
    assert sorted(outcome.value for outcome in outcomes) == list(range(16))
    running, most, order = [], [], []

    def work(name):
        running.append(name)
        most.append(len(running))
        time.sleep(0.005)
        running.remove(name)
        order.append(name)
        return name

    def chain(number):
        first = yield lambda: work((number, 1))
        second = yield lambda: work((number, 2))
        return [first.value, second.value]

    results = run_chains([chain(number) for number in range(8)], parallel=3, timeout_s=60)
    assert results == [[(number, 1), (number, 2)] for number in range(8)]
    assert max(most) == 3
    assert all(order.index((number, 1)) < order.index((number, 2)) for number in range(8))


def test_a_late_call_is_left_behind_and_asked_to_end():
    ended = threading.Event()

    def spin():
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    late, right = run_all([spin, lambda: 5], parallel=2, timeout_s=0.1)
    assert (late.is_late, late.fault) == (True, "it took longer than 0.1 s")
    assert (right.value, right.fault) == (5, "")
    assert ended.wait(60)


def test_a_run_with_too_many_late_calls_ends_with_advice(monkeypatch):
    monkeypatch.setattr(calls, "MOST_LEFT", 0)
    monkeypatch.setattr(calls, "_left", [])
    over = threading.Event()
    (outcome,) = run_all([lambda: over.wait(600)], parallel=1, timeout_s=0.05)
    assert outcome.is_late
    with pytest.raises(EpisodeError, match="calls that took too long still run"):
        run_all([lambda: 5], parallel=1, timeout_s=60)
    over.set()


def test_coroutines_share_a_loop_and_are_cancelled():
    loops, cancelled = [], threading.Event()

    async def note():
        loops.append(asyncio.get_running_loop())

    async def hang():
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    run_all([lambda: settle(note())] * 2, parallel=2, timeout_s=60)
    assert loops[0] is loops[1]
    (outcome,) = run_all([lambda: settle(hang(), 0.05)], parallel=1, timeout_s=60)
    assert outcome.fault.startswith("TimeoutError")
    assert cancelled.wait(60)
