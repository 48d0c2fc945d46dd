"""Run programs in processes of their own, which this rank waits for.

Covers: forking one from the warm process, or starting it; its exit and its errors, interrupts, ending it, what it does.
Does not cover: the program's own side (``in_own_process``), which program runs where (``features.scripts.rank``).

The program's output goes to the rank's pipes, so it is shown as the rank's. It sends its metrics and its activity on
the rank's socket and page.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ...process_table import runs, start_time
from ...protocol.environment import NO_WARM, PREFIX, PRELOAD, WITHOUT_TORCH
from ...protocol.rank_death import signal_text
from ...protocol.time_limits import PROGRAM_WHERE_SECONDS, PROGRAMS_GRACE_SECONDS, PROGRAMS_POLL_SECONDS
from ...rank.libraries.defaults import without_session_defaults
from ...rank.nanny.exit_report import StackReader
from ...rank.nanny.ipc import anonymous_file
from ...rank.process_group.errors import ReleasedError
from ...rank.warm import channel
from ...rank.warm.start import PROGRAM, Forks, fork
from ...rank_sessions import family, kill, members
from .errors import ProgramExit, ProgramFailedError, ProgramInterrupt, ScriptError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import psutil

    from ...rank.nanny.ipc import RankEnd
    from .mpi_connection import MpiConnection

# Variables of one rank, which a launcher must not find.
_OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_OF_RANK_BEGIN = ("TORCHELASTIC_", "GROUP_", "OMPI_COMM_WORLD_")
# ipykernel sets these for all that a notebook or a rank starts: colours as on a terminal, with which bars move a cursor
# that a notebook doesn't have, and plots in the notebook.
_OF_KERNEL = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
_OF_JOB_BEGIN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", PREFIX)  # of the MPI job that this rank belongs to
# Of a program's own Python: it imports this package before it looks into the working directory.
COMMAND = "import sys; sys.path.remove(''); from jupyter_disttrain.features.scripts.in_own_process import main; main()"
_KEPT = (PRELOAD, NO_WARM, WITHOUT_TORCH)


class ProgramReleasedError(ScriptError, ReleasedError):
    """A program was ended because another rank's had failed."""


class _Forked:
    """A process that the warm process has forked."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        (self.pid,) = forks.pids
        self._ended: tuple[bool, int | None] = (False, None)  # kept: it is reported once

    def fileno(self) -> int | None:
        """Return a descriptor that is readable once it has ended; None if there is none."""
        return None if self._forks.is_abandoned else self._forks.fileno()

    def poll(self) -> tuple[bool, int | None]:
        """Return whether it has ended, and its status as from ``os.waitpid``, if known."""
        if not self._ended[0] and (self._forks.is_abandoned or _is_readable(self._forks.fileno())):
            end = self._forks.poll()
            self._ended = (False, None) if end is None else (True, end[1])
        return self._ended

    def close(self) -> None:
        """Let the warm process kill what the program has left running."""
        self._forks.close()


class _Started:
    """A process that this rank has started itself."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def fileno(self) -> None:
        return None

    def poll(self) -> tuple[bool, int | None]:
        code = self._process.poll()
        return code is not None, None if code is None else code << 8 if code >= 0 else -code

    def close(self) -> None:
        """Leave what the program has left running to the nanny."""


