"""A real run with one damaged file: every command ends with a message of ours, and other runs stay listed."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_cli.cli.app import make_app, run_guarded
from grpo_cli.errors import ProblemsError, UsageError
from grpo_cli.launch.plan import plan_launch
from grpo_cli.launch.resume import begin_attempt, is_finished, plan_resumption
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.report.follower import Follower
from grpo_cli.report.live import PlainView
from grpo_cli.runs.checkpoints import restore
from grpo_cli.runs.folder import RunFolder
from grpo_cli.sweep.plan import SweepRequest, create_sweep, read_sweep
from grpo_cli.sweep.run import check_sweep
from tests.integration.conftest import Workshop
from tests.nightly import nightly, scale
from tests.recipe_texts import write_recipe

FILES = ["status.json", "eval/before.json", "completions/rank_0.jsonl"]
MORE_FILES = """
manifest.json resolved.json trackers.json metrics.jsonl launch/plan.json launch/resume.json eval/after.json
eval/before.jsonl eval/after.jsonl eval/1/result.json eval/1/data.json eval/1/samples/final.0.jsonl
checkpoints/checkpoint-2/trainer_state.json eval/during/more/1.json thumbnails/rank_0.jsonl
""".split()
WHOLE = (b"", b"{", b"null", b"[]", b"{}", b'"x"', b"3", b"\x00\xff", b"[" * 100_000, None)
"""What a file holds instead; None stands for a folder in its place."""
VALUES = (None, [], {}, "x", 3, [None], {"x": None}, 1e400)
"""What stands in place of each value in a file."""
COMMANDS = """
runs list
runs list --json --sort accuracy
runs show BAD
runs show BAD --json
runs path BAD --checkpoint best
runs compare BAD GOOD
runs compare GOOD BAD --json
runs remove BAD --dry-run
runs remove BAD --checkpoints --dry-run
diagnose BAD
report BAD -o page.html --force
report GOOD BAD -o page.html --force
expect BAD --metric reward
eval show BAD
eval compare BAD eval
WATCH
RESUME
""".strip().splitlines()


@pytest.fixture(scope="module")
def runs(once, lora_run, chat_model) -> Path:
    """Two copies of a finished run, of which `bad` was evaluated, and that evaluation."""

    def make(folder: Path) -> None:
        workshop = Workshop.copy(lora_run, folder, chat_model)
        done = workshop.grpo("eval", workshop.run, "--out", folder / "eval")
        assert done.returncode == 0, done.stderr
        bad = workshop.run.rename(workshop.run.with_name("bad"))
        shutil.copytree(bad, bad.with_name("good"))
        shutil.copytree(folder / "eval", bad / "eval" / "1")
        (bad / "trackers.json").write_text(
            '{"runs": {"wandb": {"id": "x"}}, "failures": {"mlflow": "y"}}'
        )
        (bad / "eval" / "during" / "more").mkdir(parents=True)
        shutil.copy(bad / "eval" / "before.json", bad / "eval" / "during" / "more" / "1.json")
        (bad / "thumbnails").mkdir()
        thumbnail = '{"thumbnail": "0", "jpeg": "/9j/"}\n'
        (bad / "thumbnails" / "rank_0.jsonl").write_text(thumbnail)
        (bad / "launch" / "resume.json").write_text('{"checkpoint": "checkpoint-1", "step": 1}')

    return once("damaged_runs", make)


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a JSON value; of a list, those of the first two."""
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, each in pairs:
        yield (*path, key)
        yield from list_paths(each, (*path, key))


def replace(value: Any, path: tuple[Any, ...], new: Any) -> str:
    copy = at = json.loads(json.dumps(value))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return json.dumps(copy)


def list_damages(file: Path) -> list[tuple[str, bytes | None]]:
    """Return names of damages, and what the file then holds."""
    *lines, last = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    first = "".join(f"{line}\n" for line in lines)
    damages: list[tuple[str, bytes | None]] = [(repr(data)[:20], data) for data in WHOLE]
    whole = json.loads(last)
    for path in list_paths(whole):
        for value in VALUES:
            text = f"{first}{replace(whole, path, value)}\n"
            damages.append((f"{path} = {value}", text.encode()))
    return damages


def write(file: Path, data: bytes | None) -> None:
    file.rmdir() if file.is_dir() else file.unlink()
    file.mkdir() if data is None else file.write_bytes(data)


def resume(bad: Path) -> None:
    """Do what `grpo train --resume-from` does with the folder before it starts a process."""
    run = RunFolder(bad)
    recipe = run.read_recipe()
    plan = plan_launch(recipe, bad, Hardware(gpus=0, cpus=2))
    is_finished(run, recipe)
    begin_attempt(run, plan_resumption(run, 1, recipe, plan, force=False), recipe, plan, {})
    restore(run)


def perform(command: str, bad: Path) -> int | None:
    if command == "RESUME":
        return resume(bad)
    if command == "WATCH":
        return PlainView(Follower(RunFolder(bad)), Console()).refresh()
    words = command.replace("BAD", "tiny/bad" if "eval " not in command else str(bad))
    return make_app()(words.replace("GOOD", "tiny/good").split(), standalone_mode=False)


@pytest.mark.parametrize("name", [*FILES, *map(nightly, MORE_FILES)])
def test_no_command_ends_in_a_traceback(name, runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    bad, kept = tmp_path / "runs" / "tiny" / "bad", runs / "runs" / "tiny" / "bad"
    damages, used = list_damages(bad / name), set()
    for at, (damage, data) in enumerate(damages[:: scale(len(damages) // 3, 1)]):
        write(bad / name, data)
        for command in ["runs list", *COMMANDS[at % 4 + 1 :: 4]]:
            code = run_guarded(lambda given=command: perform(given, bad))
            output = capsys.readouterr()
            assert code in (0, 1, 2), (damage, command, output.err)
            assert code < 2 or "Fix:" in output.err, (damage, command, output.err)
            assert command != "runs list" or "tiny/good" in output.out, (damage, output.err)
            used.add(command)
        shutil.rmtree(bad)
        shutil.copytree(kept, bad)
    assert len(used) > len(COMMANDS) / 2


def test_a_damaged_sweep_is_one_message(tmp_path):
    recipe = load_recipe(path := write_recipe(tmp_path))
    grid = ("training.learning_rate=1e-6,1e-5",)
    request = SweepRequest(str(path), str(tmp_path), (), grid, (1, 2))
    folder = create_sweep(tmp_path / "runs", request, recipe).folder
    file, refused = folder / "sweep.json", {}
    assert read_sweep(folder).request == request
    damages = [each for each in list_damages(file) if "resolved', " not in each[0]]
    for damage, data in damages:
        write(file, data)
        try:
            check_sweep(read_sweep(folder).request, None) if "request" in damage else read_sweep(
                folder
            )
        except (UsageError, ProblemsError) as error:
            refused[damage] = str(error)
    assert {"('request', 'cwd') = x", "('request', 'seeds') = []"} < refused.keys()
    assert all("Fix:" in message for message in refused.values())
    assert len(refused) > len(damages) / 2
