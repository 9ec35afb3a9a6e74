"""Values of the wrong kind end in the account, or in a recipe that does not pass; never in a traceback."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import write_recipe
from grpo_cli.errors import ProblemsError
from grpo_cli.recipe.yaml_tree import read_text
from tests.nightly import scale
from tests.unit.convert.readings import NAMES, read

WILD = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 3),
        st.floats(-1, 2),
        st.sampled_from(
            ["", "x", "no", "a.b", "a/b", "{{ x }}", "../..", "auto", "nan", "é\n\u2028"]
        ),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)


def keys_of(name):
    """Every key of a config, those of its inner mappings too."""
    plain = read(name).source.plain()
    inner = [
        (key, each) for key, value in plain.items() if isinstance(value, dict) for each in value
    ]
    return [(key,) for key in plain] + inner


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=scale(20, 200), deadline=None)
@given(data=st.data())
def test_any_value_at_any_key_is_answered(name, data):
    before = read(name)
    tree = before.source.plain()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(keys_of(name)))
        place = tree
        for step in path[:-1]:
            place = place[step] if isinstance(place.get(step), dict) else place
        place[path[-1]] = data.draw(WILD)
    try:
        report = translate(yaml.safe_dump(tree), Path("c.yaml"), before.dialect)
    except ProblemsError:
        return
    text = write_recipe(report, "c.yaml")
    assert read_text(text, "written").plain() == report.recipe
