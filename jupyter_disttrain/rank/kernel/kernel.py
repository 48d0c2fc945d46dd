"""Run cells and serve the client's requests on a rank.

Covers: one execute_request from arrival to reply, the rank_request messages.
Does not cover: the process group (``rank.process_group.group``), identity (``requests``), ``input()``
(``rank.user_input.questions``).

A cell without output costs one request and one reply: no busy or idle status, no echo of the input. The reply states
whether the client must wait for an idle status, which follows all output.
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

import ipykernel.compiler
from ipykernel.jsonutil import json_clean
from ipyparallel.engine.kernel import IPythonParallelKernel
from traitlets import Type

from ...errors import UnserializableValueError
from ...features.debugger.rank.debugger import RankDebugger
from ...protocol.environment import KEEP
from ...protocol.messages import OPTIONS
from ...protocol.requests import Handlers, RankRequest, Reply
from ...protocol.serialization import dump_value
from .. import user_code
from ..cell_started import CellStarted, Subscribers
from ..interrupts.cut_imports import CutImports
from ..interrupts.deferral import InterruptDeferral, is_statement, outwards
from ..interrupts.torch_flags import TorchFlags
from ..nanny.process_tree import WAKE_SIGNAL, signal_main_thread
from ..output.closed_streams import Descriptors, restore_streams
from ..output.streams import flush_all
from ..process_group.errors import RELEASE_SIGNAL, ReleasedError
from ..user_input.debugger_hooks import let_debuggers_ask, stop_tracing
from ..user_input.questions import Questions
from . import cell_errors
from .requests import serves, serves_beside
from .shell import NO_VALUE, RankShell, is_debug

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...protocol.messages import Record
    from ..nanny.ipc import RankEnd
    from .requests import RequestHandler


def ignore_signal(_number: int, _frame: Any) -> None:
    """Ignore a signal; unlike SIG_IGN, programs that a rank starts do not inherit this handler."""


def error_reply(error: BaseException) -> dict[str, Any]:
    """Return the reply for an error, also if its own ``__str__`` fails."""
    text = str(traceback.TracebackException.from_exception(error))
    return {"status": "error", "ename": type(error).__name__, "evalue": text}


CELLS_REMEMBERED = 100  # ids of the latest cells: distinguish a cell that has ended from one that never arrived
_DO_EXECUTE = IPythonParallelKernel.do_execute.__code__


class _NoShellChannelThread:
    """Stand in for ipykernel's shell channel thread, from which it takes the thread that receives signals."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        """Return False: the main thread reads shell messages."""
        return False


