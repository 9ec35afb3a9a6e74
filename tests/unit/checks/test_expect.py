"""Bands that no run can come to."""

from grpo_cli.checks.recipe import check_recipe
from tests.recipe_texts import GOOD, write_recipe

BLOCK = """\
expect:
  metrics:
    - {metric: reward, step: 2, band: [0, 1]}
    - {metric: reward, step: 40, band: [0, 1]}
    - {metric: reward, step: 0, band: [0, 1]}
"""


def test_a_band_after_the_last_step_is_warned_of_on_its_line(tmp_path):
    checked = check_recipe(write_recipe(tmp_path, GOOD + BLOCK))
    problem, never = [each for each in checked.problems if each.path.startswith("expect")]
    assert problem.level == "warning"
    assert problem.path == "expect.metrics.1.step"
    assert problem.location.line == len(GOOD.splitlines()) + 4
    assert "40 is after the last step of this training (2)" in problem.seen
    assert never.path == "expect.metrics.2.step"
    assert "step 0 has no record" in never.seen
