"""Run a shell command of a cell: ``!ls``.

Covers: a terminal that the command writes to, no input, its exit code, interrupting it.
Does not cover: ``got = !ls`` and ``%%bash``, which IPython runs without a terminal and without input.

IPython gives such a command a terminal for its input too, and one that asks a question then waits for ever.
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

LINES, COLUMNS = 24, 80  # of the terminal
POLL_SECONDS = 0.05  # for the command's end, while what it has left behind still holds the terminal
GRACE_SECONDS = 0.3  # for an interrupted command to end
SIGNALLED = 128  # a shell's exit code for a program that was ended by a signal, beside the signal's number


def run_command(command: str) -> int:
    """Run a command to its end, and write what it prints to ``sys.stdout``.

    Returns
    -------
    int
        Its exit code; the negative number of the signal that ended it.
    """
    name = os.environ.get("SHELL") or "sh"
    shell = shutil.which(name)
    if shell is None:
        raise FileNotFoundError(errno.ENOENT, "the shell of $SHELL is not there; set it to e.g. /bin/sh", name)
    sys.stdout.flush()
    reader, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        # In the rank's session, which has no terminal: one that opens /dev/tty to ask for a password fails, too.
        process = subprocess.Popen(  # noqa: S603
            [shell, "-c", command], stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
        )
        os.close(terminal)
        try:
            _wait_for_command(process, reader)
        except BaseException:  # an interrupt, most of all; it is raised again
            _end(process)
            raise
    finally:
        os.close(reader)
    code = process.wait()
    return SIGNALLED - code if code > SIGNALLED else code


def _wait_for_command(process: subprocess.Popen[bytes], reader: int) -> None:
    """Write what it prints until it ends; an interrupt ends this as if it were the user's code (``untimely``)."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    while True:
        has_ended = process.poll() is not None
        if select.select([reader], [], [], 0 if has_ended else POLL_SECONDS)[0]:
            try:
                data = os.read(reader, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # nobody holds the terminal any more
            sys.stdout.write(decode(data, not data))
            sys.stdout.flush()
            if not data:
                process.wait()
                return
        elif has_ended:
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command; the nanny has interrupted it, as its terminal would have done."""
    try:
        process.wait(GRACE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
