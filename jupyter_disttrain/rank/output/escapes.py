"""Escape text that UTF-8 can't encode, so that it fits into a JSON message.

Covers: lone surrogates in the user's text, e.g. half an emoji, or a file name that is not valid text.
Does not cover: printed text (``streams``), values that are pickled (``protocol.serialization``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def escape(text: str) -> str:
    """Return a text as ``print`` shows it on a rank, with lone surrogates as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def escaping(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a function that packs messages like ``pack`` and escapes what ``pack`` can't encode."""

    def pack_any(message: Any) -> bytes:
        try:
            return pack(message)
        except UnicodeEncodeError:
            return pack(_escaped(message))

    return pack_any


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(each) for each in value]
    return value
