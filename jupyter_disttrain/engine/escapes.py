"""Escape what JSON in UTF-8 can't hold.

Covers: lone surrogates in the user's texts, e.g. half an emoji, or a file's name that is no text.
Does not cover: printed text (``streams``), values that are pickled (``values``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def escape(text: str) -> str:
    """Return a text as ``print`` shows it on a rank: a lone surrogate by its number."""
    return text.encode("utf-8", "backslashreplace").decode()


def escaping(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a packer of messages that escapes what ``pack`` can't encode."""

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