class _Running:
    """The program that the rank waits for, and the connection to it."""

    def __init__(
        self, process: _Forked | _Started, control: socket.socket, content: Mapping[str, Any], files: Sequence[int]
    ) -> None:
        self.process, self.control = process, control
        # In memory: faulthandler writes the program's stack there, when it crashes and on request.
        self.crash_file, self._stack_file = files
        self.name: str = content["target"]
        self._run_id: str = content["run_id"]
        self.started = start_time(process.pid)
        self.message: dict[str, Any] = {}  # its error or exit, as it has reported it
        self._stack = StackReader(process.pid, self._stack_file)
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._owes_reply = False
        self.is_interrupted = False  # it ends by itself, or is killed
        self.is_connected = True  # it has not closed the connection, as it does by os.exec
        self._turns = threading.Lock()  # between a request to it and the end of the connection
        self._kills_at: float | None = None  # when to kill a program in an MPI job that should end
        self.was_killed = False  # then: its status is not its own
        self.released = ""  # why it was ended, if it was
        self.started_by_it: list[psutil.Process] = []  # then
        self.mpi: MpiConnection | None = None  # of a program in an MPI job

    def follow_mpi(self) -> None:
        """End a program whose MPI job has ended, or which waits in MPI's own end for ranks that never come."""
        if self.mpi is None or self._kills_at is not None:
            if self._kills_at is not None and time.monotonic() > self._kills_at:
                self.was_killed = True
                self.kill()
            return
        has_failed = "failed" in self.message or "exited" in self.message or self.message.get("code")
        if has_failed or _is_readable(self.mpi.fileno()):
            self._kills_at = time.monotonic() + PROGRAMS_GRACE_SECONDS
            if not has_failed:
                self.released = self.released or "mpiexec has ended"
                self.signal(signal.SIGTERM)

    def take(self) -> bool:
        """Take a message of the program; return False at the end of the connection."""
        message, _ = channel.receive(self.control)
        if message is None:
            self.is_connected = False
            return False
        if "where" in message:
            self._replies.put(message["where"])
        else:
            self.message |= message
        return True

    def where(self, about: Sequence[Any]) -> dict[str, Any] | None:
        """Return what the program is doing, as ``stacks.where`` does; None if it has ended.

        Of one that has not replied to two requests, the result has the stack that Python writes at a signal: it holds
        the GIL. Called on the control thread.
        """
        with self._turns:
            if self.control.fileno() == -1:
                return None
            found: dict[str, Any] = {"stack": [], "line": None, "call": None, "collective": None, "called": []}
            if self._owes_reply and self._reply() is None:
                # Before it is ready, and after it has run another program in its place, the signal would end it.
                may_signal = self.is_connected and "ready" in self.message
                return found | {"outside": self._stack.read() if may_signal else ""}
            try:
                channel.send(self.control, {"about": [each for *each, run_id in about if run_id == self._run_id]})
            except OSError:
                return found  # it ends, or has closed the connection
            self._owes_reply = True
            reply = self._reply(PROGRAM_WHERE_SECONDS) or {}
            if "failure" in reply:
                return found
            found |= {name: value for name, value in reply.items() if name != "mpi"}  # which is not the session's
            for collective in filter(None, (found["collective"], *found["called"])):
                collective["run"] = self._run_id
            return found

    def _reply(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        try:
            reply = self._replies.get(timeout=timeout_s) if timeout_s else self._replies.get_nowait()
        except queue.Empty:
            return None
        self._owes_reply = False
        return reply

    def close(self) -> None:
        """Close the connection and the files."""
        self._replies.put({})  # a request must not wait for a reply any more
        with self._turns:
            self.control.close()
            os.close(self.crash_file)
            os.close(self._stack_file)

    def signal(self, number: int) -> None:
        """Send a signal to the program and the processes of its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the program and all that it has started."""
        kill(self._family)

    def end_what_it_started(self) -> None:
        """After its end: kill all that it has started if it was released, else end its process group."""
        if self.started_by_it:
            kill(lambda: [*self.started_by_it, *self._family()])
        elif self.is_interrupted:
            self.signal(signal.SIGTERM)  # also what ignores interrupts, as torchrun does

    def _family(self) -> list[psutil.Process]:
        return family(self.process.pid, self.started)


class Programs:
    """Runs the programs of this rank, one at a time."""

    def __init__(self, rank_end: RankEnd) -> None:
        self._rank_end = rank_end
        self._running: _Running | None = None
        self._cell: int | None = None  # number of the cell that runs a program
        self._ended = (0, "")  # a cell whose program is to end, maybe before it has begun here, and why
        self._ended_programs: list[_Running] = []  # of which processes may be left

    @property
    def doing(self) -> str:
        """The program that the rank waits for, as text; empty if there is none."""
        running = self._running
        return "" if running is None else f"its program {running.name} (process {running.process.pid})"

    @property
    def runs(self) -> bool:
        """Whether the rank waits for a program."""
        return self._cell is not None

    @property
    def reports(self) -> bool:
        """Whether a program writes its activity as that of the rank."""
        running = self._running
        return running is not None and running.is_connected and "ready" in running.message

    def run(
        self, content: dict[str, Any], environment: Mapping[str, str], folder: str, mpi: MpiConnection | None
    ) -> None:
        """Run a program to its end.

        Parameters
        ----------
        content
            What :class:`program.Program` takes.
        mpi
            Where the process that mpiexec starts for this rank connects; None without MPI.

        Raises
        ------
        ScriptError
            If it can't be started, ends with an error, or exits with a code other than 0.
        ProgramReleasedError
            If it was ended because another rank's had failed.
        ProgramInterrupt
            If it was interrupted.
        """
        self._close_ended()
        number: int = content["cell"]["number"]
        self._cell = number
        try:
            if mpi is not None:

                def because() -> str:
                    return self._ended[1] if self._ended[0] == number else ""

                environment = {**environment, **_wait_for_mpi(mpi, because, content["target"])}
            running = self._running = self._start(content, environment, folder)
            running.mpi = mpi
            if self._ended[0] == number:
                self._end_because(running, self._ended[1])
            self._follow(running)
        finally:
            self._cell = None
            if mpi is not None:
                mpi.close()

    def _follow(self, running: _Running) -> None:
        """Wait for the program to the end; raise its error."""
        status: int | None = None
        try:
            try:
                _, status = _wait_for_program(running)
            except KeyboardInterrupt:
                running.is_interrupted = True
                status = _end(running)
                code = running.message.get("code") if status is None else status
                if code != 0:
                    report = running.message.get("failed", {})
                    is_interrupt = report.get("ename") == "KeyboardInterrupt"
                    raise (ProgramInterrupt(report) if is_interrupt else KeyboardInterrupt) from None
            except BaseException:  # nothing waits for the program any more
                running.kill()
                raise
        finally:
            self._running = None
            self._rank_end.note_program()
            running.end_what_it_started()
            crash = os.pread(running.crash_file, 1 << 16, 0).decode(errors="replace")
            running.close()
            if running.mpi is not None:
                running.mpi.end(running.message["code"] << 8 if "code" in running.message else status or 0)
            self._ended_programs.append(running)
        _check(running, status, crash)

    def _start(self, content: dict[str, Any], environment: Mapping[str, str], folder: str) -> _Running:
        try:
            folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            raise ScriptError(
                f"the notebook's folder {folder} can't be entered on this host: {error.strerror}"
            ) from None
        with ExitStack() as always, ExitStack() as on_error:
            always.callback(os.close, folder_fd)
            ours, theirs = socket.socketpair()
            on_error.callback(ours.close)
            always.callback(theirs.close)
            files = []
            for _ in range(2):
                files.append(anonymous_file())
                on_error.callback(os.close, files[-1])
            shared = self._rank_end.for_program() | {"crash": files[0], "stack": files[1]}
            channel.send(ours, content | {"named": list(shared)}, list(shared.values()))
            process = _fork_or_start(content, environment, folder_fd, folder, theirs)
            on_error.pop_all()
        return _Running(process, ours, content, files)

    def end(self, cell: int, because: str) -> None:
        """End the program of a cell; called on another thread."""
        self._ended = cell, because
        running = self._running
        if running is not None and cell == self._cell:
            self._end_because(running, because)

    def _close_ended(self) -> None:
        """Let go of programs of which no process is left."""
        for ended in list(self._ended_programs):
            if not any(members(ended.process.pid, ended.started)):
                ended.process.close()
                self._ended_programs.remove(ended)

    def where(self, about: Sequence[Any]) -> dict[str, Any] | None:
        """Return what the program is doing, as ``stacks.where`` does; None if there is none."""
        running = self._running
        return None if running is None else running.where(about)

    @staticmethod
    def _end_because(running: _Running, because: str) -> None:
        if running.is_interrupted or running.released or running.was_killed:
            return
        running.started_by_it = family(running.process.pid, running.started)
        if "code" in running.message:  # it has ended, except for Python's own end
            running.was_killed = True
        else:
            running.released = because
        with suppress(ProcessLookupError):
            if runs(running.process.pid, running.started):
                os.kill(running.process.pid, signal.SIGTERM)
        timer = threading.Timer(PROGRAMS_GRACE_SECONDS, running.kill)
        timer.daemon = True
        timer.start()


def _fork_or_start(
    content: Mapping[str, Any], environment: Mapping[str, str], folder_fd: int, folder: str, control: socket.socket
) -> _Forked | _Started:
    """Have the warm process fork the program; start it in a new process where that is not possible."""
    options = ["-m"] if content["is_module"] else []
    if not environment.get(NO_WARM):
        with suppress(LaunchError):  # reported when the ranks started
            return _Forked(
                fork(
                    PROGRAM,
                    environment=environment,
                    folder=folder_fd,
                    arguments=[sys.executable, "-u", *options, content["target"], *content["arguments"]],
                    named={"control": control.fileno()},
                    numbered={number: number for number in (0, 1, 2)},
                )
            )
    return _Started(
        subprocess.Popen(  # noqa: S603
            [sys.executable, "-u", "-c", COMMAND, str(control.fileno())],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            pass_fds=[control.fileno()],
            start_new_session=True,
        )
    )


def _wait_for_program(running: _Running, longest_s: float | None = None) -> tuple[bool, int | None]:
    """Wait for its exit, and take its messages; return whether it has ended, and its status.

    An interrupt ends this as if it were the user's code, and nothing that this calls (``rank.interrupts.deferral``).
    """
    deadline = None if longest_s is None else time.monotonic() + longest_s
    end, control = running.process.fileno(), running.control.fileno()
    ready = select.poll()
    for source in (end, control):
        if source is not None:
            ready.register(source, select.POLLIN)
    is_connected = True
    while True:
        if end is not None and running.process.fileno() is None:  # the warm process was killed
            ready.unregister(end)
            end = None
        limit_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        polls = end is None or running.mpi is not None
        pause_s = min(PROGRAMS_POLL_SECONDS, limit_s or PROGRAMS_POLL_SECONDS) if polls else limit_s
        events = ready.poll(None if pause_s is None else 1000 * pause_s)
        if is_connected and any(source == control for source, _ in events) and not running.take():
            is_connected = False
            ready.unregister(control)
        running.follow_mpi()
        has_ended, status = running.process.poll()
        if has_ended:
            while is_connected and _is_readable(control) and running.take():
                pass
            return True, status
        if limit_s == 0:
            return False, None


def _is_readable(descriptor: int) -> bool:
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(0))


