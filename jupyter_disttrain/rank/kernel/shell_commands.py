"""Run a shell command of a cell, e.g. ``!ls``.

Covers: a terminal for the command's output, no input, its exit code, interrupting it.
Does not cover: ``got = !ls`` and ``%%bash``, which IPython runs without a terminal and without input.

IPython itself gives such a command a terminal for its input too, so that a command that asks a question waits forever.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios

from ...protocol.time_limits import COMMANDS_GRACE_SECONDS, COMMANDS_POLL_SECONDS

LINES, COLUMNS = 24, 80  # size of the terminal
SIGNALLED = 128  # a shell adds this to a signal's number for the exit code of a program that the signal ended


def run_command(command: str) -> int:
    """Run a command until it exits and write its output to ``sys.stdout``.

    Returns the exit code, or the negative number of the signal that ended the command.
    """
    name = os.environ.get("SHELL") or "sh"
    shell = shutil.which(name)
    if shell is None:
        raise FileNotFoundError(errno.ENOENT, "the shell of $SHELL does not exist; set it to e.g. /bin/sh", name)
    sys.stdout.flush()
    reader, terminal = pty.openpty()
    try:
        fcntl.ioctl(reader, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        # In the rank's session, which has no terminal: opening /dev/tty, e.g. to ask for a password, fails as well.
        try:
            process = subprocess.Popen(  # noqa: S603
                [shell, "-c", command], stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
            )
        finally:
            os.close(terminal)
        try:
            _wait_for_command(process, reader)
        except BaseException:  # mostly an interrupt
            _end(process)
            raise
    finally:
        os.close(reader)
    code = process.wait()
    return SIGNALLED - code if code > SIGNALLED else code


def _wait_for_command(process: subprocess.Popen[bytes], reader: int) -> None:
    """Write the command's output until it exits; an interrupt raises here (``rank.interrupts.deferral``)."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    output = select.poll()  # select() fails for descriptors above 1023, and a cell may have opened that many
    output.register(reader, select.POLLIN)
    while True:
        has_ended = process.poll() is not None
        if output.poll(0 if has_ended else COMMANDS_POLL_SECONDS * 1000):
            try:
                data = os.read(reader, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # no process has the terminal open
            sys.stdout.write(decode(data, not data))
            sys.stdout.flush()
            if not data:
                process.wait()
                return
        elif has_ended:
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that the nanny has already interrupted, as a terminal would."""
    for end in (process.terminate, process.kill):
        try:
            process.wait(COMMANDS_GRACE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            end()
    process.wait()
