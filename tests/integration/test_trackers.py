"""Real trackers, offline: one run that stops after two steps and goes on for one, told to all of them.

`make setup` puts them into a folder of their own: beside the other packages, TRL would import them in every run.
"""

import json
import os
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
)

from grpo_cli.errors import RunError
from grpo_cli.runs.trackers import MODULES, read_trackers
from grpo_cli.training.trackers import track
from tests.integration.conftest import Workshop
from tests.run_folders import make_finished_run

TRACKERS = Path(sys.prefix) / "trackers"
TESTED = ("tensorboard", "wandb", "trackio", "mlflow")
needs_trackers = pytest.mark.skipif(
    not TRACKERS.is_dir(), reason="`make setup` has not installed the trackers"
)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, chat_model):
    """A run of two steps that went on to a third, reporting to every tracker that is installed."""
    shop = Workshop(tmp_path_factory.mktemp("tracked"), chat_model)
    recipe = shop.write()
    environment = {
        "PYTHONPATH": os.pathsep.join([str(TRACKERS), os.environ.get("PYTHONPATH", "")]),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(shop.folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{shop.folder}/mlflow.db",
        "HOME": str(shop.folder),
    }
    flags = ["--set", f"logging.report_to=[{', '.join(TESTED)}]"]
    first = shop.grpo("train", recipe, *flags, **environment)
    assert first.returncode == 0, first.stderr
    more = ["--resume", "--set", "training.max_steps=3"]
    second = shop.grpo("train", recipe, *flags, *more, **environment)
    assert second.returncode == 0, second.stderr
    shop.said = first.stdout + first.stderr + second.stderr
    return shop


@pytest.mark.slow
@needs_trackers
def test_nothing_failed(tracked):
    assert "warning: wandb" not in tracked.said
    ledger = json.loads((tracked.run / "trackers.json").read_text())
    assert sorted(ledger["runs"]) == sorted(TESTED)
    assert ledger["failures"] == {}


@pytest.mark.slow
@needs_trackers
def test_tensorboard_has_metrics(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tracked.run / "tensorboard"))
    read.Reload()
    assert [each.step for each in read.Scalars("train/reward")] == [1, 2, 3]


@pytest.mark.slow
@needs_trackers
def test_wandb_goes_on_with_one_run_inside_the_run_folder(tracked):
    parts = sorted((tracked.run / "wandb").glob("offline-run-*"))
    # One of each attempt.
    assert len(parts) == 2
    assert len({part.name.rpartition("-")[2] for part in parts}) == 1
    written = b"".join(path.read_bytes() for part in parts for path in part.glob("run-*.wandb"))
    assert b"train/reward" in written
    # The recipe is in the run's configuration.
    assert b"max_completion_length" in written


@pytest.mark.slow
@needs_trackers
def test_trackio_has_one_run(tracked):
    with sqlite3.connect(tracked.folder / "trackio" / "tiny.db") as base:
        rows = base.execute("select run_name, metrics from metrics").fetchall()
        configured = base.execute("select config from configs").fetchall()
    assert {name for name, _ in rows} == {f"tiny-{tracked.run.name}"}
    logged = [json.loads(metrics) for _, metrics in rows]
    rewards = [each["train/reward"] for each in logged if "train/reward" in each]
    assert len(rewards) == 3
    # TRL's own timings of each micro-step are kept out.
    assert not any(name.startswith("profiling/") for each in logged for name in each)
    assert any(b'"recipe"' in bytes(config[0]) for config in configured)


@pytest.mark.slow
@needs_trackers
def test_mlflow_has_one_run(tracked):
    with sqlite3.connect(tracked.folder / "mlflow.db") as base:
        ((name, status),) = base.execute("select name, status from runs").fetchall()
        metrics = set(base.execute("select key, step from metrics").fetchall())
    assert (name, status) == (f"tiny-{tracked.run.name}", "FINISHED")
    assert {("reward", 1), ("reward", 3)} <= metrics


def test_the_trackers_known_here_are_those_of_transformers():
    assert set(MODULES) == set(INTEGRATION_TO_CALLBACK)


class Broken:
    """A writer on a disk that is full."""

    def add_text(self, *arguments):
        pass

    def add_scalar(self, *arguments):
        raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


def make_trainer(callback):
    handler = SimpleNamespace(callbacks=[callback])
    return SimpleNamespace(
        callback_handler=handler,
        args=SimpleNamespace(
            report_to=["tensorboard"], to_json_string=lambda: "{}", output_dir="checkpoints"
        ),
        add_callback=handler.callbacks.append,
    )


STATE = SimpleNamespace(is_world_process_zero=True, is_hyper_param_search=False, global_step=1)


def test_a_tracker_that_fails_in_between_is_left_out(tmp_path, capsys):
    folder = make_finished_run(tmp_path, 1)
    callback = TensorBoardCallback(Broken())
    trainer = make_trainer(callback)
    track(trainer, SimpleNamespace(folder=folder))
    callback.on_train_begin(trainer.args, STATE, None)
    callback.on_log(trainer.args, STATE, None, logs={"loss": 1.0})
    callback.on_log(trainer.args, STATE, None, logs={"loss": 1.0})
    callback.on_train_end(trainer.args, STATE, None)
    (why,) = read_trackers(folder, "failures").values()
    assert "failed in on_log" in why
    assert "No space left" in why
    assert capsys.readouterr().err.count("warning: tensorboard") == 1
    assert trainer.args.report_to == []


def test_a_tracker_that_cannot_start_ends_the_run_with_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    callback = TensorBoardCallback()
    trainer = make_trainer(callback)
    track(trainer, SimpleNamespace(folder=make_finished_run(tmp_path, 1)))
    with pytest.raises(RunError, match=r"tensorboard could not start .* Fix: .*report_to"):
        callback.on_train_begin(trainer.args, STATE, None)
