"""`grpo doctor` as a person runs it: the table, the JSON, and how it ends."""

import json
import os
import subprocess
import sys

import pytest

from tests.in_process import run_command

COMMAND = "import sys; sys.argv[0] = 'grpo'; from grpo_cli.cli.app import main; main()"


def doctor(*arguments, cwd, **environment):
    return run_command(["doctor", *arguments], cwd, {"COLUMNS": "200", **environment})


def put_nvidia_smi(folder, text, code=0):
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


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


def test_json_holds_every_finding_and_nothing_secret(tmp_path):
    path = put_nvidia_smi(tmp_path / "bin", "NVIDIA-SMI has failed", code=9)
    done = doctor("--quick", "--json", cwd=tmp_path, PATH=path, HF_TOKEN="hf_geheim")
    assert done.returncode == 3
    told = json.loads(done.stdout)
    assert not told["healthy"]
    (broken,) = [finding for finding in told["findings"] if finding["level"] == "error"]
    assert broken["subject"] == "GPU driver"
    assert "NVIDIA-SMI has failed" in broken["seen"]
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
def test_a_healthy_machine_trains_a_step_and_lets_two_processes_meet(tmp_path):
    done = doctor("--json", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    told = json.loads(done.stdout)
    subjects = {finding["subject"]: finding["level"] for finding in told["findings"]}
    assert done.returncode == 0, told
    assert subjects["imports"] == "ok"
    assert subjects["training step (cpu)"] == "ok"
    assert subjects["two processes (gloo)"] == "ok"
    assert subjects["hub"] == "note"


@pytest.mark.slow
def test_a_gpu_that_torch_was_not_built_for(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA")
    path = put_nvidia_smi(tmp_path / "bin", "0, GPU-aa, NVIDIA L4, 570.86, 23034, 1")
    done = doctor("--json", cwd=tmp_path, PATH=path, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 3
    errors = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "error"]
    assert [finding["subject"] for finding in errors] == ["torch devices"]
    assert "pytorch.org/get-started" in errors[0]["fix"]
