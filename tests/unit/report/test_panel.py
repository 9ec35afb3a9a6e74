"""The panel fits the terminal it is in, says what is known, and shows a model's text as text."""

import io
import unicodedata
from dataclasses import replace

import pytest
from rich.console import Console

from grpo_cli.analysis.diagnosis.rule import Symptom
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report import follower
from grpo_cli.report.follower import Follower
from grpo_cli.report.live import LiveView, PlainView, choose_view
from grpo_cli.report.panel import PanelView, draw_sparkline
from grpo_cli.report.wording import clean_lines, clean_text, format_event
from grpo_cli.runs.folder import StatusFile
from grpo_cli.runs.metrics import append_record
from tests.run_folders import PLAIN, make_run, play, write_episodes

SIZES = [(80, 24), (120, 40), (60, 20), (30, 8), (200, 60), (20, 3)]
SYMPTOM = Symptom(
    "92 % of the groups had equal rewards",
    "try easier prompts",
    why="They teach nothing.",
    rule="no_signal",
    step=3,
)


@pytest.fixture
def make_sick(monkeypatch):
    """Has the rules find a symptom of a run that showed last at some step."""

    def make(run, step):
        run.write_recipe(Recipe.model_validate(PLAIN))
        monkeypatch.setattr(follower, "diagnose", lambda history: [replace(SYMPTOM, step=step)])

    return make


def sample(rank=0, step=3, when=1.0, text="The answer is 13.", prompt="What is 5 + 8?"):
    return {
        "step": step,
        "row": 0,
        "time": when,
        "split": "train",
        "prompt": [{"role": "user", "content": prompt}],
        "completions": [text, "other"],
        "tokens": [8, 2],
        "clipped": [True, False],
        "rewards": {"math": [1.0, 0.0], "brevity": [None, 0.5]},
    }


def make_busy_run(tmp_path, steps=50, rewards=("math", "brevity")):
    run = make_run(tmp_path, rewards=())
    for step in range(1, steps + 1):
        append_record(
            run.metrics,
            {
                "event": "train",
                "step": step,
                "total_steps": 100,
                "reward": step / steps,
                **{f"rewards/{name}/mean": step / 100 for name in rewards},
                "reward_std": 0.2,
                "frac_reward_zero_std": 0.25,
                "completions/mean_length": 100.0 - step,
                "completions/clipped_ratio": 0.5,
                "entropy": 1.5,
                "kl": 0.001,
                "grad_norm": 0.5,
                "learning_rate": 1e-5,
                "step_time": 8.0,
                "tokens_per_s": 123.4,
                "time/sampling": 6.0,
                "time/sync": 0.25,
                "time/scoring": 0.1,
                "time/learning": 1.5,
            },
        )
    StatusFile(run.status).update(total_steps=100, step=steps)
    return run


def draw(follower, width=80, height=24, notice=""):
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, no_color=True)
    panel = PanelView(follower)
    panel.notice = notice
    console.print(panel)
    return out.getvalue().replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")


def read(run):
    follower = Follower(run)
    follower.read()
    return follower


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("rewards", [("math",), tuple(f"reward_{n}" for n in range(20))])
def test_the_panel_fits_whatever_it_has_to_say(tmp_path, make_sick, width, height, rewards):
    run = make_busy_run(tmp_path, rewards=rewards)
    long = "数えて\tlong words " * 500
    append_record(run.completions / "rank_0.jsonl", sample(text=long, prompt=long))
    make_sick(run, step=50)
    follower = read(run)
    lines = draw(follower, width, height, notice="stopping after this step").splitlines()
    assert len(lines) < max(height, 4)
    for line in lines:
        cells = sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in line)
        assert cells <= width, line


def test_everything_is_said_in_a_terminal_of_the_usual_size(tmp_path, make_sick):
    run = make_busy_run(tmp_path)
    append_record(run.completions / "rank_0.jsonl", sample())
    make_sick(run, step=50)
    shown = draw(read(run))
    for part in (
        "step 50/100",
        "left 6m32s",
        "reward   1.000",
        "math 0.500",
        "brevity 0.500",
        "zero-signal 25%",
        "tokens   50.0",
        "clipped 50%",
        "entropy  1.50",
        "kl 0.0010",
        "grad 0.5",
        "123 tokens/s",
        "sampling 6.0 s",
        "sync 0.25 s",
        "scoring 0.10 s",
        "learning 1.5 s",
        "7.85 s/step",
        "newest sample · step 3 · 8 tokens · cut off",
        "math 1.00  brevity –",
        "» What is 5 + 8?",
        "« The answer is 13.",
    ):
        assert part in shown, part
    assert "▁" in shown
    assert "█" in shown


