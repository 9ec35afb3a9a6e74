"""Data inside an HTML page: packed small, and unable to end the element it stands in.

Base64 has no character that HTML or JavaScript gives a meaning to, whatever the data says.
"""

import base64
import gzip
import json
from typing import Any


def pack_text(text: str) -> str:
    """A text as base64 of gzip; the same text always gives the same."""
    # Half of a surrogate pair, which a model may well write, is no UTF-8.
    data = text.encode("utf-8", errors="replace")
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")


def pack_json(value: Any) -> str:
    """Plain values as base64 of gzipped JSON."""
    return pack_text(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))
