import io
import json

from rich.console import Console

from grpo_cli.report.follower import Follower
from grpo_cli.report.live import LiveView, PlainView
from grpo_cli.report.panel import draw_sparkline
from grpo_cli.report.summary import RunReport
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record
from grpo_cli.units import format_duration
from tests.run_folders import make_run


def test_plain_lines_say_the_step_the_scores_and_the_time_left(tmp_path):
    out = io.StringIO()
    view = PlainView(Follower(make_run(tmp_path)), Console(file=out, width=300))
    view.refresh()
    lines = out.getvalue().splitlines()
    assert lines[2].startswith("step 3/10  reward 0.300  zero-signal 25%  tokens 13.0")
    assert lines[2].endswith("tokens/s 123  s/step 2.00  left 14s")
    assert lines[3] == "· training"
    view.refresh()
    assert out.getvalue().splitlines() == lines


def test_a_plain_line_says_what_is_left_after_groups_were_replaced(tmp_path):
    folder = make_run(tmp_path)
    left = {"dynamic_sampling/frac_reward_zero_std": 0.0625}
    record = {"event": "train", "step": 4, "frac_reward_zero_std": 0.5, **left}
    append_record(folder.metrics, record)
    out = io.StringIO()
    PlainView(Follower(folder), Console(file=out, width=300)).refresh()
    assert "zero-signal 50%  zero-signal left 6%" in out.getvalue()


def test_text_from_models_is_shown_as_text_not_as_markup(tmp_path):
    folder = make_run(tmp_path)
    sample = {
        "step": 3,
        "row": 0,
        "prompt": [{"role": "user", "content": "[bold]hi[/bold] [/nonsense]"}],
        "completions": ["[red]x[/red]\n[/]"],
        "tokens": [2],
        "clipped": [False],
        "rewards": {"math": [1.0]},
    }
    append_record(folder.completions / "rank_0.jsonl", sample)
    out = io.StringIO()
    view = LiveView(Follower(folder), Console(file=out, width=100, force_terminal=True))
    view.refresh()
    view.stopping()
    view.refresh()
    view.close()
    assert "[bold]hi[/bold] [/nonsense]" in out.getvalue()
    assert "[red]x[/red]" in out.getvalue()
    assert "step 3/10" in out.getvalue()


def test_a_view_of_an_empty_run_shows_its_phase(tmp_path):
    folder = RunFolder(tmp_path / "name" / "1")
    folder.completions.mkdir(parents=True)
    out = io.StringIO()
    view = LiveView(Follower(folder), Console(file=out, width=100, force_terminal=True))
    view.refresh()
    view.close()
    assert "starting" in out.getvalue()


def test_the_summary_compares_the_first_and_last_records(tmp_path):
    folder = make_run(tmp_path, rewards=[0.0] * 10 + [1.0] * 10)
    folder.evaluations.mkdir()
    folder.evaluations.joinpath("before.json").write_text(json.dumps({"rewards": {"math": 0.1}}))
    summary = RunReport(folder)
    change = summary.trend("reward")
    assert (change.first, change.last, change.width, change.is_noise) == (0.0, 1.0, 4, False)
    assert summary.summary_json()["before"] == {"rewards": {"math": 0.1}}
    assert summary.summary_json()["after"] is None


def test_sparklines_and_durations():
    assert draw_sparkline([0, 1, None, 2]) == "▁▄█"
    assert draw_sparkline([1.0]) == ""
    assert draw_sparkline([3.0, 3.0]) == "▁▁"
    assert [format_duration(s) for s in (0, 59.6, 75, 3661)] == ["0s", "1m00s", "1m15s", "1h01m"]
