"""``%dist_export``: which pushed values a script can load."""

from __future__ import annotations

import sys

import pytest

from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.features.export.export import _check_portable


class _Own:
    pass


def test_value_is_refused_for_its_class_and_not_for_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    _check_portable("source", ["if __name__ == '__main__':", "__main__"])
    monkeypatch.setattr(_Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "_Own", _Own, raising=False)
    with pytest.raises(UsageError, match="uses _Own of the notebook"):
        _check_portable("value", ["__main__", _Own()])
