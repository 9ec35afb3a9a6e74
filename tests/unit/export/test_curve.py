"""The reward curve of a run."""

from grpo_cli.export.curve import draw_curve, smooth
from tests.run_folders import make_run


def test_a_run_with_steps_has_a_picture(tmp_path):
    run = make_run(tmp_path, rewards=[0.1 * n for n in range(30)])
    assert draw_curve(run, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_has_none(tmp_path):
    run = make_run(tmp_path, rewards=[0.5])
    assert not draw_curve(run, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_the_line_is_the_mean_of_the_last_tenth():
    assert smooth([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert smooth([float(n) for n in range(20)])[-1] == 18.5