def test_a_fresh_warning_stays_and_an_old_one_goes(tmp_path, make_sick):
    run = make_busy_run(tmp_path, steps=50)
    told = "✗ no_signal: 92 % of the groups had equal rewards. Fix: try easier"
    make_sick(run, step=45)
    assert told in draw(read(run))
    make_sick(run, step=20)
    assert told not in draw(read(run))


def test_a_single_reward_is_not_said_twice(tmp_path):
    follower = read(make_run(tmp_path))
    assert "math" not in draw(follower)


def test_older_runs_without_phases_are_shown_without(tmp_path):
    shown = draw(read(make_run(tmp_path)))
    assert "2.00 s/step" in shown
    assert "sampling" not in shown


def test_the_newest_sample_of_all_processes_is_shown(tmp_path):
    run = make_busy_run(tmp_path)
    append_record(run.completions / "rank_0.jsonl", sample(when=5.0, text="older"))
    append_record(run.completions / "rank_1.jsonl", sample(when=9.0, text="newest"))
    append_record(run.completions / "rank_2.jsonl", sample(when=7.0, text="between"))
    follower = read(run)
    assert "« newest" in draw(follower)
    append_record(run.completions / "rank_2.jsonl", sample(when=11.0, text="newer yet"))
    follower.read()
    assert "« newer yet" in draw(follower)


@pytest.mark.parametrize(
    "text",
    ["\x1b]0;title\x07\x1b[2Jgone", "a\x00b\x9b31mred", "left\u202eright\u200b", "[bold]x[/]"],
)
def test_text_of_a_model_cannot_command_the_terminal(tmp_path, text):
    run = make_busy_run(tmp_path)
    append_record(run.completions / "rank_0.jsonl", sample(text=text, prompt=text))
    shown = draw(read(run))
    assert "\x1b" not in shown
    kinds = {unicodedata.category(each) for each in shown.replace("\n", "")}
    assert not kinds & {"Cc", "Cf", "Cs"}
    assert text.startswith("[") <= (text in shown)


def test_an_episode_is_shown_turn_by_turn(tmp_path):
    run = make_busy_run(tmp_path)
    turns = {"episode/turns": 2.5, "tools/call_frequency": 1.5, "tools/failure_frequency": 0.5}
    append_record(run.metrics, {"event": "train", "step": 51, "reward": 0.5, **turns})
    write_episodes(run, [play(3, "36\x1b[2J"), play(1)], rewards={"math": [1.0, 0.0]})
    shown = draw(read(run), 100, 40)
    for part in (
        "turns    2.5",
        "calls 1.5  failed 50%",
        "27 tokens · answered, 3 turns, 2 calls, 1 failed",
        '→ calculate {"text": "12 * 1"}',
        "» 36[2J",
        "« It is 36.",
    ):
        assert part in shown


def test_a_measurement_shows_how_far_it_is_and_how_long_it_takes(tmp_path):
    run = make_run(tmp_path, rewards=())
    status = StatusFile(run.status)
    follower = Follower(run)
    for done in (10, 20):
        status.update(phase="measuring before training", done=done, planned=100, detail="prompts")
        follower.read()
    assert "20/100 prompts" in draw(follower)
    assert "━" in draw(follower)
    assert follower.phase_left() is not None


def test_the_measurement_to_come_is_part_of_the_time_left(tmp_path):
    run = make_busy_run(tmp_path)
    alone = read(run).seconds_left()
    append_record(run.metrics, {"event": "measure", "when": "before", "seconds": 100.0})
    assert read(run).seconds_left() == pytest.approx(alone + 100)


def test_the_first_step_of_an_attempt_is_left_out_of_the_time_left(tmp_path):
    run = make_run(tmp_path, rewards=())
    for step, seconds in enumerate((60.0, 2.0, 2.0), start=1):
        append_record(run.metrics, {"event": "train", "step": step, "step_time": seconds})
    assert read(run).seconds_left() == pytest.approx(7 * 2.0, rel=0.1)
    append_record(run.metrics, {"event": "resume", "step": 3, "attempt": 2})
    for step, seconds in enumerate((60.0, 3.0, 3.0), start=4):
        append_record(run.metrics, {"event": "train", "step": step, "step_time": seconds})
    assert read(run).seconds_left() == pytest.approx(4 * 3.0, rel=0.1)


