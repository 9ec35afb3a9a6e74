"""What is said of a model that cannot be had, whoever wanted to load it."""

import pytest

from grpo_cli.errors import SetupError
from grpo_cli.upstream.transformers import explain_loading

safetensors = pytest.importorskip("safetensors")


def explain(error, section="model."):
    more = (
        ("head of its own", "name another than {path}", "head"),
        ("gated repo", "not asked for", "path"),
    )
    with (
        pytest.raises(SetupError) as caught,
        explain_loading("a/b", section=section, offline_fix="fetch {path}", more_fixes=more),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert caught.value.path.rpartition(".")[0] == section.rstrip(".")
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError("We couldn't connect to\nhf.co. Look"),
            "We couldn't connect to hf.co. Fix: fetch a/b",
        ),
        (OSError("Offline mode is on."), "Offline mode is on. Fix: fetch a/b"),
        (
            OSError("A Gated Repo"),
            "A Gated Repo. Fix: ask for access at https://huggingface.co/a/b, then `hf auth login`",
        ),
        (
            ValueError("it has a head of its own"),
            "it has a head of its own. Fix: name another than a/b",
        ),
        (
            ValueError(
                "The model type `lama` that Transformers does not recognize this architecture"
            ),
            "The model type `lama` that Transformers does not recognize this architecture. Fix: pip install "
            "--upgrade transformers",
        ),
        (OSError("the disk {is} gone"), "the disk {is} gone. Fix: check `model.path`"),
        (
            safetensors.SafetensorError("cut short"),
            "cut short. Fix: the weights are torn: download them again",
        ),
    ],
)
def test_known_words_get_the_first_fix_that_fits(error, sentence):
    assert explain(error) == f"a/b cannot be loaded: {sentence}"


def test_keys_are_named_as_they_stand_in_their_section():
    error = OSError("v9 is not a valid git identifier")
    assert explain(error).endswith("Fix: check `model.revision`")
    assert explain(error, section="").endswith("Fix: check `revision`")
    assert explain(OSError("?"), section="").endswith("Fix: check `path`")


@pytest.mark.parametrize("error", [ValueError("a bug"), TypeError("a bug"), KeyError("gated repo")])
def test_what_is_not_known_stays_as_it_is(error):
    with (
        pytest.raises(type(error)) as caught,
        explain_loading("a/b", section="", offline_fix="", more_fixes=()),
    ):
        raise error
    assert caught.value is error
