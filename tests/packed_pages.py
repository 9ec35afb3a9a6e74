"""What stands packed in a report's page, for tests of what is put there."""

import base64
import gzip
import json
import re
from typing import Any


def unpack(page: str, name: str) -> Any:
    """The data of the element with an id."""
    (packed,) = re.findall(rf'<script[^>]* id="{re.escape(name)}"[^>]*>([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def visible(page: str) -> str:
    """The page without scripts, styles and markup, one space between words."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())
