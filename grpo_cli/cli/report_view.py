"""How a written page is told of: its path and size, as text or JSON, and in the browser where it is wanted."""

import webbrowser
from pathlib import Path

from grpo_cli.cli import output
from grpo_cli.units import format_bytes


def print_page(page: Path, *, as_json: bool, show: bool) -> None:
    """Says where the page is.

    Args:
        page: The file.
        as_json: As JSON in the place of a line.
        show: Whether to open it in the browser too.
    """
    size = page.stat().st_size
    if as_json:
        output.print_json({"page": str(page), "bytes": size})
    else:
        output.stdout().print(f"wrote {page} ({format_bytes(size)})", markup=False, soft_wrap=True)
    if show and not webbrowser.open(page.absolute().as_uri()):
        output.stderr().print(
            f"note: no browser could be started. Fix: open {page} in one", markup=False
        )
