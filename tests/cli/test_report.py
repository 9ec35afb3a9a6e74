"""`grpo report`: where the page is, how large, and what it refuses."""

import json

import pytest

from tests.cli.test_commands import grpo
from tests.run_folders import make_finished_run

pytest.importorskip("plotly")


def test_the_page_is_written_and_its_path_and_size_told(tmp_path):
    run = make_finished_run(tmp_path).path
    done = grpo("report", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {run / 'report.html'} (")
    told = json.loads(grpo("report", run, "-o", "page.html", "--json", cwd=tmp_path).stdout)
    assert told["bytes"] == (tmp_path / "page.html").stat().st_size
    assert grpo("report", "--runs", tmp_path, "sums", cwd=tmp_path).stdout == done.stdout
    refused = grpo("report", run, "-o", "page.html", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--force to replace it" in refused.stderr


def test_open_starts_a_browser_or_says_that_there_is_none(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    run = make_finished_run(tmp_path).path
    assert grpo("report", run, "--open", cwd=tmp_path).returncode == 0
    assert seen.read_text() == (run / "report.html").as_uri()


def test_a_folder_that_is_no_run_is_said(tmp_path):
    done = grpo("report", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr
