"""How much of what training changed an export has."""

import pytest
import torch

from grpo_cli.exporting.verification import _share_kept


@pytest.mark.parametrize(
    ("way", "kept"),
    [(1.0, 1.0), (0.0, 0.0), (0.8, 0.8), (1.1, 0.9), (2.4, 0.0), (-1.0, 0.0)],
    ids=["exact", "base", "short", "beyond", "rounding outweighs training", "backwards"],
)
def test_the_share_kept_falls_on_both_sides_of_the_trained_model(way, kept):
    base = torch.zeros(3, 5)
    trained = torch.linspace(-1, 1, 15).reshape(3, 5)
    assert _share_kept(base, trained, trained * way) == pytest.approx(kept, abs=1e-6)
