"""Groups of a run packed for its page: parts merged, damage passed over, and no more than there is room for."""

import base64
import gzip
import json
from itertools import accumulate, pairwise

import pytest

from grpo_cli.report.page.completions import pack_held_out, pack_training, spread
from grpo_cli.report.page.groups import find_groups, load_groups
from grpo_cli.report.page.run_data import read_material
from tests.long_runs import EVIL, make_long_run
from tests.run_folders import make_finished_run, write_samples
from tests.unit.report.page.test_verdict import measure


def read(packed):
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def write_group(run, rank=0, **changes):
    run.completions.mkdir(exist_ok=True)
    told = {
        "step": 1, "split": "train", "row": 5, "prompt": "2 + 3?", "completions": ["5", "6"],
        "tokens": [1, 2], "clipped": [False, True], "rewards": {"math": [1.0, None]}, "reasons": {},
    }  # fmt: skip
    with (run.completions / f"rank_{rank}.jsonl").open("a") as file:
        file.write(json.dumps({**told, **changes}) + "\n")


@pytest.fixture
def run(tmp_path):
    return make_finished_run(tmp_path)


def test_parts_of_a_group_that_processes_share_are_one_group(run):
    write_group(run)
    write_group(
        run, rank=1, completions=["7"], tokens=[3], clipped=[False], rewards={"math": [0.0]}
    )
    write_group(run, rank=1, split="eval")
    groups = list(load_groups(find_groups(run), run.read_recipe()))
    assert [(each.split, each.texts) for each in groups] == [
        ("train", ["5", "6", "7"]),
        ("eval", ["5", "6"]),
    ]
    assert groups[0].scores == {"math": [1.0, None, 0.0]}
    assert groups[0].totals == [1.0, 0, 0.0]


def test_totals_are_weighted_and_late_rewards_have_no_earlier_scores(tmp_path):
    weighted = [
        {"kind": "math", "answer": "q", "weight": 2.0},
        {"kind": "length", "target": 3, "scale": 1},
    ]
    run = make_finished_run(tmp_path, seed=1)
    recipe = run.read_recipe()
    changed = recipe.model_validate({**recipe.model_dump(mode="json"), "rewards": weighted})
    run.write_recipe(changed)
    write_group(run)
    write_group(
        run, rank=1, reasons={"math": ["right", None]}, rewards={"math": [1, 0], "length": [-1, -2]}
    )
    (group,) = load_groups(find_groups(run), changed)
    assert group.totals == [2.0, 0, 1.0, -2.0]
    assert group.scores["length"] == [None, None, -1.0, -2.0]
    assert group.reasons["math"] == [None, None, "right", None]


def test_torn_lines_half_characters_and_unequal_lists_end_nothing(run):
    write_group(run)
    write_group(run, row=6, completions=["half \ud83d", "6"])
    write_group(run, row=7, tokens=[1])
    with (run.completions / "rank_0.jsonl").open("a") as file:
        file.write('{"step": 2, "row"')
    groups = list(load_groups(find_groups(run), run.read_recipe()))
    assert [each.row for each in groups] == [5, 6]
    assert groups[1].texts[0].startswith("half ")
    assert pack_training(read_material(run, "a")).completions == 4


def test_a_pack_gives_every_text_back(tmp_path):
    run = make_long_run(tmp_path, steps=20, completions=160, words=8)
    pack = pack_training(read_material(run, "a"))
    index, blocks = read(pack.index), [read(block) for block in pack.blocks]
    assert (pack.groups, pack.completions, pack.found) == (20, 160, 20)
    counts = [group[4] for group in index["groups"]]
    assert len(index["totals"]) == len(index["tokens"]) == list(accumulate(counts))[-1] == 160
    block, place = index["groups"][0][5:7]
    assert blocks[block][place]["t"][-1] == EVIL
    assert read(pack.prompts)[index["groups"][3][3]][1][0] == "user"
    assert index["totals"][0] == round(index["scores"][0][0] - 0.02, 6)


def test_where_all_is_too_much_whole_groups_are_kept_from_the_first_to_the_last(tmp_path):
    run = make_long_run(tmp_path, steps=300, completions=2400, words=30)
    everything = pack_training(read_material(run, "a"))
    most = everything.size // 3
    pack = pack_training(read_material(run, "a"), most)
    assert pack.size <= most
    assert 60 < pack.groups < 150
    assert pack.found == 300
    steps = [group[1] for group in read(pack.index)["groups"]]
    assert (steps[0], steps[-1]) == (1, 300)
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) - min(gaps) <= 1


def test_held_out_answers_stand_before_and_after_with_their_change(run):
    measure(run, [0.0, 1.0, 1.0], [1.0, 1.0, 0.0])
    pack = pack_held_out(read_material(run, "a"))
    index = read(pack.index)
    assert [(group[2], group[-1]) for group in index["groups"]] == [(0, 1), (1, 0), (2, -1)]
    assert index["stages"] == [0, 1] * 3
    assert read(pack.blocks[0])[0]["t"] == ["it is 0.0", "it is 1.0"]
    assert pack.has_changes


def test_a_run_without_completions_has_none(run):
    material = read_material(run, "a")
    assert pack_training(material) is None
    assert pack_held_out(material) is None
    write_samples(run, {"q": [1.0]})
    assert not pack_held_out(read_material(run, "a")).has_changes


def test_items_are_spread_with_both_ends():
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(3), 9) == [0, 1, 2]
    assert spread(range(5), 1) == [0]


def test_answers_stand_in_where_nothing_is_held_out(run):
    write_samples(run, {"2 + 3?": [0.0]}, when="answers", rewards=())
    pack = pack_held_out(read_material(run, "a"))
    index = read(pack.index)
    assert (index["rewards"], index["stages"], pack.has_changes) == ([], [1], False)
