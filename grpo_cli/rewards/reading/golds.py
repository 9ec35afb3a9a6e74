"""What answer kinds compare: the row's gold, and the completion without what it only repeats.

Owns reading both. What counts as equal is for each kind.
"""

from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch, text_of

SHORTEST_ECHO = 12
"""Characters from which a repeated message of the prompt is cut out of a completion."""


def read_cell(batch: Batch, column: str, row: int) -> Any:
    """A row's value in a column; raises `RewardError` where there is no such column."""
    if column not in batch.columns:
        raise RewardError(f"there is no column {column!r} (columns: {', '.join(batch.columns)})")
    return batch.columns[column][row]


def read_golds(batch: Batch, column: str, row: int) -> tuple[str, ...]:
    """The texts of a gold that is one value or a list of values, without empty ones."""
    cell = read_cell(batch, column, row)
    cells = cell if isinstance(cell, list | tuple) else [cell]
    texts = (str(each).strip() for each in cells if each is not None)
    return tuple(text for text in texts if text)


def own_text(batch: Batch, row: int) -> str:
    """The completion without verbatim copies of the prompt, in which answers may stand too.

    A completion that is nothing but the prompt is empty. Short messages (below `SHORTEST_ECHO`
    characters) stay, since an answer may rightly hold them.
    """
    prompt, text = batch.prompts[row], batch.texts[row]
    messages = [prompt] if isinstance(prompt, str) else [text_of([each]) for each in prompt]
    copies = [text_of(prompt), *messages]
    for copy in sorted((each.strip() for each in copies), key=len, reverse=True):
        if copy and text.strip() == copy:
            return ""
        if len(copy) >= SHORTEST_ECHO:
            text = text.replace(copy, " ")
    return text
