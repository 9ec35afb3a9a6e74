import pytest

from tests.unit.launch.golden_plans import FOLDER, MACHINES, describe


@pytest.mark.parametrize("name", ["strategies", *MACHINES])
def test_what_is_started_is_what_was_reviewed(name):
    """Written anew by `python -m tests.unit.launch.golden_plans`; the difference is for a reader to judge."""
    assert describe(name) == (FOLDER / f"{name}.txt").read_text()


def test_there_are_no_other_files():
    assert {path.stem for path in FOLDER.iterdir()} == {"strategies", *MACHINES}
