"""Whether a recipe's `expect` block can be met at all. What a run gave is `expectations`'."""

from collections.abc import Iterator

from grpo_cli.errors import Problem
from grpo_cli.recipe.expect import ExpectConfig


def check_expect(expect: ExpectConfig | None, total_steps: int | None) -> Iterator[Problem]:
    """Finds bands at steps that the training never comes to.

    Args:
        expect: The block, where there is one.
        total_steps: Optimizer steps of the whole training; None where they are not known.
    """
    for index, each in enumerate(expect.metrics if expect else ()):
        if total_steps is not None and each.step > total_steps:
            yield Problem(
                f"{each.step} is after the last step of this training ({total_steps}), so nothing will be "
                "compared",
                "train as many steps, or measure anew with grpo expect RUN",
                f"expect.metrics.{index}.step",
                level="warning",
            )
