"""Interrupted imports: the next one works, or the cell names the rank and the remedy.

The modules here interrupt their own process at a known line, as often as ``presses`` holds.
"""

from __future__ import annotations

import _json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import GivenUpError, RankFailure

from ...support.listeners import Interrupter
from ...support.process_tools import wait_until
from ...support.recovery_tools import HOST, SUM, failure_of

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

pytestmark = pytest.mark.parametrize("cluster", ["local"], indirect=True)

CUT = "import builtins, signal\nwhile builtins.presses: builtins.presses.pop(); signal.raise_signal(signal.SIGINT)\n"
MODULES = {
    # A package whose part "deep" is interrupted after "part" and "ring", which refers to the package, were imported.
    "made/__init__": "from . import part, ring, deep\nfrom ._json import encode_basestring as quote",
    "made/part": "import made._json\nwhole = len(made._json.encode_basestring('')) - 1",
    "made/ring": "import made\ndef value(): return made.deep.value",
    "made/deep/__init__": f"from . import inner\n{CUT}value = 1",
    "made/deep/inner": "value = 2",
    "lazy": "def load():\n    from made.deep.inner import value\n    return value",
    # Independent modules: "aside" is complete and refers to nothing of "app", "around" refers to it.
    "app": f"import around, aside\n{CUT}done = 1",
    "around": "import app",
    "aside": "loaded = 1",
    "tolerant/__init__": "try: from . import heavy\nexcept BaseException: heavy = None",
    "tolerant/heavy": CUT,
    "training": f"steps = 1\ntry:\n    exec({CUT!r})\nexcept KeyboardInterrupt: pass",
    "registry": "names = {}\ndef register(name):\n    assert name not in names, 'twice'\n    names[name] = 1",
    "once": f"import registry\nregistry.register('once')\n{CUT}",
    "operators": f"from torch.library import Library\nhere = Library('cut_off', 'DEF')\n{CUT}",
    "site-packages/slowly/__init__": f"from . import part\n{CUT}whole = 1",
    "site-packages/slowly/part": "",
    "site-packages/endless": """import time
from jupyter_disttrain.rank.interrupts import deferral
print("begun", flush=True)
while not allowed.exists(): time.sleep(0.01)
deferral.CUT_AFTER_SECONDS = 0
print("late", flush=True)
while True: time.sleep(0.01)
""",
}
INTERRUPT_IMPORTS = "import builtins, importlib, sys; builtins.presses = [1] * {}"


@pytest.fixture
def modules(cluster: Cluster, tmp_path: Path) -> Cluster:
    """Ranks that find these modules."""
    for name, code in MODULES.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    extension = Path(str(_json.__file__))
    (tmp_path / "made" / extension.name).write_bytes(extension.read_bytes())
    cluster.run(f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(tmp_path / 'site-packages')!r}]")
    return cluster


def cut(cluster: Cluster, code: str, presses: int = 1) -> RankFailure:
    """Run code during which each rank is interrupted."""
    cluster.run(INTERRUPT_IMPORTS.format(presses))
    error = failure_of(cluster, code)
    assert {failure.ename for failure in error.by_rank.values()} == {"KeyboardInterrupt"}
    return error


def value(cluster: Cluster, code: str) -> object:
    """Return what both ranks return."""
    first, second = cluster.run(code).results.values()
    assert first == second
    return first


def test_next_import_of_user_modules_works(modules: Cluster) -> None:
    whole = (
        "(made.part.whole, made.deep.inner.value, made.ring.value(), made.ring.made is made, len(made.quote('')) - 2)"
    )
    for statement in (
        "import made",
        "import made.deep.inner",
        "from made.deep import value",
        "importlib.import_module('made.deep')",
        "import lazy; lazy.load()",
        "try: import made\nexcept KeyboardInterrupt: import made; raise",
    ):
        assert not cut(modules, statement).notes
        assert value(modules, f"import made; {whole}") == (1, 2, 1, True, 0), statement
        modules.run("for name in [*sys.modules]: name.startswith(('made', 'lazy')) and sys.modules.pop(name)")

    modules.run("import aside; before = aside; del sys.modules['aside']")
    cut(modules, "import app")
    assert value(modules, "'app' in sys.modules or 'around' in sys.modules") is False
    assert value(modules, "aside = sys.modules['aside']; import app; (app.around.app is app, app.aside is aside)") == (
        True,
        True,
    )
    cut(modules, "import operators")
    assert value(modules, "import operators; operators.here.ns") == "cut_off"
    assert value(modules, SUM) == [3.0]


