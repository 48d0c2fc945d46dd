"""The kernel on a rank: cells and requests of the client.

Covers: one execute_request from arrival to reply, the rank_request messages, ``input()`` refused.
Does not cover: the process group (``process_group``), identity (``bootstrap``).

A cell that says nothing costs one request and one reply: no busy, no idle, no echo of the input. The reply tells the
client whether to wait for an idle message, which then comes after all output.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from ipykernel.jsonutil import json_clean
from ipyparallel.engine.kernel import IPythonParallelKernel
from traitlets import Type

from ..errors import UnserializableValueError
from ..messages import OPTIONS, RANK_REQUEST
from ..shelf import lend
from ..values import dump_value
from . import cell_errors, hooks
from .connection import KEEP
from .cut_imports import CutImports
from .own_code import is_cell
from .process_group import RELEASE_SIGNAL
from .questions import InputOnRankError
from .shell import NO_VALUE, RankShell
from .streams import Descriptors, flush_all, restore_streams
from .switches import Switches
from .untimely import Untimely, outwards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from .bootstrap import Bootstrap
    from .publisher import Publisher


def ignore_signal(_number: int, _frame: Any) -> None:
    """Do nothing; unlike SIG_IGN this is not inherited by the programs that a rank starts."""


CELLS_REMEMBERED = 100  # to tell one that has ended from one that never came
_DO_EXECUTE = IPythonParallelKernel.do_execute.__code__


def _is_cell(frame: FrameType) -> bool:
    """Whether it is the whole cell, or a statement of it, that IPython has called."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_name == "run_code" and is_cell(frame.f_code.co_filename)


