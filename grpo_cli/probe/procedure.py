"""`grpo probe`: what would make a training fail, or learn nothing.

Owns the order. The cheap part needs no weights (`check_statically.py`); the rest samples with the real model and
takes one training step that is thrown away (`sampling.py`).
"""

import time
from pathlib import Path

from grpo_cli.checks.recipe_checks import CheckedRecipe
from grpo_cli.probe.result import Probe
from grpo_cli.probe.sampling import sample_and_judge
from grpo_cli.probe.session import Progress, Session
from grpo_cli.probe.static_checks import check_statically

PROMPTS = 16


def probe_recipe(
    checked: CheckedRecipe,
    *,
    runs: Path = Path("runs"),
    prompts_sampled: int = PROMPTS,
    quick: bool = False,
    on_progress: Progress = lambda what: None,
) -> Probe:
    """Looks for what would make a training of a recipe fail, or learn nothing.

    Args:
        checked: A recipe without errors.
        runs: Where run folders go.
        prompts_sampled: Prompts to sample completions for.
        quick: Leave out all that needs the model's weights.
        on_progress: Told what is being done.

    Raises:
        GrpoError: The model, the data or a reward cannot be loaded.
    """
    started = time.monotonic()
    session = Session(checked, checked.recipe, Probe(str(checked.loaded.source)), on_progress)
    with checked.loaded.placing_errors():
        check_statically(session, runs, costly=not quick)
        if not quick and session.recipe.is_sampled:
            sample_and_judge(session, prompts_sampled)
    session.probe.quick = quick
    session.probe.seconds = time.monotonic() - started
    return session.probe
