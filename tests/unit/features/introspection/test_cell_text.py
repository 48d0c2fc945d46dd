"""What the text at the cursor of a cell is."""

from __future__ import annotations

import pytest

from jupyter_disttrain.features.introspection.cell_text import Place, definitions, inspected_at, place_at


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x", Place("name", 0, "x")),
        ("", Place("name", 0)),
        ("torch.nn.Lin", Place("attribute", 9, "Lin", "torch.nn")),
        ("y = model.layers[0].we", Place("attribute", 20, "we", "model.layers[0]")),
        ("a[b.c(1)].d", Place("attribute", 10, "d", "a[b.c(1)]")),
        ("f(x)(y).z", Place("attribute", 8, "z", "f(x)(y)")),
        ("{'a': b.c", Place("attribute", 8, "c", "b")),
        ('"abc".jo', Place("attribute", 6, "jo", '"abc"')),
        ("x = 'a#b.'; y.z", Place("attribute", 14, "z", "y")),
        ("for i in x:\n    foo.ba", Place("attribute", 20, "ba", "foo")),
        ("x = 3.", Place("nothing", 6)),
        ("# x.y", Place("nothing", 5)),
        ('d["a', Place("key", 3, "a", "d", quote='"')),
        ("d[", Place("key", 2, "", "d")),
        ("d['a']['b", Place("key", 8, "b", "d['a']", quote="'")),
        ("['a", Place("path", 2, "a")),
        ("f(a, lr", Place("name", 5, "lr", callee="f")),
        ("torch.optim.SGD(model.parameters(), ", Place("name", 36, callee="torch.optim.SGD")),
        ("f(a=b", Place("name", 4, "b")),
        ("f(a + b", Place("name", 6, "b")),
        ("(a, b", Place("name", 4, "b")),
        ("open('/tmp/a", Place("path", 11, "a", "/tmp/")),
        ("open('it\\'s/a", Place("path", 12, "a", "it\\'s/")),
        ("print(f'{x.", Place("attribute", 11, "", "x")),
        ("print(f'{x} and y.", Place("path", 8, "{x} and y.")),
        ("'''\nx.", Place("path", 3, "\nx.")),
        ("foo.bar\n", Place("name", 8)),
        ("data = (frame\n   .gro", Place("attribute", 18, "gro", "frame")),
        ("%time model.fo", Place("attribute", 12, "fo", "model")),
        ("%timeit -n3 model.fo", Place("attribute", 18, "fo", "model")),
        ("print(f'{{x.", Place("path", 8, "{{x.")),
        ("'closed'\nx.y", Place("attribute", 11, "y", "x")),
        ("'not closed\nx.y", Place("attribute", 14, "y", "x")),
        ("%ti", Place("magic", 0, "%ti")),
        ("  %%ti", Place("magic", 2, "%%ti")),
        ("%cd /tm", Place("path", 5, "tm", "/")),
        ("!ls ab", Place("path", 4, "ab")),
        ("import torch.n", Place("import", 13, "n", "torch")),
        ("import os, to", Place("import", 11, "to")),
        ("from to", Place("import", 5, "to")),
        ("from torch.nn import Li", Place("import", 21, "Li", "torch.nn", callee="from")),
        ("from torch import nn, op", Place("import", 22, "op", "torch", callee="from")),
    ],
)
def test_place_at_the_end(code: str, expected: Place) -> None:
    assert place_at(code, len(code)) == expected
    assert place_at(code + "\nmore(", len(code)) == expected, "what follows does not count"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("torch.nn.Lin|ear(3, 4)", ["torch.nn.Linear"]),
        ("tor|ch.nn.Linear(3, 4)", ["torch"]),
        ("torch.nn.Linear(|3, 4)", ["torch.nn.Linear"]),
        ("torch.nn.Linear(3, |", ["torch.nn.Linear"]),
        ("f(a, b|)", ["b", "f"]),
        ("f(a, 'b|')", ["f"]),
        ("f([a, |", ["f"]),
        ("%time|it x", ["%timeit"]),
        ("# f(a|)", []),
        ("|", []),
    ],
)
def test_what_is_inspected(code: str, expected: list[str]) -> None:
    cursor = code.index("|")
    assert inspected_at(code.replace("|", ""), cursor) == expected


def test_definitions_of_a_cell_are_found_without_its_line_at_the_cursor() -> None:
    code = (
        "import torch.nn as nn, os.path\nfrom torch import optim as op\n%time x = 1\n"
        "def train(model, *, lr=1):\n    for batch in data:\n        loss = model(batch)\n        los|\n"
        "class Net(nn.Module):\n    pass\nlinear = nn.Linear(3, 4)"
    )
    cursor = code.index("|")
    found = definitions(code.replace("|", ".foo("), cursor)
    expected = {"nn": "module", "os": "module", "op": "instance", "train": "function", "model": "param", "lr": "param"}
    expected |= {"batch": "instance", "loss": "instance", "Net": "class", "linear": "instance"}
    assert found.kinds == expected
    assert found.modules == {"nn": "torch.nn", "os": "os", "op": "torch.optim"}
    assert set(found.values) == {"loss"}, "above the cursor"
    code = "layer = nn.Linear(2, 3)\nfoo(\n    layer.|,\n    [1],\n)\nlater = 1"
    found = definitions(code.replace("|", ""), code.index("|"))
    assert (set(found.kinds), set(found.values)) == ({"layer", "later"}, {"layer"})
    code = "class Net(nn.Module):\n\tdef f(self):\n\t\tself.|\n\n\tdef g(self): pass"
    assert [each.name for each in definitions(code.replace("|", ""), code.index("|")).classes] == ["Net"]
    assert definitions("x = 1\ny = (\nz.\nw = 2", 11).kinds == {"x": "instance"}, "of a cell that is not valid yet"
