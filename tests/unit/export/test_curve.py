"""The reward curve of a run."""

from matplotlib.image import imread as read_picture

from grpo_cli.export.curve import draw_curve, smooth
from tests.run_folders import make_finished_run, make_run


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


def test_the_band_that_is_expected_is_in_the_picture(tmp_path):
    rewards = [step / 40 for step in range(40)]
    plain = make_finished_run(tmp_path / "plain", rewards=rewards)
    block = {"metrics": [{"metric": "reward", "step": 40, "band": [0.8, 1.0], "window": 4}]}
    expecting = make_finished_run(tmp_path / "expecting", rewards=rewards, expect=block)
    greens = []
    for run in (plain, expecting):
        assert draw_curve(run, tmp_path / "curve.png")
        pixels = read_picture(tmp_path / "curve.png")
        # Clearly green: neither the grey of the steps nor the blue of the line.
        greens.append(
            int(
                (
                    (pixels[..., 1] > pixels[..., 0] + 0.1)
                    & (pixels[..., 1] > pixels[..., 2] + 0.1)
                ).sum()
            )
        )
    assert greens[0] == 0
    assert greens[1] > 100
