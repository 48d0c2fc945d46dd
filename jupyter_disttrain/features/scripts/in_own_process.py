"""Run a script in a process of its own: the side of that process.

Covers: the state that Python gives a program, running its code, reporting its error, answering what it is doing,
metrics and activity.
Does not cover: starting it and waiting for it (``runner``), its code (``find_code``).

The process is a fork of the warm process, or was started for this script. It ends as any Python program does: threads
are waited for, exit functions are called, the interpreter is finalized.
"""

from __future__ import annotations

import builtins
import faulthandler
import io
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from ...features.telemetry.rank import status_page
from ...features.telemetry.rank.log_metrics import MetricsLog
from ...features.telemetry.rank.progress import Progress
from ...features.telemetry.rank.sampler import Sampler
from ...features.telemetry.rank.stacks import where
from ...process_table import start_time
from ...protocol.environment import NO_WARM, PRELOAD, WITHOUT_TORCH
from ...rank import user_code
from ...rank.libraries.import_hooks import before_import, on_import
from ...rank.malloc import keep_freed_memory
from ...rank.nanny.exit_report import STACK_SIGNAL
from ...rank.nanny.ipc import SAMPLES, Sender
from ...rank.proc_self import file_of
from ...rank.warm import channel
from ...rank.warm.shadowed_modules import SearchPath, ShadowedModules
from ...rank_sessions import family, kill
from ..horovod.calls import MPI_OPS, HorovodCalls
from .errors import ScriptError
from .failure_report import report_of, report_of_interrupt
from .find_code import find_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .find_code import Code

# What the warm process has imported for notebooks: libraries would use a notebook's output.
_OF_NOTEBOOKS = ("IPython", "ipykernel", "ipyparallel", "matplotlib_inline", "comm", "debugpy")


def run_program(named: Mapping[str, int]) -> NoReturn:
    """Run the script that arrives on the descriptor ``"control"``; raises SystemExit with its exit code."""
    keep_freed_memory()
    control = socket.socket(fileno=named["control"])
    content, descriptors = channel.receive(control)
    if content is None:
        sys.exit(os.EX_UNAVAILABLE)  # the rank has ended
    program = Program(control, content, dict(zip(content["named"], descriptors, strict=True)))
    code = program.run()
    program.report_exit(code)
    sys.exit(code)


def _groups() -> Any:
    """Return what telemetry needs of a session's process group: the program has made all its groups itself."""
    return SimpleNamespace(since_ns=0) if "torch.distributed" in sys.modules else None