def test_lines_of_held_out_results_say_how_answers_were_drawn():
    measured = {"event": "measure", "when": "after", "prompts": 7, "rewards": {"own": 0.5}}
    greedy = format_event({**measured, "temperature": 0.0})
    assert greedy == "after training, 7 held-out prompts, greedy: own 0.500"
    assert format_event(measured) == "after training, 7 held-out prompts: own 0.500"
    evaluated = {"event": "eval", "step": 4, "eval_reward": 0.19}
    assert format_event(evaluated, 0.9) == "step 4 eval reward 0.190, sampled at temperature 0.9"
    assert format_event(evaluated) == "step 4 eval reward 0.190"
    assert format_event({**evaluated, "eval_reward": "x"}) is None
    warmup = {"event": "warmup", "warmup_step": 1, "total_steps": 2, "loss": None}
    assert format_event(warmup) == "warm-up step 1/2 loss –"


@pytest.mark.parametrize("state", ["completed", "running"])
def test_a_run_that_ends_leaves_its_warnings_to_the_summary(tmp_path, make_sick, state):
    run = make_run(tmp_path)
    StatusFile(run.status).update(state=state)
    if state == "running":
        run.stop_request.parent.mkdir(exist_ok=True)
        run.stop_request.touch()
    make_sick(run, step=3)
    assert Follower(run).read()[1] == []


def test_a_run_that_goes_on_is_followed_from_its_checkpoint(tmp_path):
    run = make_busy_run(tmp_path, steps=6)
    follower = read(run)
    lines = run.metrics.read_bytes().splitlines(True)
    run.metrics.write_bytes(b"".join(lines[:4]))
    append_record(run.metrics, {"event": "resume", "step": 4, "attempt": 2})
    append_record(run.metrics, {"event": "train", "step": 5, "reward": 0.1})
    records, _ = follower.read()
    assert [each["event"] for each in records] == ["resume", "train"]
    assert [each["step"] for each in follower.run.steps] == [1, 2, 3, 4, 5]


def test_warnings_are_printed_once_beside_the_steps(tmp_path, make_sick):
    for make, kind in ((PlainView, "plain"), (LiveView, "live")):
        run = make_run(tmp_path / kind)
        out = io.StringIO()
        console = Console(file=out, width=300, height=50, force_terminal=kind == "live")
        make_sick(run, step=3)
        view = make(Follower(run), console)
        view.refresh()
        view.refresh()
        view.close()
        assert out.getvalue().count("They teach nothing. Fix: try easier prompts") == 1


def test_plain_lines_begin_with_the_last_of_what_has_been(tmp_path):
    out = io.StringIO()
    view = PlainView(Follower(make_busy_run(tmp_path)), Console(file=out, width=300), history=5)
    view.refresh()
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("· 45 earlier lines are left out")
    assert [line.split()[1] for line in lines[1:6]] == [f"{n}/100" for n in range(46, 51)]


@pytest.mark.parametrize(
    ("terminal", "term", "encoding", "kind"),
    [
        (True, "xterm", "utf-8", LiveView),
        (True, "dumb", "utf-8", PlainView),
        (True, "xterm", "ascii", PlainView),
        (False, "xterm", "utf-8", PlainView),
    ],
)
def test_only_a_terminal_that_can_redraw_gets_the_panel(tmp_path, terminal, term, encoding, kind):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, force_terminal=terminal, _environ={"TERM": term})
    view = choose_view(Follower(make_run(tmp_path)), console)
    view.close()
    assert isinstance(view, kind)


def test_records_that_are_damaged_end_no_view(tmp_path):
    run = make_run(tmp_path)
    for record in (
        {"event": "measure"},
        {"event": "resume"},
    ):
        append_record(run.metrics, record)
    run.metrics.open("a").write("{torn\n")
    out = io.StringIO()
    PlainView(Follower(run), Console(file=out, width=200)).refresh()
    assert len(out.getvalue().splitlines()) == 4


def test_bars_are_as_wide_as_asked_and_show_the_whole_course():
    assert draw_sparkline([0.0] * 50 + [1.0] * 50, 10) == "▁" * 5 + "█" * 5
    assert len(draw_sparkline(list(range(1000)), 37)) == 37


def test_lines_keep_their_shape_without_what_a_terminal_obeys():
    assert clean_lines("a\n    b\x1b[2J\x07\u202e\n") == "a\n    b[2J\n"
    assert clean_text(" a\tb\r\n\x1bc ") == "a b c"