def test_import_in_a_thread_continues(modules: Cluster) -> None:
    code = """
    import threading
    going, imported = threading.Event(), []
    def load():
        import made
        going.wait()
        imported.append(made.part.whole)
    thread = threading.Thread(target=load)
    {}
    thread.start()
    try: signal.raise_signal(signal.SIGINT); thread.join()
    finally: going.set()
    """
    modules.run(INTERRUPT_IMPORTS.format(0))
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        modules.run(code.format("import signal"))
    assert value(modules, "thread.join(); import made; (imported, made.part.whole)") == ([1], 1)


def test_module_that_caught_the_interrupt_is_imported_again(modules: Cluster) -> None:
    modules.run(INTERRUPT_IMPORTS.format(1))
    run = modules.run("import tolerant")
    remedy = "%dist_reset -r 0-1 replaces just those ranks"
    assert run.notes == [f"the import of tolerant.heavy was interrupted on ranks 0-1 ({HOST}); {remedy}"]
    assert value(modules, "import tolerant; tolerant.heavy.__name__") == "tolerant.heavy"
    modules.run(INTERRUPT_IMPORTS.format(1))
    assert not modules.run("import training").notes
    assert value(modules, "import training; training.steps") == 1  # complete: its own code handles interrupts


def test_module_that_cannot_be_imported_twice_is_named(modules: Cluster) -> None:
    assert not cut(modules, "import registry, once").notes
    with pytest.raises(RankFailure, match="twice") as caught:
        modules.run("import once")
    remedy = "%dist_reset -r 0-1 replaces just those ranks"
    assert caught.value.notes == [f"the import of once was interrupted on ranks 0-1 ({HOST}); {remedy}"]
    with pytest.raises(RankFailure, match="ZeroDivisionError") as caught:
        modules.run("1 / 0")
    assert not caught.value.notes


def test_library_import_is_completed_unless_interrupted_repeatedly(modules: Cluster) -> None:
    left = cut(modules, "import slowly\nlate = 1", presses=5)
    assert not left.notes
    assert value(modules, "slowly = sys.modules['slowly']; (slowly.part.__name__, slowly.whole)") == ("slowly.part", 1)
    modules.run("del sys.modules['slowly'], sys.modules['slowly.part']")
    modules.run(
        "from jupyter_disttrain.rank.interrupts import deferral\n"
        "kept_s, deferral.CUT_AFTER_SECONDS = deferral.CUT_AFTER_SECONDS, 0"
    )
    late = cut(modules, "import slowly", presses=2)
    modules.run("deferral.CUT_AFTER_SECONDS = kept_s")
    remedy = "%dist_reset -r 0-1 replaces just those ranks"
    assert late.notes == [f"the import of slowly was interrupted on ranks 0-1 ({HOST}); {remedy}"]
    assert value(modules, "import slowly; (slowly.part.__name__, slowly.whole)") == ("slowly.part", 1)


def test_import_interrupted_after_the_cell_returned_is_named(modules: Cluster, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    modules.run(
        f"import builtins, pathlib; builtins.allowed = pathlib.Path({str(allowed)!r})\n"
        "from jupyter_disttrain.rank.interrupts import deferral; kept_s = deferral.CUT_AFTER_SECONDS"
    )
    run = modules.run("import endless", block=False)
    run.listener = Interrupter(lambda run: all(run.stdout.values()), times=3)
    with pytest.raises(GivenUpError):
        run.wait()
    allowed.touch()
    assert wait_until(lambda: interrupted_all(modules))
    late = modules.run("deferral.CUT_AFTER_SECONDS = kept_s")
    remedy = "%dist_reset -r 0-1 replaces just those ranks"
    # A cell that begins before the ranks have replied to the previous one also reports that they are back.
    assert late.notes[0] == f"the import of endless was interrupted on ranks 0-1 ({HOST}); {remedy}"
    assert all("have ended cell" in note for note in late.notes[1:])
    with pytest.raises(RankFailure, match="NameError"):
        modules.run("no_such_name")


def interrupted_all(cluster: Cluster) -> bool:
    """Interrupt ranks that still run; return whether none does."""
    cluster.interrupt()
    return all(entry.state != "running" for entry in cluster.table)