class _NoShellChannelThread:
    """What ipykernel asks, before it awaits a cell, for the thread that signals reach."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        """Return False: shell messages are read on the main thread."""
        return False


class RankKernel(IPythonParallelKernel):
    """Run what the client sends."""

    shell_class = Type(RankShell)
    _supports_kernel_subshells = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shell_handlers[RANK_REQUEST] = self.rank_request
        self.control_handlers[RANK_REQUEST] = self.control_request
        self.shell_channel_thread = _NoShellChannelThread()
        self._ours = False
        self._cell: dict[str, Any] | None = None  # that runs
        self._untimely = Untimely()
        self._imports = CutImports()
        self._interrupted = False
        self._switches = Switches()
        self._keeps_replies = bool(os.environ.get(KEEP))
        self._last_reply: tuple[dict[str, Any], list[Any]] = {}, []  # for who joins the cluster later
        self._begun: deque[str] = deque(maxlen=CELLS_REMEMBERED)

    def take_charge(
        self, bootstrap: Bootstrap, publisher: Publisher, descriptors: Descriptors, reserved: list[int]
    ) -> None:
        """Take what serves the requests.

        Parameters
        ----------
        reserved
            File descriptors to close before the first cell.
        """
        self._descriptors, self._reserved = descriptors, reserved
        self._bootstrap = bootstrap
        self._publisher = publisher
        signal.signal(RELEASE_SIGNAL, self._on_release)
        bootstrap.bind(self.shell)
        self.shell.is_late = lambda: self._interrupted and not self._untimely.waits

    @property
    def cell(self) -> dict[str, Any] | None:
        """What is known of the cell that runs: its number, its request, its prompt number; None while none runs."""
        return self._cell

    def set_parent(self, ident: Any, parent: dict[str, Any], channel: str = "shell") -> None:
        """Note whether the request is ours: ipyparallel's own clients expect busy and idle messages."""
        if channel == "shell":
            ours = parent["header"]["msg_type"] == RANK_REQUEST or OPTIONS in parent.get("metadata", {})
            self._ours = ours
        super().set_parent(ident, parent, channel)

    def _publish_status(self, status: str, channel: str, parent: Any = None) -> None:
        if channel == "control" or status == "starting" or self._ours:
            return
        super()._publish_status(status, channel, parent)

    def _publish_status_and_flush(self, status: str, channel: str, _stream: Any, parent: Any = None) -> None:
        self._publish_status(status, channel, parent)

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run a cell and reply."""
        options = parent["metadata"].get(OPTIONS)
        if options is None:
            await super().execute_request(stream, ident, parent)
            return
        try:
            with self._publisher.in_use():
                await self._serve_cell(stream, ident, parent, options)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            # A fault of this package's own: without a reply the notebook would wait for ever.
            self._stop_hearing()
            self._cell = None
            reply: dict[str, Any] = {"status": "error", "ename": type(error).__name__, "evalue": str(error)}
            reply["traceback"] = traceback.format_exc().splitlines()
            metadata = {OPTIONS: {"quiet": True}}
            self.session.send(stream, "execute_reply", reply, parent, metadata=metadata, ident=ident)

    async def _serve_cell(self, stream: Any, ident: Any, parent: dict[str, Any], options: dict[str, Any]) -> None:
        shell: RankShell = self.shell
        while self._reserved:
            os.close(self._reserved.pop())
        self._interrupted = False
        self._untimely.begin_cell()
        signal.signal(signal.SIGINT, self._note_interrupt)
        # From here on the nanny passes this cell's interrupts on; one that came earlier it has kept.
        mark = self._publisher.begin_cell(parent["header"], self.session.pack(parent["header"]))
        shell.begin_cell(is_typed=options["is_cell"])
        shell.execution_count = options["execution_count"]
        if self._bootstrap.group is not None:
            self._bootstrap.group.before_cell(options["cell"])
        self._switches.note()
        self._bootstrap.progress.begin_cell()
        self._bootstrap.mpi.begin_cell()
        self._begun.append(parent["header"]["msg_id"])
        self._cell = {
            "number": options["cell"],
            "request": parent["header"]["msg_id"],
            "execution_count": options["execution_count"],
            "lines_before": options["lines_before"],
        }
        content = parent["content"]
        start = time.time()
        reply = self._with_lost_work(await self._execute(content["code"]))
        self._stop_hearing()
        reply["duration_s"] = time.time() - start
        changed = self._descriptors.restore()
        restore_streams()
        if changed:
            sys.stderr.write(f"{changed}\n")
        for words in self._switches.put_back() if self._interrupted else ():
            sys.stderr.write(f"{words}\n")
        self._bootstrap.metrics.end_cell()
        self._cell = None
        error = shell.error if reply["status"] == "error" else None
        if cell_errors.is_good_exit(error) and not (self._interrupted or self._publisher.was_interrupted):
            error, reply = None, {"status": "ok", "duration_s": reply["duration_s"]}
        cut_imports = self._imports.clean_up()
        if error is not None and not isinstance(error, KeyboardInterrupt):
            cut_imports += self._imports.behind(error)
        if cut_imports:
            reply["cut_imports"] = cut_imports
        group, of_group = hooks.after_cell(self._bootstrap.group, self._bootstrap.horovod.calls, error)
        reply |= of_group | {"mpi_revoked": self._bootstrap.mpi.end_cell()}
        if error is not None:
            interrupts = self._interrupted, self._publisher.was_interrupted
            cell_errors.complete(reply, shell, options["lines_before"], *interrupts)
            cell_errors.let_go(error)
        shell.end_cell()
        buffers = self._take_value(reply) if options.get("value") else []
        quiet = self._end_cell(parent, mark)
        told = {"quiet": quiet, "group": group}
        reply = json_clean(reply)
        if self._keeps_replies:
            self._last_reply = {"cell": parent["header"]["msg_id"], "reply": reply, "told": told}, buffers
        self.session.send(
            stream, "execute_reply", reply, parent, metadata={OPTIONS: told}, ident=ident, buffers=buffers
        )

    async def _execute(self, code: str) -> dict[str, Any]:
        """Run the code; SIGINT is raised in what this calls and nowhere else, so it can't cost the reply."""
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            if self._interrupted:
                raise KeyboardInterrupt  # noqa: TRY301  (as if it had come a moment later)
            return await self.do_execute(code, False, True, {}, False)  # type: ignore[no-any-return]
        except KeyboardInterrupt as error:
            # It came in the moment before or after the cell's own code, or while ipykernel asked for the error's text.
            if not self.shell.has_report:
                self.shell.end_with(error)
            return {"status": "error"}
        except Exception:
            if self.shell.error is None:
                raise
            return {"status": "error"}  # ipykernel asked for the error's text, and that raised

    def _with_lost_work(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return an error in place of a cell's good end where what it did on the GPU was aborted meanwhile."""
        group = self._bootstrap.group
        if reply["status"] != "ok" or group is None or not group.lost_work:
            return reply
        self.shell.end_with(cell_errors.ReleasedError(cell_errors.LOST_WORK))
        return {"status": "error"}

    def _on_release(self, _number: int, frame: Any) -> None:
        """Raise in the cell's code before a collective on the GPU that is aborted gives it values that are not valid.

        Where the cell can't bear that, or catches it, ``_with_lost_work`` reports it at the end.
        """
        if any(map(_is_cell, outwards(frame))) and not self._untimely.is_bad_moment(frame):
            raise cell_errors.ReleasedError(cell_errors.LOST_WORK)

    def _stop_hearing(self) -> None:
        """Have SIGINT mean nothing from here on; one whose handler is the cell's own may come at this very moment."""
        while True:
            try:
                signal.signal(signal.SIGINT, ignore_signal)
            except KeyboardInterrupt:
                self._interrupted = True
            else:
                return

    @contextmanager
    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """Interrupt a cell that awaits: at once, where ipykernel's own way waits until the loop has something to do."""
        loop = asyncio.get_running_loop()

        def interrupt(_number: int, frame: Any) -> None:
            self._interrupted = True
            if self.shell.puts_off() or self._untimely.puts_off(frame):
                return
            if any(_is_cell(each) for each in outwards(frame)):
                self._imports.note(frame)
                raise KeyboardInterrupt  # IPython catches it; what else a task raises would end the loop
            loop.call_soon_threadsafe(future.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: Any) -> None:
        self._interrupted = True
        if not any(each.f_code is _DO_EXECUTE for each in outwards(frame)):
            return  # the cell has not begun, and won't, or it has ended
        if not self.shell.puts_off() and not self._untimely.puts_off(frame):
            self._imports.note(frame)
            signal.default_int_handler(number, frame)

    def _note_interrupt(self, _number: int, _frame: Any) -> None:
        self._interrupted = True

    def pre_handler_hook(self) -> None:
        """Leave SIGINT to :meth:`_execute`."""

    def post_handler_hook(self) -> None:
        """Leave SIGINT to :meth:`_execute`."""

    def _end_cell(self, parent: dict[str, Any], mark: tuple[int, int]) -> bool:
        """Close the cell's output; True when there was none."""
        flush_all(sys.stdout, sys.stderr)
        if self._publisher.is_silent_since(mark):
            return True
        with self._publisher.ending_cell():
            super()._publish_status("idle", "shell", parent)
        return False

    def _take_value(self, reply: dict[str, Any]) -> list[Any]:
        """Add the last expression's value to the reply."""
        value = self.shell.displayhook.last_value
        self.shell.displayhook.last_value = NO_VALUE
        if reply["status"] != "ok" or value is NO_VALUE:
            reply["value"] = {"kind": "none"}
            return []
        try:
            pickled, buffers = dump_value(value)
        except UnserializableValueError as error:
            reply["value"] = {"kind": "unserializable", "reason": str(error)}
            return []
        note, frames = lend(self._bootstrap.shelf, buffers)
        reply["value"] = {"kind": "pickle", "shelf": note}
        return [pickled, *frames]

    def rank_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Serve one of the client's own requests: bootstrap, push, pull."""
        content = parent["content"]
        try:
            with self._publisher.in_use():
                if content["do"] == "repeat":
                    reply, buffers = self._repeat_reply(content["cell"])
                else:
                    reply, buffers = self._bootstrap.serve(content, parent["buffers"])
        except Exception as error:
            # Whatever went wrong is the client's to tell, with this rank's name.
            self.log.debug("rank_request %s failed", content.get("do"), exc_info=True)
            reply, buffers = {"status": "error", "ename": type(error).__name__, "evalue": str(error)}, []
        self.session.send(stream, "rank_reply", reply, parent, ident=ident, buffers=buffers)

    def control_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Serve what can't wait for the cell that runs, on the control thread."""
        buffers: list[Any] = []
        try:
            if parent["content"]["do"] == "repeat":
                reply, buffers = self._repeat_reply(parent["content"]["cell"])
            else:
                reply = self._bootstrap.serve_beside(parent["content"], self._cell)
        except Exception as error:  # noqa: BLE001
            # Whatever went wrong is the client's to tell, with this rank's name. Nothing on this thread may log: a
            # cell that was cut off could have left the lock of ``logging`` taken.
            reply = {"status": "error", "ename": type(error).__name__, "evalue": str(error)}
        self.session.send(stream, "rank_reply", reply, parent, ident=ident, buffers=buffers)

    def _repeat_reply(self, cell: str) -> tuple[dict[str, Any], list[Any]]:
        """Return the reply of a cell once more, if it ended last; whether it runs; which group the rank is in."""
        group = self._bootstrap.group
        running = self._cell  # another thread may end it at this moment
        runs = running is not None and running["request"] == cell
        begun = cell in self._begun
        told = {"status": "ok", "begun": begun, "ended": False, "runs": runs}
        told |= {"group": "none", "generation": 0} | hooks.counts(group, self._bootstrap.horovod.calls)
        if group is not None:
            told |= {"group": group.tag, "generation": group.generation}
        content, buffers = self._last_reply
        return (told | content | {"ended": True}, buffers) if content.get("cell") == cell else (told, [])

    def raw_input(self, prompt: str = "") -> NoReturn:
        """Refuse: nobody could tell which rank asks."""
        raise InputOnRankError(f"input({str(prompt)!r})" if prompt else "input()")

    def getpass(self, prompt: str = "", stream: Any = None) -> NoReturn:  # noqa: ARG002
        """Refuse, for the same reason."""
        raise InputOnRankError(f"getpass({str(prompt)!r})" if prompt else "getpass()")
