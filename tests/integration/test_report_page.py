"""Report pages in a real browser: charts drawn, filters at work, no text of a model run, nothing loaded."""

import base64
import json
import sys

import pytest

from grpo_cli.report.page import write_report
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.thumbnails import encode_jpeg
from tests.chromium import Page, find_chromium
from tests.long_runs import EVIL, make_long_run
from tests.run_folders import make_finished_run, play, write_episodes, write_samples

pytest.importorskip("plotly")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine"),
    pytest.mark.skipif(
        sys.platform == "win32", reason="the protocol's pipe needs POSIX descriptors"
    ),
]

DRAWN = "[...document.querySelectorAll('.chart')].filter((each) => each.querySelector('.main-svg path.js-line'))"
TRAINING, HELD_OUT = "[data-browser=training]", "[data-browser=held-out]"
BYTES = 20_000_000


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    run = make_long_run(tmp_path_factory.mktemp("small"), steps=80, completions=320, words=12)
    return write_report([run.path], None)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    root = tmp_path_factory.mktemp("several")
    rates = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
    runs = []
    for seed, rate in enumerate(rates):
        training = {"max_steps": 40, "learning_rate": rate}
        run = make_long_run(root / str(seed), 40, 80, 12, seed=seed, training=training)
        runs.append(run.path.rename(run.path.with_name(f"rate-{rate:g}")))
    return write_report(runs, root / "report.html")


def open_all(page):
    """Unfold everything."""
    page.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")


def show(page, selector):
    page.ask(f"document.querySelector('{selector}').scrollIntoView()")


def count(page, selector):
    return page.ask(f"document.querySelector('{selector} .count')?.textContent ?? ''")


def wait_for_count(page, selector, text):
    page.wait_for(f"document.querySelector('{selector} .count')?.textContent.includes({text!r})")


def assert_quiet(page):
    """Nothing was loaded but the page, nothing went wrong, and no model's text was run."""
    assert page.problems == []
    assert [each for each in page.requests if not each.startswith(("file:", "data:"))] == []
    assert len(page.requests) == 1
    assert page.ask("typeof window.pwned") == "undefined"


def test_charts_are_drawn_when_they_come_into_view_and_follow_the_theme(small):
    with Page() as page:
        page.open(small)
        show(page, "#charts")
        page.wait_for(f"{DRAWN}.length > 1")
        assert page.ask(f"{DRAWN}.length < document.querySelectorAll('.chart').length")
        first = f"{DRAWN}[0].querySelector('path.js-line').style.stroke"
        light = page.ask(first)
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        page.send("Emulation.setEmulatedMedia", features=[dark])
        page.wait_for(f"{first} !== {light!r}")
        assert_quiet(page)


@pytest.mark.parametrize("name", ["small", "several"])
def test_reward_and_held_out_chart_are_on_the_first_screen(name, request):
    with Page(1280, 800) as page:
        page.open(request.getfixturevalue(name))
        page.wait_for("document.querySelectorAll('#result .chart .main-svg .xtick').length > 4")
        charts = "[...document.querySelectorAll('#result .chart')]"
        ends = page.ask(f"{charts}.map((each) => each.getBoundingClientRect().bottom)")
        assert len(ends) == 2
        assert max(ends) <= 800
        # Before and after, and of six runs each.
        bars = {"small": 2, "several": 12}[name]
        for error, chart in (("yerror", "[data-chart]"), ("xerror", "[data-held-out]")):
            found = f"document.querySelectorAll('#result {chart} .errorbar path.{error}').length"
            page.wait_for(f"{found} === {bars}")
        # Each caption is one line, so that the charts of a row stand side by side.
        open_all(page)
        captions = "[...document.querySelectorAll('figcaption')]"
        assert page.ask(f"{captions}.filter((each) => each.clientHeight > 28).length") == 0
        assert_quiet(page)


@pytest.mark.parametrize("name", ["small", "several"])
def test_no_table_runs_off_a_narrow_screen(name, request):
    with Page(400, 800) as page:
        page.open(request.getfixturevalue(name))
        open_all(page)
        tables = "[...document.querySelectorAll('.scroll')]"
        wide = f"{tables}.filter((each) => each.scrollWidth > each.clientWidth)"
        assert page.ask(f"{wide}.map((each) => each.textContent)") == []
        assert page.ask("document.documentElement.scrollWidth") <= 400


