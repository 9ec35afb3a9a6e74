"""The environment `textarena`: games of TextArena itself, played by scripts."""

import functools
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind

pytest.importorskip("textarena")


def params(game, **values):
    return find_kind("environment", "textarena").model_validate({"game": game, "params": values})


@functools.cache
def source(game):
    return params(game).open()


def begin(game, seed=3):
    environment = source(game).make()
    return environment, environment.reset({}, seed)


def guess(game, seed):
    """Halve the range; return the guesses."""
    low, high, guesses = 1, 20, []
    while True:
        guesses.append((low + high) // 2)
        hint, is_done = game.step(str(guesses[-1]))
        if is_done:
            return guesses
        low = guesses[-1] + 1 if "higher" in hint else low
        high = guesses[-1] - 1 if "lower" in hint else high


def test_a_number_is_found_by_halving():
    game, rules = begin("GuessTheNumber-v0")
    assert "between 1 and 20" in rules
    assert game.step("[1]") == ("The target number is higher.", False)
    assert game.reward() == 0
    guess(game, seed=3)
    assert game.reward() == 1.0


def test_disks_are_moved():
    game, rules = begin("TowerOfHanoi-v0")
    assert "[3, 2, 1]" in rules
    moves = "AC AB CB AC BA BC AC".split()
    said = [game.step(f"I move [{source} {target}]") for source, target in moves]
    assert said[0][0].startswith("You moved disk 1 from A to C.")
    assert [is_done for _, is_done in said] == [False] * 6 + [True]
    assert "Congratulations" in said[-1][0]
    assert game.reward() == 1.0


def find_path(board):
    """Return the moves from the top left to the bottom right, around all holes."""
    lines = [line for line in board.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    paths, seen = [((0, 0), ())], {(0, 0)}
    for (row, column), moves in paths:
        if rows[row][column] == "G":
            return moves
        for name, down, right in (("down", 1, 0), ("right", 0, 1), ("up", -1, 0), ("left", 0, -1)):
            place = row + down, column + right
            inside = all(0 <= each < len(rows) for each in place)
            if inside and place not in seen and rows[place[0]][place[1]] != "H":
                seen.add(place)
                paths.append((place, (*moves, name)))
    return None


def test_a_lake_is_crossed():
    game, board = begin("FrozenLake-v0")
    *steps, last = [game.step(move) for move in find_path(board)]
    assert not any(is_done for _, is_done in steps)
    assert last[1] and "reached the goal" in last[0]  # noqa: PT018
    assert game.reward() == 1.0


def test_moves_that_are_none_end_a_game():
    game, _ = begin("TowerOfHanoi-v0")
    hint, is_done = game.step("no idea")
    assert "invalid move" in hint
    assert not is_done
    hint, is_done = game.step("")
    assert "Invalid Move" in hint
    assert is_done
    assert game.reward() == 0


def test_a_game_follows_from_its_seed_alone():
    def play(seed):
        random.random()
        game, _ = begin("GuessTheNumber-v0", seed % 8)
        return guess(game, seed)

    alone = [play(seed) for seed in range(8)]
    assert len({*map(tuple, alone)}) > 2
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(64))) == list(itertools.chain(*[alone] * 8))
    random.seed(1)
    expected = random.random()
    random.seed(1)
    begin("FrozenLake-v0")[0].step("right")
    assert random.random() == expected


def test_what_cannot_be_played_is_refused():
    with pytest.raises(EpisodeError, match="unexpected keyword argument 'size'"):
        params("GuessTheNumber-v0", size=3).open()
    with pytest.raises(EpisodeError, match="number of players has to be 2"):
        params("TicTacToe-v0").open()
