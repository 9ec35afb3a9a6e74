"""`grpo doctor` as a person runs it: the table, the JSON, and how it ends."""

import json
import subprocess
import sys

import pynvml
import pytest

from grpo_cli.doctor import diagnostics
from tests.in_process import run_command

COMMAND = "import sys; sys.argv[0] = 'grpo'; from grpo_cli.cli.app import main; main()"


def doctor(*arguments, cwd, **environment):
    return run_command(["doctor", *arguments], cwd, {"COLUMNS": "200", **environment})


def break_driver():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)


def test_a_quick_look_prints_a_table_and_leaves_nothing_behind(tmp_path):
    done = doctor("--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "package trl" in done.stdout
    assert "disk: runs" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_exit_code_3_with_its_fix_beside_it(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    done = doctor("--quick", cwd=tmp_path)
    assert done.returncode == 3
    assert "is a file, not a folder" in done.stdout
    assert "Fix: pass --runs FOLDER" in done.stdout
    assert "1 error" in done.stdout


def test_a_warning_is_exit_code_0(tmp_path):
    done = doctor("--quick", cwd=tmp_path, RANK="1")
    assert done.returncode == 0
    assert "unset RANK" in done.stdout


def test_json_holds_every_finding_and_nothing_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", break_driver)
    done = doctor("--quick", "--json", cwd=tmp_path, HF_TOKEN="hf_geheim")
    assert done.returncode == 3
    told = json.loads(done.stdout)
    assert not told["healthy"]
    (broken,) = [finding for finding in told["findings"] if finding["level"] == "error"]
    assert broken["subject"] == "GPU driver"
    assert "version mismatch" in broken["seen"]
    assert broken["fix"]
    assert "geheim" not in done.stdout
    assert all(finding["fix"] for finding in told["findings"] if finding["level"] != "ok")


def test_nothing_heavy_is_imported_by_the_command_itself(tmp_path):
    script = f"{COMMAND[: -len('main()')]}\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
    script += (
        "print('LOADED', sorted({'torch', 'transformers', 'trl', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--quick", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.endswith("LOADED []\n")


@pytest.mark.slow
def test_a_healthy_machine_trains_a_step(tmp_path):
    done = doctor("--json", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    told = json.loads(done.stdout)
    subjects = {finding["subject"]: finding["level"] for finding in told["findings"]}
    assert done.returncode == 0, told
    assert subjects["imports"] == "ok"
    assert subjects["training step (cpu)"] == "ok"
    assert "hub" in subjects


@pytest.mark.slow
def test_a_gpu_that_torch_was_not_built_for(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA")
    monkeypatch.setattr(diagnostics, "find_gpus", lambda: (1, ()))
    done = doctor("--json", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    errors = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "error"]
    assert [issue["subject"] for issue in errors] == ["torch devices"]
    assert "pytorch.org/get-started" in errors[0]["fix"]
