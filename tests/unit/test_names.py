"""Names, comments and messages use the terms of the field: words for which it has a better one are ruled out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
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


def test_no_module_defines_a_constant_twice() -> None:
    """Two limits of one name had the value of the later: nannies gave a cut network 5 s in place of 30 s."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        targets = (node.targets for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
        names = Counter(name.id for each in targets for name in each if isinstance(name, ast.Name))
        found += [f"{path.relative_to(PACKAGE)}: {name}" for name, count in names.items() if count > 1]
    assert not found