class Program:
    """The script of this process."""

    def __init__(self, control: socket.socket, content: dict[str, Any], given: Mapping[str, int]) -> None:
        self._control, self._content = control, content
        self._turns = threading.Lock()  # between messages on the socket
        self._pid = os.getpid()
        self._shadowed = ShadowedModules()
        self._page = mmap.mmap(given["page"], mmap.PAGESIZE)
        os.close(given["page"])
        faulthandler.enable(file=given["crash"], all_threads=False)
        os.register_at_fork(after_in_child=_report_crash_on_stderr)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # from the end of faulthandler to that of the process
        faulthandler.register(STACK_SIGNAL, file=given["stack"], all_threads=False)
        self._sender = Sender(socket.socket(fileno=given["wire"]), given["lock"])
        ends = control.fileno(), given["wire"], given["lock"]
        self._files = {end: file_of(end) for end in ends}
        self._metrics = MetricsLog(self._cell, self._send_metrics, self._sample, may_be_killed=True)
        self._metrics.share(content["world_size"])
        self._progress = Progress()
        self._sampler: Sampler | None = None
        self._calls = HorovodCalls()

    def _cell(self) -> dict[str, Any]:
        return self._content["cell"]  # type: ignore[no-any-return]

    def run(self) -> Any:
        """Run the script; return its exit code, as ``sys.exit`` takes it."""
        for name in [each for each in sys.modules if each.partition(".")[0] in _OF_NOTEBOOKS]:
            self._shadowed.forgotten[name] = sys.modules.pop(name)
        for name in (PRELOAD, NO_WARM, WITHOUT_TORCH, "PYTHONSAFEPATH"):  # they are for the start of this process
            os.environ.pop(name, None)
        _open_streams()
        threading.Thread(target=self._answer, name="disttrain control", daemon=True).start()
        self._send({"ready": True})
        self._progress.count()
        on_import("torch.distributed", _keep_ended_groups)
        on_import(MPI_OPS, self._calls.watch)
        if self._content["samples"]:
            self._sample()
        is_module = self._content["is_module"]
        if not self._content["has_mpi"]:
            before_import("mpi4py.MPI", _refuse_mpi)
            on_import("horovod.common.basics", _refuse_horovod)
        if is_module:  # finding it imports the packages that it is in
            here = str(Path.cwd())
            self._shadowed.forget(here, [here, *sys.path])
        try:
            found = find_code(self._content["target"], is_module=is_module)
        except ScriptError as error:
            self._send({"trouble": str(error)})
            return 1
        except Exception as error:  # noqa: BLE001  (it does not compile, or a package that it is in fails)
            self._report(error)
            return 1
        except KeyboardInterrupt as error:  # in a package's code
            return self._on_error(error)
        user_code.begin_script(found.code.co_filename)
        if not is_module:
            self._shadowed.forget(found.folder, [found.folder, *sys.path])
        return self._run(found)

    def _run(self, found: Code) -> Any:
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__.update(found.names(), __builtins__=builtins)
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        sys.argv = [found.first, *self._content["arguments"]]
        sys.orig_argv = [sys.executable, "-u", *sys.argv]
        sys.path = SearchPath([found.folder, *(path for path in sys.path if path)], self._shadowed)
        try:
            exec(found.code, main.__dict__)  # noqa: S102  (it is what this is for)
        except SystemExit as end:
            return self._on_exit(end)
        except BaseException as error:  # noqa: BLE001  (the script's own; the process ends)
            return self._on_error(error)
        finally:
            if os.getpid() == self._pid:
                self._metrics.end_cell()
        return 0

    def _on_exit(self, end: SystemExit) -> Any:
        if os.getpid() != self._pid or end.code in (None, 0):
            return end.code
        interrupt = report_of_interrupt(end, self._shown())
        if interrupt:
            self._send({"failed": interrupt})
        elif not isinstance(end.code, int):
            self._send({"exited": str(end.code)})
            return 1
        return end.code

    def _on_error(self, error: BaseException) -> int:
        hook = sys.excepthook
        if os.getpid() != self._pid or not _is_plain(hook):
            hook(type(error), error, error.__traceback__)
        else:
            self._report(error)
        return 1 if not isinstance(error, KeyboardInterrupt) else 128 + signal.SIGINT

    def _report(self, error: BaseException) -> None:
        sys.stdout.flush()
        self._send({"failed": report_of(error, self._shown())})

    def _shown(self) -> dict[str, Any]:
        """Let IPython format a traceback, and find its modules again; return how."""
        for name, module in self._shadowed.forgotten.items():
            sys.modules.setdefault(name, module)
        return self._content["shown"]  # type: ignore[no-any-return]

    def _is_connected(self) -> bool:
        """Whether the descriptors for the rank are open: a script may close all that it has not opened itself."""
        return all(file_of(end) == file for end, file in self._files.items())

    def _send_metrics(self, data: Any) -> None:
        if self._is_connected():
            self._sender.send(SAMPLES, [data])

    def _send(self, message: dict[str, Any]) -> None:
        if not self._is_connected():
            return  # the rank learns the exit code from the system
        try:
            with self._turns:
                channel.send(self._control, message)
        except OSError:
            traceback.print_exc()  # the rank has ended, and this process will

    def report_exit(self, code: Any) -> None:
        """Report the exit code, in case that the process from which this one was forked is killed."""
        if os.getpid() == self._pid:
            self._send({"code": code if isinstance(code, int) else int(code is not None)})

    # What the rank asks

    def _answer(self) -> None:
        """Answer requests of the rank, in a thread; end this process and what it has started with the rank."""
        started = start_time(self._pid)
        while True:
            request, _ = channel.receive(self._control)
            if os.getpid() != self._pid or not self._is_connected():
                return
            if request is None:
                try:
                    kill(lambda: [each for each in family(self._pid, started) if each.pid != self._pid])
                finally:
                    os.killpg(0, signal.SIGKILL)
                return
            try:
                found = where(_groups(), self._calls, self._cell(), request["about"])
            except Exception as error:  # noqa: BLE001  (it reads the frames of running code, and must outlive that)
                found = {"failure": f"{type(error).__name__}: {error}"}
            self._send({"where": found})

    def _sample(self) -> None:
        """Start to report this process's activity as the rank's."""
        if self._sampler is None and os.getpid() == self._pid:
            self._sampler = Sampler(
                self._cell,
                _groups,
                self._progress,
                self._metrics,
                lambda vitals: status_page.write(self._page, vitals),
                program=self._pid,
            )


def _is_plain(hook: Any) -> bool:
    """Whether a sys.excepthook only prints the error; others were set by the user, or by a library for the user."""
    module = str(getattr(hook, "__module__", ""))
    return module == "sys" or module.startswith("torch.distributed.")


def _report_crash_on_stderr() -> None:
    """Write the crash of a forked child to its stderr: in the file it would be taken for the program's own."""
    faulthandler.enable(file=2, all_threads=False)


def _keep_ended_groups(module: ModuleType) -> None:
    """Avoid a deadlock of torch at the end of a function that destroys the process group."""
    if module.is_available():  # torch may be built without it
        from ...rank.process_group.destroyed_groups import keep_ended_groups  # noqa: PLC0415  (imports torch)

        keep_ended_groups()


def _refuse_mpi(_module: ModuleType) -> None:
    """Refuse to start MPI where this process would be a world of its own."""
    raise ImportError(
        "MPI is imported here, and mpiexec has not started this process; run the script with %dist_run --mpi"
    )


def _refuse_horovod(module: Any) -> None:
    """Refuse to start Horovod where this process would be a world of its own."""

    def init(*_args: Any, **_options: Any) -> NoReturn:
        raise RuntimeError(
            "Horovod is started here, and mpiexec has not started this process; run the script with %dist_run --mpi"
        )

    module.HorovodBasics.init = init


def _open_streams() -> None:
    """Open the standard streams as ``python -u`` does."""
    encoding, errors = sys.stdout.encoding, {1: sys.stdout.errors, 2: "backslashreplace"}
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = io.FileIO(number, "w", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(raw, encoding, errors[number], write_through=True)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    stream = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding)
    stream.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stream  # type: ignore[misc]


def main() -> NoReturn:
    """Run in a process that was started for one script: see ``runner.COMMAND``."""
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    try:
        run_program({"control": control})
    except KeyboardInterrupt:  # before the script has begun, or after it
        sys.exit(128 + signal.SIGINT)
