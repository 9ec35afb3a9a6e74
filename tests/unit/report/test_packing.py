"""Groups of a run packed for its page: parts merged, damage passed over, and no more than there is room for."""

import base64
import gzip
import json
from itertools import accumulate, pairwise

import pytest

from grpo_cli.report.packing import pack_held_out, pack_training, spread
from grpo_cli.report.summary import RunReport
from tests.long_runs import EVIL, make_long_run
from tests.run_folders import make_finished_run, play, write_episodes, write_samples
from tests.unit.report.test_verdict import measure


def read(packed):
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.fixture
def run(tmp_path):
    return make_finished_run(tmp_path)


def test_a_pack_gives_every_text_back(tmp_path):
    run = make_long_run(tmp_path, steps=20, completions=160, words=8)
    pack = pack_training(RunReport(run, "a"))
    index, blocks = read(pack.index), [read(block) for block in pack.blocks]
    assert (pack.groups, pack.completions, pack.available) == (20, 160, 20)
    counts = [group[4] for group in index["groups"]]
    assert len(index["totals"]) == len(index["tokens"]) == list(accumulate(counts))[-1] == 160
    block, place = index["groups"][0][5:7]
    assert blocks[block][place]["t"][-1] == EVIL
    assert read(pack.prompts)[index["groups"][3][3]][1][0] == "user"
    assert index["totals"][0] == round(index["scores"][0][0] - 0.02, 6)


def test_where_all_is_too_much_whole_groups_are_kept_from_the_first_to_the_last(tmp_path):
    run = make_long_run(tmp_path, steps=300, completions=2400, words=30)
    everything = pack_training(RunReport(run, "a"))
    most = everything.size // 3
    pack = pack_training(RunReport(run, "a"), most)
    assert pack.size <= most
    assert 60 < pack.groups < 150
    assert pack.available == 300
    steps = [group[1] for group in read(pack.index)["groups"]]
    assert (steps[0], steps[-1]) == (1, 300)
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) - min(gaps) <= 1


def test_held_out_answers_stand_before_and_after_with_their_change(run):
    measure(run, [0.0, 1.0, 1.0], [1.0, 1.0, 0.0])
    pack = pack_held_out(RunReport(run, "a"))
    index = read(pack.index)
    assert [(group[2], group[-1]) for group in index["groups"]] == [(0, 1), (1, 0), (2, -1)]
    assert index["stages"] == [0, 2] * 3
    assert read(pack.blocks[0])[0]["t"] == ["it is 0.0", "it is 1.0"]
    assert pack.has_changes


def test_answers_after_the_warm_up_stand_in_between(run):
    measure(run, [0.0, 0.0], [1.0, 1.0], [0.0, 1.0])
    index = read(pack_held_out(RunReport(run, "a")).index)
    assert index["stages"] == [0, 1, 2] * 2
    assert [group[-1] for group in index["groups"]] == [1, 1]


def test_images_are_packed_once_where_their_copies_are_known(run):
    run.thumbnails.mkdir()
    (run.thumbnails / "rank_0.jsonl").write_text('{"thumbnail": "ab", "jpeg": "/9j/"}\n')
    known = {"type": "image", "path": "/data/charts/1.png", "thumbnail": "ab"}
    content = [known, {"type": "text", "text": "or"}, {"type": "image", "thumbnail": "lost"}, known]
    write_samples(run, [([{"role": "user", "content": content}], [1.0, 0.0])])
    pack = pack_held_out(RunReport(run, "a"))
    assert read(pack.images) == ["/9j/"]
    shown = [0, "[image charts/1.png]"]
    whole = "[image charts/1.png]or[image][image charts/1.png]"
    assert read(pack.prompts) == [[["user", whole, [shown, "or", "[image]", shown]]]]
    write_samples(run, [("plain", [1.0])])
    pack = pack_held_out(RunReport(run, "a"))
    assert (pack.images, read(pack.prompts)) == ("", [[["", "plain"]]])


def test_episodes_are_packed_turn_by_turn(run):
    write_episodes(run, [play(2), play(1, end="turns")])
    write_episodes(
        run, [([{"tool_calls": [{"x": 3}]}, {"content": [1]}, *play(1)[0]], {"tokens": 1})], 2
    )
    pack = pack_training(RunReport(run, "a"))
    first, damaged = read(pack.blocks[0])
    assert first["t"] == ["It is 36.", "It is 36."]
    assert first["m"][0] == [
        ["assistant", 'let me see (1)\n→ calculate {"text": "12 * 1"}', True],
        ["tool calculate", "36", False],
        ["assistant", "It is 36.", True],
    ]
    assert first["e"] == ["answered, 2 turns, 1 call", "out of turns, 1 turn, 0 calls"]
    assert damaged["m"][0][-1] == ["assistant", "It is 36.", True]


def test_held_out_episodes_are_packed_as_those_of_training(run):
    measure(run, [0.0], [1.0])
    path = run.evaluations / "after.jsonl"
    messages, episode = play(2)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    samples = [{**each, "messages": messages, "episode": episode} for each in samples]
    lines = "".join(json.dumps(each) + "\n" for each in samples)
    path.write_text(lines)
    # Those before are of a version that did not write them.
    assert "m" not in read(pack_held_out(RunReport(run, "a")).blocks[0])[0]
    (run.evaluations / "before.jsonl").write_text(lines)
    block = read(pack_held_out(RunReport(run, "a")).blocks[0])[0]
    assert block["e"] == ["answered, 2 turns, 1 call"] * 2


def test_a_run_without_completions_has_none(run):
    material = RunReport(run, "a")
    assert pack_training(material) is None
    assert pack_held_out(material) is None
    write_samples(run, {"q": [1.0]})
    assert not pack_held_out(RunReport(run, "a")).has_changes


def test_items_are_spread_with_both_ends():
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(3), 9) == [0, 1, 2]
    assert spread(range(5), 1) == [0]


def test_answers_stand_in_where_nothing_is_held_out(run):
    write_samples(run, {"2 + 3?": [0.0]}, when="answers", rewards=())
    pack = pack_held_out(RunReport(run, "a"))
    index = read(pack.index)
    assert (index["rewards"], index["stages"], pack.has_changes) == ([], [2], False)
