"""Shows the site's navigation from 1120 px on; the theme hides it in a drawer below 1220 px."""

from pathlib import Path
from typing import Any

_EM = {"76.25em": "70em", "76.234375em": "69.984375em"}
"""The theme's smallest width with a navigation and its largest one without, and ours."""


def on_post_build(config: Any) -> None:
    """Replace the theme's widths in its styles and script, which both ask for them."""
    for pattern in ("stylesheets/main.*.css", "javascripts/bundle.*.js"):
        for path in Path(config["site_dir"], "assets").glob(pattern):
            text = path.read_text(encoding="utf-8")
            for theirs, ours in _EM.items():
                text = text.replace(theirs, ours)
            path.write_text(text, encoding="utf-8")
