"""Escape text that UTF-8 can't encode, so that it fits into a JSON message.

Covers: lone surrogates in the user's text, e.g. half an emoji, or a file name that is not valid text.
Does not cover: printed text (``streams``), values that are pickled (``protocol.serialization``).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from jupyter_client.jsonutil import json_default

if TYPE_CHECKING:
    from collections.abc import Callable

_SURROGATE = re.compile("[\ud800-\udfff]")


def escaping(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a function that packs messages like ``pack``, and escapes what ``pack`` can't encode, as on stdout."""

    def pack_any(message: Any) -> bytes:
        try:
            return pack(message)
        except UnicodeEncodeError:
            text = json.dumps(message, default=json_default, ensure_ascii=False)
            return _SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):x}", text).encode()

    return pack_any
