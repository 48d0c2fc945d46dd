"""Reach a job's controller, and its files, through one ssh to a host of its network.

Covers: reading a job's file there, local sockets that lead to the controller, a local folder with copies of the
cluster's files, writing them back.
Does not cover: what is in those files (``client.registry.cluster_file``), joining (``features.batch_jobs.client``).

The one ssh forwards Unix sockets, which are in a folder of the user, and runs a shell on the host. The shell reads and
writes files and holds the cluster's lock: as long as it runs, and not longer than this process.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
import select
import shlex
import shutil
import socket
import subprocess
import threading
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import LaunchError, UsageError
from ...launchers.folders import make_local
from ...launchers.ssh import SSH_OPTIONS
from ...private_files import write_private
from ...protocol.connection_file import JobFile
from ...protocol.messages import channel_url
from ...protocol.shared_memory import NOTEBOOK
from ...protocol.time_limits import (
    FILE_SECONDS,
    GREETING_SECONDS,
    SSH_CONNECT_SECONDS,
    TUNNEL_ANSWER_SECONDS,
    TUNNEL_BEAT_SECONDS,
    TUNNEL_DYING_SECONDS,
    TUNNEL_END_SECONDS,
    TUNNEL_STALE_SECONDS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


CHANNELS = ("mux", "control", "iopub")
# A shared connection's forwards would outlive this process, so it is not used. A silent network is noticed within 15 s.
OPTIONS = (
    *("-T", "-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes", "-o", "StreamLocalBindMask=0177"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_METRICS = re.compile(r"rank\d+\.metrics\.jsonl")  # names of the files that a run's folder may bring here
_GZIP = 16 + zlib.MAX_WBITS  # zlib's parameter for the format of gzip
MOST_METRICS_BYTES = 32 << 20  # of all ranks together; compressed, a tenth of that is transferred
# The shell of a notebook that lost its network does not detect that for hours, and would hold the lock. The pid of a
# shell that has ended may belong to another process by now: only a process that has the lock's file open is killed.
LEASE_SCRIPT = """umask 077; cd {folder} && exec 9>>holder
flock -n 9; code=$?
if [ $code = 1 ]; then
  read pid host 2>/dev/null < holder.shell
  if [ "$host" = "$(hostname)" ] && [ $(($(date +%s) - $(stat -c %Y holder.shell))) -gt {stale} ] &&
    [ "/proc/$pid/fd/9" -ef holder ]; then kill $pid; fi
  flock -w 1 9; code=$?
