"""The kit that measures a GPU: its parts with tiny models on a CPU, its limits, and what it packs."""

import json
import time
import warnings

import pytest

from benchmarks.gpu_kit import __main__ as kit
from benchmarks.gpu_kit.pack import find_missing
from benchmarks.gpu_kit.table import compare_memory


def measure(tmp_path, *flags):
    code = kit.main(["--tiny", "--out", str(tmp_path), *flags])
    return code, json.loads((tmp_path / "results.json").read_text())


def test_a_part_is_cut_off_at_its_limit_and_skipped_without_time(tmp_path, monkeypatch, capsys):
    hanging = kit.Part("Hangs", "machine.describe_machine", 0.1)
    monkeypatch.setattr(kit, "PARTS", {"machine": hanging})
    assert measure(tmp_path)[1]["machine"]["state"].startswith("cut off")
    assert measure(tmp_path, "--minutes", "0")[1]["machine"]["state"].startswith("skipped")
    assert "Hangs (skipped" in capsys.readouterr().out


def test_a_part_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        kit.main(["--only", "syncs,nope"])
    assert "there is no part nope. Fix: name some of machine" in capsys.readouterr().err


def test_estimates_stand_beside_what_was_measured():
    rows = [
        {"model": "7B", "C": 256, "TRL GiB": None, "grpo GiB": 4.0, "grpo estimate GiB": 3.0},
        {"model": "7B", "C": 512, "note": "grpo: OutOfMemoryError"},
    ]
    [row] = compare_memory(rows)
    assert row["of"] == "model 7B, C 256, grpo"
    assert row["ratio"] == 0.75


def test_what_the_machine_has_is_not_packed():
    packed = find_missing("3.12", {"torch", "transformers", "datasets"})
    names = {each.partition("==")[0] for each in packed}
    assert {"trl", "pydantic-core", "math-verify"} <= names
    assert not {"torch", "transformers", "datasets", "grpo-cli", "dill", "colorama"} & names


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path, monkeypatch):
    from benchmarks.gpu_kit import machine, sampling, steps
    from benchmarks.gpu_kit.bench import Bench

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    bench = Bench(tmp_path, tiny=True, ends_at=time.monotonic() + 600)
    assert "torch" in [row["what"] for row in machine.describe_machine(bench)]
    exact, *rounded = steps.check_parity(bench)
    assert exact["gradient, grpo to TRL"] < 1e-5
    assert exact["left off"] == ""
    for row in rounded:
        assert 1e-4 < row["grpo to float32"] < 2 * row["TRL to float32"] + 0.01
    learning = list(steps.measure_learning(bench))
    assert [row["C"] for row in learning] == [1024, 256] * 2
    for row in learning:
        assert row["ratio"] > 0, row
        assert row["grpo estimate GiB"] > 0
    for row in sampling.measure_sampling(bench):
        assert "note" not in row
        assert row["grpo tokens/s"] > 0 < row["CUDA graphs tokens/s"]
    counted = {row["what"] for row in steps.count_syncs(bench)}
    assert {"step, TRL", "step, grpo"} < counted


def test_syncs_are_counted_by_source_line():
    from benchmarks.gpu_kit.steps import find_sites

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("the debug mode does not detect all synchronizing operations", stacklevel=1)
    total, site = find_sites("step", seen)
    assert (total["syncs"], site["syncs"]) == (3, 3)
    assert "test_gpu_kit.py:" in site["site"]


@pytest.mark.slow
def test_a_training_is_killed_and_resumed(tmp_path):
    from benchmarks.gpu_kit.bench import Bench
    from benchmarks.gpu_kit.whole_run import train_whole

    plain, killed, resumed, ratios = train_whole(Bench(tmp_path, tiny=True, ends_at=0.0))
    assert "after its first checkpoint" in killed["run"]
    assert resumed["run"].endswith(" to 12")
    assert ratios["step_s"] == resumed["step_s"] / plain["step_s"]
