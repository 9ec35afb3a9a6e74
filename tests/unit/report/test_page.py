"""The page of a run: what stands on it, that it is one file, and that what a run says stays text."""

import re

import pytest

pytest.importorskip("plotly")

from grpo_cli.errors import UsageError
from grpo_cli.report.page import write_report
from grpo_cli.runs.folder import StatusFile
from grpo_cli.runs.metrics import append_record
from tests.long_runs import EVIL, make_long_run
from tests.packed_pages import unpack, visible
from tests.run_folders import make_finished_run, write_samples
from tests.unit.report.test_verdict import measure

EXPECT = {"metrics": [{"metric": "reward", "step": 40, "band": [0.55, 0.85], "window": 4}]}


def write_page(*runs, **more):
    return write_report([run.path for run in runs], None, **more).read_text()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    return make_long_run(tmp_path_factory.mktemp("long"), steps=60, completions=240, words=10)


def test_a_page_holds_every_section_of_a_finished_run(long_run):
    page = write_page(long_run)
    text = visible(page)
    assert "held-out accuracy rose from" in text
    for heading in (
        "Charts", "Held-out prompts, before and after", "Completions through training",
        "Reward functions", "Where the time went", "Batch arithmetic", "Manifest",
    ):  # fmt: skip
        assert heading in text
    assert "240 completions in 30 groups" in text
    assert "model.path org/model –" in text
    assert "completions per optimizer step 8 per micro-step × 1 accumulation = 8" in text
    assert "data.train_rows 7000" in text
    # The environment of a launch may hold keys.
    assert "not-to-be-seen" not in page


def test_a_page_loads_nothing_and_a_runs_own_is_written_anew(long_run):
    assert write_page(long_run)
    page = write_page(long_run)
    without = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"<(?:script|img|iframe|link|object)\b|\ssrc=|url\(|@import", without)
    assert "default-src 'none'" in page


def test_what_a_run_says_stays_text(tmp_path):
    run = make_finished_run(tmp_path)
    StatusFile(run.status).update(state="failed", reason=EVIL, traceback=EVIL)
    run.recipe.write_text(EVIL)
    append_record(run.metrics, {"event": "train", "step": 41, f"rewards/{EVIL}/mean": 1.0})
    write_samples(run, {EVIL: [1.0]})
    page = write_page(run)
    assert "window.pwned" in page
    assert "<script>window.pwned" not in page
    assert "<img" not in page
    assert "<!--" not in page
    # Every script element but ours is data in base64, which cannot end it.
    scripts = re.findall(r"<script\b[^>]*>", page)
    assert [each for each in scripts if 'type="text/plain"' not in each] == ["<script>"]


def test_the_traceback_of_a_failure_is_folded_away_under_problems(tmp_path):
    run = make_finished_run(tmp_path)
    reason = "reward 'a' failed: ValueError. Fix: give `a` a default\nTraceback (most recent call last):\n  there"
    StatusFile(run.status).update(state="failed", reason=reason, traceback="Traceback: here")
    page = write_page(run)
    problems = page[page.index('id="problems"') : page.index('id="held-out"')]
    seen = "reward &#39;a&#39; failed: ValueError. Fix: give <code>a</code> a default"
    assert f"<strong>{seen}</strong>" in problems
    assert re.search(r"<details><summary>All of it.*there\n?</pre>", problems, re.DOTALL)
    assert re.search(r"<details><summary>Traceback</summary>\s*<pre>Traceback: here", problems)


def test_a_page_begins_with_its_result_and_held_out_numbers_stand_before_the_other_charts(long_run):
    page = write_page(long_run)
    order = [page.index(f'id="{name}"') for name in ("result", "held-out", "charts")]
    assert order == sorted(order)
    result = page[order[0] : order[1]]
    assert "<code>reward</code>" in result
    assert "Held-out <code>accuracy/math</code>" in result
    assert "<code>reward</code>" not in page[order[2] :]


