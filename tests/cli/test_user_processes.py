"""Commands that try the user's code: what ends its process is told, and never taken for success."""

import pytest

from tests.in_process import run_command
from tests.recipe_texts import GOOD, write_recipe
from tests.tiny_models import make_tiny_model

ENVIRONMENT = """
import os
class Game:
    def reset(self, seed): return "say a"
    def step(self, text): {end}
"""


@pytest.mark.parametrize(
    ("end", "told"),
    [("os._exit(0)", "exited with code 0"), ("os.kill(os.getpid(), 9)", "was killed by signal 9")],
)
def test_a_process_that_ends_without_a_result_is_a_failure(tmp_path, end, told):
    make_tiny_model(tmp_path / "tiny")
    (tmp_path / "mine.py").write_text(f"import os\ndef f(completions): {end}")
    (tmp_path / "env.py").write_text(ENVIRONMENT.format(end=end))
    rewards = GOOD.replace("{kind: math, answer: answer}", "{kind: python, path: mine.py:f}")
    path = write_recipe(tmp_path, rewards)
    tried = run_command(["rewards", "test", str(path)], tmp_path)
    assert tried.returncode == 1
    assert told in tried.stderr
    text = f"{GOOD}environment: {{kind: python, path: env.py:Game}}\n"
    path = write_recipe(
        tmp_path, text.replace("{kind: math, answer: answer}", "{kind: environment}")
    )
    tried = run_command(["env", "test", str(path)], tmp_path)
    assert tried.returncode == 1
    assert told in tried.stderr
    assert "trying python" in tried.stderr