def test_the_end_of_a_long_prompt_is_shown_where_its_question_stands(tmp_path):
    run = make_long_run(tmp_path, steps=20, completions=80, words=12)
    path = run.completions / "rank_0.jsonl"
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    for group in groups:
        # Solved examples, in other words each time.
        solved = [f"{group['row']} Solved {n}: {'words ' * 60}\nAnswer: {n}" for n in range(9)]
        asked = group["prompt"][-1]["content"]
        group["prompt"] = "\n\n".join([*solved, asked])
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    with Page() as page:
        page.open(write_report([run.path], None), "#step=1&row=0")
        page.wait_for("document.querySelectorAll('[data-browser=training] .card').length === 8")
        box = "document.querySelector('[data-browser=training] .prompt')"
        assert page.ask(f"{box}.scrollTop") > 0
        assert page.ask(f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight") <= 1
        listed = page.ask(
            "[...document.querySelectorAll('[data-browser=training] .asked')].map((each) => each.textContent)"
        )
        assert not any("Solved" in each for each in listed)


def test_filters_narrow_the_list_and_a_group_is_shown_side_by_side(small):
    with Page() as page:
        page.open(small)
        show(page, TRAINING)
        wait_for_count(page, TRAINING, "40 groups, 320 completions")
        page.wait_for("document.querySelectorAll('[data-browser=training] .card').length === 8")
        page.fill(f"{TRAINING} [name=stepFrom]", "41")
        wait_for_count(page, TRAINING, "20 of 40 groups")
        page.fill(f"{TRAINING} [name=stepFrom]", "")
        page.fill(f"{TRAINING} [name=text]", "SUM NUMBER 17:")
        wait_for_count(page, TRAINING, "1 of 40 groups")
        page.ask("document.querySelector('[data-browser=training] .item').click()")
        page.wait_for(
            "document.querySelector('[data-browser=training] mark')?.textContent === 'Sum number 17:'"
        )
        assert "row=17" in page.ask("location.hash")
        page.fill(f"{TRAINING} [name=text]", "")
        page.fill(f"{TRAINING} [name=score]", "math")
        page.fill(f"{TRAINING} [name=scoreTo]", "-1")
        wait_for_count(page, TRAINING, "0 of 40 groups")
        page.fill(f"{TRAINING} [name=scoreTo]", "")
        page.ask("document.querySelector('[data-browser=training] [name=clipped]').click()")
        # Those that were cut off stand out from the others of their group.
        cards = "document.querySelectorAll('[data-browser=training] .card"
        page.wait_for(f"{cards}:not(.other) .badge').length === {cards}:not(.other)').length")
        page.wait_for(f"{cards}.other').length > 0 && {cards}:not(.other)').length > 0")
        assert_quiet(page)


def test_scores_stand_with_their_weights_so_that_the_total_adds_up(small):
    with Page() as page:
        page.open(small, "#step=1&row=0")
        page.wait_for("document.querySelectorAll('[data-browser=training] .card').length === 8")
        scores = page.ask(
            "[...document.querySelector('[data-browser=training] .scores').querySelectorAll('dd')]"
            ".map((each) => each.textContent)"
        )
        assert scores[0].endswith(" × 1")
        assert scores[1] == "−0.1 × 0.2"


def test_a_completion_that_holds_a_script_stays_text(small):
    with Page() as page:
        page.open(small, "#step=1&row=0")
        page.wait_for("document.querySelectorAll('[data-browser=training] .card').length === 8")
        texts = page.ask(
            "[...document.querySelectorAll('[data-browser=training] .card .text')].map((each) => each.textContent)"
        )
        assert texts[-1] == EVIL
        page.fill(f"{TRAINING} [name=text]", "<img")
        wait_for_count(page, TRAINING, "1 of 40 groups")
        page.wait_for(
            "document.querySelector('[data-browser=training] mark')?.textContent === '<img'"
        )
        assert page.ask("document.querySelectorAll('img').length") == 0
        assert_quiet(page)


def test_an_episode_is_shown_turn_by_turn_with_what_is_not_learned_from(tmp_path):
    run = make_finished_run(tmp_path)
    write_episodes(run, [play(2, EVIL), play(9)])
    write_report([run.path], None)
    with Page() as page:
        page.open(run.report, "#step=1&row=0")
        page.wait_for("document.querySelectorAll('[data-browser=training] .card').length === 2")
        cards = "[...document.querySelectorAll('[data-browser=training] .card')]"
        texts = page.ask(
            "[...document.querySelectorAll('.card .foreign .text')].map((each) => each.textContent)"
        )
        assert texts == [EVIL] + ["36"] * 8
        assert page.ask(f"{cards}[0].querySelectorAll('.turn').length") == 3
        assert "answered, 9 turns, 8 calls, 1 failed" in page.ask(f"{cards}[1].textContent")
        page.fill(f"{TRAINING} [name=text]", "see (4)")
        page.wait_for("document.querySelector('.card mark')?.textContent === 'see (4)'")
        assert_quiet(page)


def test_images_stand_in_prompts_and_beside_them_in_the_list(tmp_path):
    run = make_finished_run(tmp_path)
    picture = pytest.importorskip("PIL.Image").new("RGB", (3, 2), "red")
    run.thumbnails.mkdir()
    for name, copy in (
        ("ab", base64.b64encode(encode_jpeg(picture, 128, 80)).decode()),
        ("evil", 'x" onerror="window.pwned=1'),
    ):
        record = {"thumbnail": name, "jpeg": copy}
        append_record(run.thumbnails / "rank_0.jsonl", record)
    content = [
        {"type": "image", "path": f"/data/{EVIL}.png", "thumbnail": "ab"},
        {"type": "text", "text": "What is it?"},
        {"type": "image", "thumbnail": "evil"},
    ]
    write_samples(run, [([{"role": "user", "content": content}], [1.0])])
    with Page(400) as page:
        page.open(write_report([run.path], None))
        show(page, "#held-out")
        page.wait_for(f"document.querySelectorAll('{HELD_OUT} img').length === 4")
        page.wait_for("[...document.images].every((each) => each.complete)")
        assert page.ask("document.querySelector('.prompt img').naturalWidth") == 3
        assert page.ask("document.querySelector('.prompt img').alt").endswith(".png]")
        assert page.ask("document.querySelector('.item .asked').textContent") == "What is it?"
        assert page.ask("document.documentElement.scrollWidth") == 400
        assert page.ask("typeof window.pwned") == "undefined"
        assert [each for each in page.requests if not each.startswith(("file:", "data:"))] == []


def test_held_out_answers_are_found_by_their_change(small):
    with Page() as page:
        page.open(small)
        show(page, HELD_OUT)
        wait_for_count(page, HELD_OUT, "100 prompts, 200 completions")
        page.fill(f"{HELD_OUT} [name=change]", "better after training")
        wait_for_count(page, HELD_OUT, " of 100 prompts")
        page.ask("document.querySelector('[data-browser=held-out] .item').click()")
        texts = "[...document.querySelectorAll('[data-browser=held-out] .card .text')]"
        said = f"{texts}.map((each) => each.textContent).join()"
        page.wait_for(f"{said} === 'before 0.0,after 1.0'")
        page.fill(f"{HELD_OUT} [name=change]", "any change")
        wait_for_count(page, HELD_OUT, "100 prompts, 200 completions")
        # From one to the next with the keyboard alone.
        page.ask("document.querySelector('[data-browser=held-out] .item').focus()")
        for kind in ("keyDown", "keyUp"):
            page.send("Input.dispatchKeyEvent", type=kind, key="ArrowDown", code="ArrowDown")
        page.wait_for("location.hash === '#held-out-row=1'")
        assert_quiet(page)


def test_a_telephone_shows_it_without_scrolling_sideways(tmp_path):
    run = make_long_run(tmp_path, steps=40, completions=80, words=12)
    trouble = {"frac_reward_zero_std": 0.97, "completions/clipped_ratio": 0.95, "entropy": 0.001}
    for step in range(41, 61):
        append_record(run.metrics, {"event": "train", "step": step, **trouble})
    with Page(width=360, height=740, dark=True) as page:
        page.open(write_report([run.path], None), "#step=1&row=0")
        page.wait_for("document.querySelectorAll('[data-browser=training] .card').length === 8")
        show(page, "#charts")
        page.wait_for(f"{DRAWN}.length > 0")
        assert page.ask("document.documentElement.scrollWidth") <= 360
        assert_quiet(page)


def test_ten_thousand_steps_and_fifty_thousand_completions_open(tmp_path, capsys):
    run = make_long_run(tmp_path)
    path = write_report([run.path], None)
    assert path.stat().st_size < BYTES
    with Page() as page:
        loaded_s = page.open(path)
        show(page, "#charts")
        page.wait_for(f"{DRAWN}.length > 0")
        painted_s = page.ask(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
        )
        charts_s = page.ask("performance.now() / 1000")
        show(page, TRAINING)
        page.wait_for("document.querySelectorAll('[data-browser=training] .card').length === 8")
        assert " groups, " in count(page, TRAINING)
        page.fill(f"{TRAINING} [name=text]", "<img")
        wait_for_count(page, TRAINING, "1 of ")
        assert_quiet(page)
    with capsys.disabled():
        print(
            f"\n{path.stat().st_size / 1e6:.1f} MB: text after {painted_s:.2f} s, loaded after {loaded_s:.2f} s, "
            f"first chart after {charts_s:.2f} s"
        )