def test_the_band_of_the_recipe_stands_beside_the_value_and_in_the_chart(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.0] * 36 + [0.5, 0.7, 0.6, 0.8], expect=EXPECT)
    page = write_page(run)
    assert "reward 40 0.650 0.550 to 0.850 inside" in visible(page)
    (chart,) = [each for each in unpack(page, "chart-data")["charts"] if each["metric"] == "reward"]
    assert chart["bands"] == [{"from": 37, "to": 40, "low": 0.55, "high": 0.85}]


def test_it_is_the_change_that_has_no_interval_if_all_prompts_changed_alike(tmp_path):
    run = make_finished_run(tmp_path)
    measure(run, [0.0] * 20, [1.0] * 20)
    assert "No interval of the change in accuracy/math" in visible(write_page(run))


def test_runs_lie_over_each_other_with_their_differences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [
        make_finished_run(tmp_path, seed, training={"max_steps": 40, "learning_rate": rate})
        for seed, rate in ((1, 1e-5), (2, 2e-5))
    ]
    for run, rate in zip(runs, (0.2, 0.9), strict=True):
        scores = {f"question {row}": [float(row % 10 < 10 * rate)] for row in range(50)}
        write_samples(run, scores)
    append_record(runs[1].metrics, {"event": "train", "step": 41, "kl": 0.5})
    assert "Measured with other settings or prompts" not in visible(write_page(*runs, force=True))
    write_samples(runs[1], {f"another {row}": [float(row % 10 < 9)] for row in range(50)})
    warned = "Measured with other settings or prompts than sums/seed-1: sums/seed-2"
    assert warned in visible(write_page(*runs, force=True))
    write_samples(runs[1], scores)
    page = write_page(*runs, force=True)
    data, text = unpack(page, "chart-data"), visible(page)
    assert data["runs"] == ["sums/seed-1", "sums/seed-2"]
    assert {each["metric"]: len(each["lines"]) for each in data["charts"]} == {
        "reward": 2,
        "kl": 1,
    }
    assert "Unchanged: loss 0." in text
    assert "Shared by all: state completed, " in text
    # The better run first, and charts before tables.
    ranking = text[text.index("Ranked by held-out accuracy/math") : text.index("Shared by all")]
    assert "sums/seed-2 0.900" in ranking
    assert ranking.index("sums/seed-2") < ranking.index("sums/seed-1")
    assert "learning rate" in ranking
    order = [
        page.index(each)
        for each in (
            'class="ranking', 'id="result"', 'id="charts"', 'id="differences"', 'id="held-out"',
        )
    ]  # fmt: skip
    assert order == sorted(order)
    # The paired differences of equal metrics are in one row.
    assert "accuracy/ math = reward = rewards/ math +0.700" in text
    assert "training.learning_rate 1e-05 2e-05" in text
    assert "Better: +0.700 in accuracy/math" in text
    with pytest.raises(UsageError, match=r"report.html exists"):
        write_page(*runs)
    assert write_page(*runs, force=True)


def test_a_run_in_progress_says_so_and_one_without_anything_has_a_page_too(tmp_path):
    run = make_finished_run(tmp_path, rewards=(), accuracy=None, state="running")
    text = visible(write_page(run))
    assert "Not finished when this page was written: 0 of 40 steps" in text
    assert "run it again to update the page" in text
    assert "Nothing was logged yet." in text


def test_torn_records_are_left_out_of_the_page_and_a_damaged_file_is_named(tmp_path):
    run = make_long_run(tmp_path, steps=30, completions=80, words=5)
    lines = (run.completions / "rank_0.jsonl").read_text().splitlines()
    torn = [lines[0], lines[1][:40], *lines[2:]]
    (run.completions / "rank_0.jsonl").write_text("\n".join(torn))
    (run.evaluations / "after.jsonl").write_text("{")
    with run.metrics.open("a") as file:
        file.write('{"event": "train", "st')
    text = visible(write_page(run))
    assert "72 completions in 9 groups" in text
    assert "Completed 30 of 30 steps" in text
    for file in (run.evaluations / "before.json", run.manifest, run.resolved):
        whole = file.read_text() if file.is_file() else "{}"
        file.write_text("[1")
        with pytest.raises(UsageError, match=f"{file.name} is damaged"):
            write_page(run)
        file.write_text(whole)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is not a run folder"):
        write_report([tmp_path], None)