fi
if [ $code = 0 ]; then echo "$$ $(hostname)" > holder.shell; fi; cd; echo $code"""
# No character that is special to a shell: ssh inserts the host into its configured commands (ProxyCommand ... %h).
_REMOTE = re.compile(
    r"(?P<host>(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9a-fA-F:.]+(?:%\w[\w.-]*)?\])):(?P<file>.+)\Z", re.ASCII
)

_open: dict[Path, Tunnel] = {}  # by local folder


def split(which: str) -> tuple[str, str] | None:
    """Return host and file of ``HOST:FILE``; None for anything else."""
    found = _REMOTE.match(which)
    return (found["host"].replace("[", "").replace("]", ""), found["file"]) if found else None


def tunnel_of(folder: Path) -> Tunnel | None:
    """Return the open tunnel with this local folder."""
    return _open.get(folder)


class Tunnel:
    """One ssh, and :attr:`folder`, which replaces the cluster's own; it is the profile of :attr:`job_file`.

    Raises a UsageError if the file is not there or another notebook holds the ranks, and a LaunchError if ssh fails.
    """

    def __init__(self, host: str, file: str, ssh: Sequence[str]) -> None:
        self.host, self.file = host, file
        self.command = [*ssh, *SSH_OPTIONS]  # ssh with its options, without a host
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._next_beat = 0.0
        job_file = self._read_file()
        self._profile = posixpath.join(posixpath.dirname(file), posixpath.basename(job_file.profile))
        self.folder = make_local(f"{job_file.name}-{os.getpid()}-{os.urandom(3).hex()}")
        _open[self.folder] = self
        try:
            (self.folder / "security").mkdir(mode=0o700)
            (self.folder / NOTEBOOK).write_text(os.urandom(16).hex())
            self._start(job_file)
            self._greet(job_file)
            self._take_lease()
            self._fetch()
        except BaseException:  # also after an interrupt, no ssh stays
            self.close()
            raise

    # The file

    def _read_file(self) -> JobFile:
        file = _quoted(self.file)
        # The owner of a file can make us run any code, so another user's file is refused.
        script = f"cat {file} && if [ ! -O {file} ]; then echo it belongs to another user >&2; exit 1; fi\n"
        try:
            done = subprocess.run(  # noqa: S603
                # As a login shell, csh or fish would not understand the script.
                [*self.command, "-T", self.host, "exec sh"],
                input=script,
                capture_output=True,
                text=True,
                check=False,
                start_new_session=True,
                timeout=FILE_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"{self.host} has not sent {self.file} within {FILE_SECONDS:g} s; try: "
                f"{self._by_hand('cat', self.file)}"
            ) from error
        except OSError as error:
            raise LaunchError(
                f"cannot run {self.command[0]}: {error.strerror}; install OpenSSH's client, or name another with --ssh"
            ) from error
        if done.returncode == 0:
            # A login shell's output comes first; the file is one line.
            return JobFile.parse(done.stdout.strip().rpartition("\n")[2], f"{self.host}:{self.file}")
        message = " ".join(done.stderr.split())[-300:] or f"it ended with code {done.returncode}"
        if done.returncode == 255:  # noqa: PLR2004  (ssh's own)
            raise LaunchError(f"ssh to {self.host} failed: {message}; try: {self._by_hand('true')}")
        raise UsageError(
            f"cannot read {self.file} on {self.host}: {message}; the job has not started, has ended, or wrote its file "
            "elsewhere"
        )

    # The ssh

    def _start(self, job_file: JobFile) -> None:
        forwards = []
        for channel in CHANNELS:
            place = channel_url(job_file.connection, channel).partition("://")[2]
            forwards += ["-L", f"{self._socket(job_file, channel)}:{place}"]
        connection = job_file.connection | {"interface": f"ipc://{self.folder / 's'}"}
        file = self.folder / "security" / f"ipcontroller-{job_file.cluster_id}-client.json"
        write_private(file, json.dumps(connection))
        self.job_file = replace(job_file, profile=str(self.folder))
        self._errors = (self.folder / "ssh.log").open("w+b")
        self._process = subprocess.Popen(  # noqa: S603
            [*self.command, *OPTIONS, *forwards, self.host, "exec sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # an interrupt of the notebook must not reach it
        )

    def _socket(self, job_file: JobFile, channel: str) -> Path:
        return self.folder / f"s-{job_file.connection[channel]}"

    def _greet(self, job_file: JobFile) -> None:
        """Check that the controller is at the other end: it sends first."""
        self.ask("true")  # once this is answered, the forwards exist
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(GREETING_SECONDS)
            try:
                probe.connect(str(self._socket(job_file, "control")))
                greeted = bool(probe.recv(1))
            except OSError:
                greeted = False
        if not greeted:
            raise UsageError(
                f"{self.host} can't reach the controller of {self.file} at {job_file.address}: the job that wrote it "
                f"has ended, or that host is not in its network; connect through {job_file.host}"
            )

    def ask(self, script: str) -> str:
        """Run a script in the host's shell, and return its output.

        Raises a LaunchError if ssh has ended, or the shell does not respond within the time limit.
        """
        mark = f"disttrain-{os.urandom(8).hex()}"
        with self._lock:
            self._send(f"echo {mark}; {script}\necho {mark} ended\n")
            output = self._read_until(f"{mark} ended\n").partition(f"{mark}\n")[2]
        return output.removesuffix(f"{mark} ended\n")

    def _send(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise LaunchError(self.why_ended or f"the ssh tunnel to {self.host} is broken: {error}") from error

    def _read_until(self, end: str) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + TUNNEL_ANSWER_SECONDS + SSH_CONNECT_SECONDS
        output = bytearray()
        while not output.endswith(end.encode()):
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self._process.stdout.fileno(), 1 << 16) if readable else b""
            if not read:
                raise LaunchError(
                    self.why_ended or f"the shell on {self.host} does not respond; try: {self._by_hand('true')}"
                )
            output += read
        return output.decode(errors="replace")

    def _by_hand(self, *command: str) -> str:
        return shlex.join([*self.command, self.host, *command])

    @property
    def why_ended(self) -> str:
        """How the ssh ended, as text; empty while it runs."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(TUNNEL_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        self._errors.seek(0)
        message = " ".join(self._errors.read().decode(errors="replace").split())[-300:]
        how = message or (f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}")
        return f"the ssh tunnel to {self.host} ended: {how}; %dist_attach {self.host}:{self.file} opens it again"

    # The files

    def _take_lease(self) -> None:
        """Take the lease on the remote host, for as long as the shell runs."""
        answer = self.ask(LEASE_SCRIPT.format(folder=_quoted(self._profile), stale=TUNNEL_STALE_SECONDS)).strip()
        if answer == "1":
            raise UsageError(
                f"the ranks of {self.file} on {self.host} are held by another notebook, which still runs; use them "
                "there, or shut that kernel down or restart it first"
            )
        if answer != "0":
            raise UsageError(
                f"cannot check whether a notebook holds the ranks of {self.file}: flock on {self.host} returned "
                f"{answer or 'nothing'}; it has to be installed there, and the file system has to support locks"
            )

    def beat(self) -> None:
        """Update the holder's timestamp, every ``TUNNEL_BEAT_SECONDS``; called often."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + TUNNEL_BEAT_SECONDS
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._send(f"touch {_quoted(posixpath.join(self._profile, 'holder.shell'))}\n")

    def _fetch(self) -> None:
        """Copy the files here that a client needs to join; whatever reads an invalid one reports it."""
        names = "cluster.json client/open_cells.json death-*.json"
        for name, content in self._read_files(self._profile, names, 1 << 30).items():
            write_private(self.folder / name, content)

    def bring_metrics(self, run: str, folder: Path) -> None:
        """Copy the ranks' logged metrics here, or the end of them if they are large; raises a LaunchError."""
        try:
            files = self._read_files(run, "rank*.metrics.jsonl", MOST_METRICS_BYTES)
        except LaunchError as error:
            raise LaunchError(f"earlier metrics are missing: {error}") from error
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in files.items():
            if _METRICS.fullmatch(name):
                write_private(folder / name, content)

    def _read_files(self, folder: str, names: str, most_bytes: int) -> dict[str, str]:
        """Return the content of files by name, or the end of it: together not more than this."""
        script = (
            f'( cd {_quoted(folder)} && set -- {names} && for f; do if [ -f "$f" ]; then echo "$f"; '
            f'tail -c $(({most_bytes} / $#)) "$f" | gzip -c | base64 | tr -d "\\n"; echo; fi; done )'
        )
        lines = self.ask(script).splitlines()
        try:
            return {
                posixpath.basename(name): zlib.decompress(base64.b64decode(content, validate=True), _GZIP).decode(
                    errors="replace"
                )
                for name, content in zip(lines[::2], lines[1::2], strict=True)
            }
        except (ValueError, zlib.error) as error:  # an empty line: gzip or base64 is not installed there
            raise LaunchError(
                f"the files in {folder} on {self.host} can't be copied: {error}; gzip, base64, tail and tr have to be "
                "installed there"
            ) from error

    def push(self, path: Path) -> None:
        """Copy a local file to the remote host.

        Nothing is written once ssh has ended: the loss of the cluster is reported elsewhere.
        """
        where = {"open_cells.json": "client/open_cells.json"}.get(path.name, path.name)
        target = posixpath.join(self._profile, where)
        fresh = _quoted(f"{target}.new")
        end = f"disttrain-{os.urandom(8).hex()}"
        # The folder is removed with the job, and must not be made again.
        make = f"cd {_quoted(self._profile)} && mkdir -p -m 700 client"
        script = f"( {make} ) && cat > {fresh} <<'{end}' && mv {fresh} {_quoted(target)}\n{path.read_text()}\n{end}\n"
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._send(script)

    def wait_for_end(self, patience_s: float) -> None:
        """Wait until the job has removed its file."""
        checks = round(patience_s * 10)
        if checks and self._process is not None and self._process.poll() is None:
            file = _quoted(self.file)
            self.ask(f"n=0; while [ -e {file} ] && [ $n -lt {checks} ]; do sleep 0.1; n=$((n+1)); done")

    def close(self) -> None:
        """End ssh, once it has sent the rest, and remove the local folder."""
        process, self._process = self._process, None
        _open.pop(self.folder, None)
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.close()
                process.wait(TUNNEL_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            except BrokenPipeError:
                process.wait()
            process.stdout.close()
            self._errors.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _quoted(file: str) -> str:
    """Quote a path for a remote shell, where ``~/`` is the remote home."""
    return '"$HOME"/' + shlex.quote(file[2:]) if file.startswith("~/") else shlex.quote(file)