def _wait_for_mpi(mpi: MpiConnection, because: Callable[[], str], name: str) -> Mapping[str, str]:
    """Wait for the process that mpiexec starts for this rank; return its variables.

    ``because`` returns why mpiexec has ended, if it has. An interrupt ends this, as above.
    """
    variables: Mapping[str, str] | None = None
    try:
        while variables is None and not because():
            variables = mpi.accept(PROGRAMS_POLL_SECONDS)
    finally:
        if variables is None:
            mpi.close()
    if variables is None:
        raise ScriptError(f"{name} was not started: {because()}")
    return variables


def _end(running: _Running) -> int | None:
    """End a program that is interrupted, as its terminal would have done; return its status.

    It gets an interrupt, then SIGTERM; another interrupt of the user kills it.
    """
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            running.signal(number)
            has_ended, status = _wait_for_program(running, PROGRAMS_GRACE_SECONDS)
            if has_ended:
                return status
    except KeyboardInterrupt:
        pass
    running.kill()
    while True:
        with suppress(KeyboardInterrupt):
            return _wait_for_program(running)[1]


def _check(running: _Running, status: int | None, crash: str) -> None:
    """Raise the error of a program that has ended."""
    message = running.message
    if "trouble" in message:
        raise ScriptError(message["trouble"])
    if "failed" in message:
        raise ProgramFailedError(message["failed"])
    if running.released:
        raise ProgramReleasedError(f"{running.name} was ended because {running.released}")
    if "exited" in message:
        raise ProgramExit(f"{running.name} exited: {message['exited']}")
    if status is None and "code" not in message:
        raise ProgramExit(f"{running.name} ended, and how is not known: the warm process was killed, too")
    if status is None or (running.was_killed and "code" in message):
        code = message["code"]
    else:
        code = os.waitstatus_to_exitcode(status)
    if not code:
        return
    how = f"was killed by {signal_text(-code)}" if code < 0 else f"exited with code {code}"
    raise ProgramExit(f"{running.name} {how}", {"crash": crash} if crash else {})


# Environments


def of_rank(identity: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the environment of a program that takes this rank's place, as torchrun would set it."""
    return outside_job() | dict(identity) | {"MASTER_PORT": str(port)}


def of_node(nodes: int, port: int) -> dict[str, str]:
    """Return the environment of a program that starts processes of its own, one such program on each node."""
    environment = outside_job()
    kept = {name: value for name, value in environment.items() if name not in _OF_RANK}
    kept = {name: value for name, value in kept.items() if not name.startswith(_OF_RANK_BEGIN)}
    return kept | {"NNODES": str(nodes), "MASTER_PORT": str(port)}


def outside_job() -> dict[str, str]:
    """Return this process's environment without what makes it a part of the session's MPI job."""
    found = without_session_defaults(os.environ)
    found = {name: value for name, value in found.items() if name in _KEPT or not name.startswith(_OF_JOB_BEGIN)}
    found.pop("PYTHONSAFEPATH", None)  # the rank's own: a script finds the modules beside it
    for name, value in _OF_KERNEL.items():
        if found.get(name) == value:
            del found[name]
    return found