class RankKernel(IPythonParallelKernel):
    """Run the client's cells and serve its requests."""

    shell_class = Type(RankShell)
    _supports_kernel_subshells = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shell_handlers[RankRequest.msg_type] = self.rank_request
        self.control_handlers[RankRequest.msg_type] = self.control_request
        self.shell_channel_thread = _NoShellChannelThread()
        # The running cell's number, request id and execution count; None while no cell runs.
        self.cell: dict[str, Any] | None = None
        self._deferral = InterruptDeferral()
        self._imports = CutImports()
        self._interrupted = False
        self._torch_flags = TorchFlags()
        self._keeps_replies = bool(os.environ.get(KEEP))
        self._last_reply: Reply = {}, []  # for a client that attaches later
        self._begun: deque[str] = deque(maxlen=CELLS_REMEMBERED)
        self._interrupts = 0
        self.shell.questions = Questions(self._publish_record, lambda: self.cell is not None, lambda: self._interrupts)
        self.shell.rank_debugger = RankDebugger(
            self.shell.questions,
            self._publish_record,
            self._wake_main_thread,
            hidden=lambda: self.shell.user_ns_hidden,
            hold_timeouts=self._hold_timeouts,
            folder_of_cells=lambda: str(ipykernel.compiler.get_tmp_directory()),  # it is replaced later
        )
        let_debuggers_ask(self.shell.questions, self.shell.rank_debugger)
        # An interrupt of an earlier cell is dropped while SIGINT has no effect.
        self.cell_starts: Subscribers = [self._deferral.drop_interrupt, self._accept_interrupts]

    def take_charge(self, request_handler: RequestHandler, rank_end: RankEnd, descriptors: Descriptors) -> None:
        """Set the objects that serve the requests."""
        self._rank_end, self._descriptors = rank_end, descriptors
        self.cell_starts += [user_code.set_cells, self.shell.clear_state, self._torch_flags.note]
        self._request_handler = request_handler
        signal.signal(RELEASE_SIGNAL, self._on_release)
        signal.signal(WAKE_SIGNAL, self._on_wake)
        self.shell.is_late = lambda: self._interrupted and not self._deferral.waits

    def _wake_main_thread(self) -> None:
        """Have the main thread trace what it runs, if the debugger wants that; a call in C code returns first."""
        if self.cell is not None:
            signal_main_thread(os.getpid(), WAKE_SIGNAL)

    def _on_wake(self, _number: int, frame: Any) -> None:
        if self.cell is not None:
            self.shell.rank_debugger.begin(frame)

    def _hold_timeouts(self, held: bool) -> None:
        if self._request_handler.group is not None:
            self._request_handler.group.hold_timeouts(held)

    def _publish_status(self, *_args: Any, **_options: Any) -> None:
        """Publish no status of a request: only a cell with output has one, at its end."""

    _publish_status_and_flush = _publish_status

    def _publish_record(self, record: Record) -> None:
        """Publish a record of the running cell, in its place among the output."""
        parent = self.get_parent("shell")
        self.session.send(
            self.iopub_socket, record.msg_type, record.to_content(), parent=parent, ident=self._topic(record.msg_type)
        )

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run a cell and reply."""
        if self._rank_end.close_if_damaged():
            return  # the nanny reports why the rank ends
        try:
            with self._rank_end.in_use():
                await self._serve_cell(stream, ident, parent, parent["metadata"][OPTIONS])
        except (Exception, KeyboardInterrupt, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
            # A bug of this package, or what a hook of the user's raises around a cell: without a reply the client would
            # wait forever.
            self._ignore_sigint()
            self.cell = None
            self.shell.rank_debugger.end_cell()
            if isinstance(error, OSError) and self._rank_end.close_if_damaged():
                return  # the nanny reports why the rank ends
            reply = error_reply(error) | {"traceback": traceback.format_exc().splitlines()}
            group = "none" if self._request_handler.group is None else "broken"  # how many collectives ran is unknown
            self._reply(stream, ident, parent, reply, {"quiet": True, "group": group})

    async def _serve_cell(self, stream: Any, ident: Any, parent: dict[str, Any], options: dict[str, Any]) -> None:
        shell: RankShell = self.shell
        looks_at_error = is_debug(parent["content"]["code"])
        if not looks_at_error:
            shell.let_go()
        count = options["execution_count"]
        started = CellStarted(
            number=options["cell"], execution_count=count, header=parent["header"], is_typed=options["is_cell"]
        )
        for subscriber in self.cell_starts:
            subscriber(started)
        self._begun.append(parent["header"]["msg_id"])
        shell.stops_at_error = shell.stops_at_errors or bool(options.get("pdb"))
        self.cell = {"number": options["cell"], "request": parent["header"]["msg_id"], "execution_count": count}
        content = parent["content"]
        start = time.time()
        reply = self._with_lost_work(await self._execute(content["code"]))
        self._ignore_sigint()
        reply["duration_s"] = time.time() - start
        changed = self._descriptors.restore()
        restore_streams()
        if changed:
            sys.stderr.write(f"{changed}\n")
        for text in self._torch_flags.put_back() if self._interrupted else ():
            sys.stderr.write(f"{text}\n")
        self._request_handler.metrics.end_cell()
        self.cell = None
        stop_tracing()
        self.shell.rank_debugger.end_cell()
        error = shell.error if reply["status"] == "error" else None
        if cell_errors.is_good_exit(error) and not (self._interrupted or self._rank_end.was_interrupted):
            error, reply = None, {"status": "ok", "duration_s": reply["duration_s"]}
        cut_imports = self._imports.clean_up()
        if error is not None and not isinstance(error, KeyboardInterrupt):
            cut_imports += self._imports.behind(error)
        if cut_imports:
            reply["cut_imports"] = cut_imports
        group, of_group = self._request_handler.after_cell(error)
        reply |= of_group | {"mpi_revoked": self._request_handler.mpi.end_cell()}
        if error is not None:
            cell_errors.complete(reply, shell, self._interrupted, self._rank_end.was_interrupted)
            shell.let_go_later(error, may_keep=not looks_at_error)
        shell.end_cell()
        buffers = self._take_value(reply) if options.get("value") else []
        flush_all(sys.stdout, sys.stderr)
        quiet = self._rank_end.is_silent
        if not quiet:
            super()._publish_status("idle", "shell", parent)
        self._reply(stream, ident, parent, json_clean(reply), {"quiet": quiet, "group": group}, buffers)

    def _reply(
        self,
        stream: Any,
        ident: Any,
        parent: dict[str, Any],
        reply: dict[str, Any],
        options: dict[str, Any],
        buffers: Sequence[Any] = (),
    ) -> None:
        if self._keeps_replies:
            self._last_reply = {"cell": parent["header"]["msg_id"], "reply": reply, "metadata": options}, list(buffers)
        metadata = {OPTIONS: options}
        self.session.send(stream, "execute_reply", reply, parent, metadata=metadata, ident=ident, buffers=list(buffers))

    async def _execute(self, code: str) -> dict[str, Any]:
        """Run the code; SIGINT raises only in what this calls, so that it cannot prevent the reply."""
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            if self._interrupted:
                raise KeyboardInterrupt  # noqa: TRY301  (an interrupt that arrived just before counts too)
            self.shell.rank_debugger.begin()
            return await self.do_execute(code, False, True, {}, False)  # type: ignore[no-any-return]
        except KeyboardInterrupt as error:
            # Raised just before or after the cell's own code, or while ipykernel formatted the error.
            if not self.shell.has_report:
                self.shell.end_with(error)
            return {"status": "error"}
        except Exception:
            # ipykernel calls methods of the cell's error, e.g. its __str__, which may raise anything.
            if self.shell.error is None:
                raise
            return {"status": "error"}

    def _with_lost_work(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Replace an "ok" reply with an error if a release aborted the cell's collectives on the GPU."""
        group = self._request_handler.group
        if reply["status"] != "ok" or group is None or not group.lost_work:
            return reply
        self.shell.end_with(ReleasedError(cell_errors.LOST_WORK))
        return {"status": "error"}

    def _on_release(self, _number: int, frame: Any) -> None:
        """Raise in the cell's code before it can use invalid values from a collective on the GPU that is aborted.

        If an interrupt came with the release, it was already raised in the cell, which is then left alone. Where an
        error must not be raised at this point, or the cell catches it, ``_with_lost_work`` reports it at the end.
        """
        group = self._request_handler.group
        if group is None or group.is_raised or self.shell.questions.asks:
            return  # the user at a prompt goes on; the end of the cell reports it
        if any(map(is_statement, outwards(frame))) and not self._deferral.is_bad_moment(frame):
            group.is_raised = True
            raise ReleasedError(cell_errors.LOST_WORK)

    def _ignore_sigint(self) -> None:
        """Ignore SIGINT from here on; a handler that the cell installed may still raise while it is replaced."""
        while True:
            try:
                signal.signal(signal.SIGINT, ignore_signal)
            except KeyboardInterrupt:
                self._interrupted = True
            else:
                return

    @contextmanager
    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """Interrupt a cell that awaits, at once: ipykernel's own version waits until the event loop has work to do."""
        loop = asyncio.get_running_loop()

        def interrupt(_number: int, frame: Any) -> None:
            self._note_interrupt()
            if self.shell.puts_off() or self._deferral.puts_off(frame):
                return
            if self.shell.questions.asks or any(map(is_statement, outwards(frame))):
                self._cut_off(frame)  # IPython catches it; raised in another task it would end the loop
            loop.call_soon_threadsafe(future.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, _number: int, frame: Any) -> None:
        self._note_interrupt()
        if not any(each.f_code is _DO_EXECUTE for each in outwards(frame)):
            return  # the cell has ended, or has not begun and will not run
        if not self.shell.puts_off() and not self._deferral.puts_off(frame):
            self._cut_off(frame)

    def _cut_off(self, frame: Any) -> NoReturn:
        self._imports.note(frame)
        if self._request_handler.group is not None:
            self._request_handler.group.is_raised = True
        # An interrupt that was put off may follow the error of the wait that was released for it: that has the line.
        ended = self.shell.error
        raise KeyboardInterrupt().with_traceback(None if ended is None else ended.__traceback__)

    def _accept_interrupts(self, _cell: CellStarted) -> None:
        self._interrupted = False
        signal.signal(signal.SIGINT, self._note_interrupt)

    def _note_interrupt(self, _number: int = 0, _frame: Any = None) -> None:
        self._interrupted = True
        self._interrupts += 1
        self._rank_end.note_interrupt()

    def pre_handler_hook(self) -> None:
        """Leave SIGINT to :meth:`_execute`."""

    post_handler_hook = pre_handler_hook

    def _take_value(self, reply: dict[str, Any]) -> list[Any]:
        """Add the last expression's value to the reply."""
        value = self.shell.displayhook.last_value
        self.shell.displayhook.last_value = NO_VALUE
        if reply["status"] != "ok" or value is NO_VALUE:
            reply["value"] = {"kind": "none"}
            return []
        try:
            content, frames = self._request_handler.lend(*dump_value(value))
        except UnserializableValueError as error:
            reply["value"] = {"kind": "unserializable", "reason": str(error)}
            return []
        reply["value"] = {"kind": "pickle"} | content
        return frames

    def rank_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Serve one of our client's requests between cells, e.g. identify, push or pull."""
        with self._rank_end.in_use():
            self._answer(stream, ident, parent, serves, parent["buffers"])

    def control_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Serve a request that can't wait for the running cell, on the control thread."""
        self._answer(stream, ident, parent, serves_beside, self.cell)

    def _answer(self, stream: Any, ident: Any, parent: dict[str, Any], handlers: Handlers, more: Any) -> None:
        try:
            reply, buffers = handlers.serve(self._request_handler, parent["content"], more)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            # The client reports every error, with this rank's number. Nothing on the control thread may log: an
            # interrupted cell may have left the lock of ``logging`` held.
            reply, buffers = error_reply(error), []
        self.session.send(stream, "rank_reply", reply, parent, ident=ident, buffers=buffers)

    def repeat_reply(self, cell: str) -> Reply:
        """Return a cell's reply again if it was the last to end, whether it runs, and the rank's process group."""
        group = self._request_handler.group
        running = self.cell  # read once: another thread may clear it at any time
        runs = running is not None and running["request"] == cell
        tag, generation = ("none", 0) if group is None else (group.tag, group.generation)
        state = {"begun": cell in self._begun, "ended": False, "runs": runs, "group": tag, "generation": generation}
        state |= self._request_handler.counts()
        content, buffers = self._last_reply
        return (state | content | {"ended": True}, buffers) if content.get("cell") == cell else (state, [])

    def raw_input(self, prompt: Any = "") -> str:
        """Ask the user at the notebook, for ``input()``."""
        return self.shell.questions.ask(str(prompt))  # type: ignore[no-any-return]

    def getpass(self, prompt: str = "", stream: Any = None) -> str:  # noqa: ARG002
        """Ask the user at the notebook, without showing the answer, for ``getpass()``."""
        return self.shell.questions.ask(str(prompt), is_password=True)  # type: ignore[no-any-return]
