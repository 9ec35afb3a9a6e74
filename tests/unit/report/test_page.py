"""The page of a run: its verdict, a chart for each metric, the expected band, and nothing from elsewhere."""

import json
import re

import pytest

pytest.importorskip("plotly")

from grpo_cli.errors import UsageError
from grpo_cli.report.page import write_report
from grpo_cli.runs.status import StatusFile
from tests.run_folders import make_finished_run

EXPECT = {"metrics": [{"metric": "reward", "step": 40, "band": [0.55, 0.85], "window": 4}]}


def read_page(runs, **more):
    """The page without plotly's own script."""
    text = write_report([run.path for run in runs], None, **more).read_text()
    return re.sub(r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL)


def test_the_band_of_the_recipe_is_drawn_beside_the_verdict(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.0] * 36 + [0.5, 0.7, 0.6, 0.8], expect=EXPECT)
    page = read_page([run])
    assert "0.650, inside\n 0.550 to 0.850 at step 40" in page
    (shapes,) = re.findall(r'"shapes":(\[.*?\])', page)
    (shape,) = json.loads(shapes)
    assert (shape["x0"], shape["x1"], shape["y0"], shape["y1"]) == (37, 40, 0.55, 0.85)


def test_runs_lie_over_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [make_finished_run(tmp_path, seed=seed) for seed in (1, 2)]
    page = read_page(runs)
    assert page.count('"name":"sums\\u002fseed-1"') == page.count('"name":"sums\\u002fseed-2"') > 0
    with pytest.raises(UsageError, match=r"report.html exists"):
        read_page(runs)
    assert read_page(runs, force=True)


def test_a_runs_own_page_is_written_anew_and_loads_nothing(tmp_path):
    run = make_finished_run(tmp_path)
    assert read_page([run])
    assert read_page([run])
    page = (run.path / "report.html").read_text()
    assert not re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=|<link", page)


def test_what_a_run_says_stays_text(tmp_path):
    run = make_finished_run(tmp_path)
    evil = "</script><script>alert(1)</script>"
    StatusFile(run.status).update(state="failed", reason=evil)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"event": "train", "step": 41, f"rewards/{evil}/mean": 1.0}) + "\n")
    page = read_page([run])
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is not a run folder"):
        write_report([tmp_path], None)
