"""Compare displays that are equal except for parts that each rank generates.

Covers: addresses of objects, and random ids in HTML's tags, styles and scripts.
Does not cover: lines of text, which are compared as they are.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_RANDOM_ID = re.compile(r"\bT_[0-9a-f]{5}|[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")
_MARKUP = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.DOTALL | re.IGNORECASE)


def like_result(text: str) -> Hashable:
    """Return a key that equal results have in common."""
    return "result", _ADDRESS.sub("at 0x", text)


def like_display(data: dict[str, Any]) -> Hashable:
    """Return a key that equal displays have in common."""
    markup = data.get("text/html")
    if isinstance(markup, str):
        data = data | {"text/html": _MARKUP.sub(lambda tag: _RANDOM_ID.sub("", tag[0]), markup)}
    return "rich", _ADDRESS.sub("at 0x", json.dumps(data, sort_keys=True, default=str))
