"""Names, comments and messages use the terms of the field: words for which it has a better one are ruled out."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jupyter_disttrain"
# e.g. report or send for tell, reply or output for what was said, user for a person, again for anew, patch for mend
RULED_OUT = ("told", "said", "anew", "heed", "whoever", "nobody", "a person", "witness", "voice", "befall", "mend")

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


def test_no_ruled_out_word_is_in_the_package() -> None:
    places = [
        f"{path.relative_to(PACKAGE)}:{line}: {word}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, word in ruled_out(path.read_text())
    ]
    assert not places, "\n".join(places)


def test_no_module_assigns_a_constant_twice() -> None:
    """The second value would replace the first, e.g. the time limit of another feature."""
    for path in sorted(PACKAGE.rglob("*.py")):
        assigned = re.findall(r"^([A-Z][A-Z0-9_]*)(?:: .+)? = ", path.read_text(), re.MULTILINE)
        assert len(assigned) == len(set(assigned)), path
