"""Names, comments and messages use the terms of the field: words for which it has a better one only become fewer."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jupyter_disttrain"
# e.g. report or send for tell, reply or output for what was said, user for a person, again for anew, patch for mend
RULED_OUT = ("told", "said", "anew", "heed", "whoever", "nobody", "a person", "witness", "voice", "befall", "mend")
# How often they still occur, by top folder: lower a number when you remove some; a folder that is not listed has none.
CEILINGS = {"client": 219, "features": 93, "notebook": 25}

_WORDS = re.compile(
    r"(?<![a-z])(?:"
    + "|".join(f"{word}s?" if word in ("heed", "witness", "voice", "mend") else word for word in RULED_OUT)
    + r")(?![a-z])"
)
_PARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")


def ruled_out(source: str) -> list[tuple[int, str]]:
    """Return line and word of each ruled-out word in identifiers, comments and strings."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.ENCODING, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        for offset, line in enumerate(token.string.splitlines()):
            words = _WORDS.findall(_PARTS.sub(" ", line).lower())
            found += [(token.start[0] + offset, word) for word in words]
    return found


def top_folder(path: Path) -> str:
    """Return the folder in the package, or the name of a module at its top."""
    return path.relative_to(PACKAGE).parts[0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("said = 1", ["said"]),
        ("_told_loop = aside.told", ["told", "told"]),
        ("class Witness: ...", ["witness"]),
        ("class CrashWitness: ...", ["witness"]),
        ("mended, saidly, avoice = 1, 2, 3", []),
        ('"""For a person.\n\nNobody."""', ["a person", "nobody"]),
        ("x = 1  # formed anew", ["anew"]),
        ("f'{told} was mended, mend it'", ["told", "mend"]),
    ],
)
def test_a_ruled_out_word_is_found_as_a_whole_word(source: str, words: list[str]) -> None:
    assert [word for _, word in ruled_out(source)] == words


def test_ruled_out_words_become_fewer() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, word in ruled_out(path.read_text()):
            places.setdefault(top_folder(path), []).append(f"{path.relative_to(PACKAGE)}:{line}: {word}")
    counts = Counter({folder: len(found) for folder, found in places.items()})
    above = {folder for folder, count in counts.items() if count > CEILINGS.get(folder, 0)}
    assert not above, "\n".join(
        place for folder in sorted(above) for place in (f"{folder}: {counts[folder]}", *places[folder])
    )
