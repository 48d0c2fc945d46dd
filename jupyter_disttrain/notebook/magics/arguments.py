"""Define how magics declare their options and read their line.

Covers: the decorator of every magic, options that several have, completing options, values of some options.
Does not cover: what the magics do (``cluster_magics``, ``cell_magics``, ``script_magics``, ...).
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.magic import cell_magic, line_magic, no_var_expand

from ...config.hosts import parse_hostfile, parse_hosts, take_hosts
from ...errors import UsageError

PARSERS: dict[str, argparse.ArgumentParser] = {}  # by magic, once its module is imported

Option = Callable[[Any], object]  # adds itself to a parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line in the notebook and never end the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; {self.prog}? shows its options")


def option(*names: str, **how: Any) -> Option:
    """Return an option, with the arguments of ``ArgumentParser.add_argument``."""
    return lambda parser: parser.add_argument(*names, **how)


def one_of(*options: Option) -> Option:
    """Return options of which a line has one at most."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for each in options:
            each(group)

    return add


def ranks_option(default: str | None = "all", text: str = "ranks, e.g. 0 or 0,2-3") -> Option:
    """Return the option for ranks."""
    return option("-r", "--ranks", default=default, help=f"{text} (default: {default or 'all'})")


def ranks_of(args: argparse.Namespace) -> str:
    """Return the ranks that ``%%distributed -r`` or ``%%rank`` names, as ``parse_ranks`` takes them."""
    return args.ranks if isinstance(args.ranks, str) else ",".join(args.ranks).replace(",,", ",")


NAME = option("--name", help="the cluster, if there are several (default: the one used last)")
VARIABLES = option("names", nargs="+", metavar="NAME", help="variables")
SSH = option("--ssh", metavar="COMMAND", help="the ssh command, with its options (default: ssh)")
TIMEOUT = option("--timeout", type=float, metavar="S", help="interrupt the ranks after S seconds")
WATCH = option("--watch", action="store_true", help="show the ranks and their metrics below the cell, live")
NOBLOCK = option("--noblock", action="store_true", help="return at once; %%dist_wait shows output and result")


def magic(
    *options: Option, kind: Any = line_magic, expands: bool = True, usage: str | None = None
) -> Callable[..., Any]:
    """Make a method a magic, which gets the parsed line in place of the line.

    The method's help, which ``%name?`` shows, ends with its ``options``. ``kind`` is IPython's decorator; ``expands``:
    IPython replaces ``{name}`` and ``$name`` in the line by a variable's value.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        name = method.__name__
        parser = PARSERS[name] = _Parser(
            prog=f"%%{name}" if kind is cell_magic else f"%{name}",
            usage=usage,
            add_help=False,
            allow_abbrev=False,  # --ntasks of sbatch would be taken for --ntasks-per-node
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for each in options:
            each(parser)

        @functools.wraps(method)
        def run(self: Any, line: str, *cell: str) -> Any:
            return method(self, parse(name, line), *cell)

        run.__doc__ = f"{method.__doc__}\n\n{parser.format_help()}"
        return kind(run if expands else no_var_expand(run))  # type: ignore[no-any-return]

    return decorate


def parse(name: str, line: str) -> argparse.Namespace:
    """Parse a magic's line.

    Raises a UsageError if it can't be parsed; the message states what is wrong and where the options are listed.
    """
    try:
        words = shlex.split(_without_comment(line))
    except ValueError as error:
        raise UsageError(f"cannot read {line!r}: {error}") from error
    args, unknown = PARSERS[name].parse_known_args(words)
    if name != "dist_init":  # there they may be options of sbatch
        refuse_unknown(name, unknown)
    args.line, args.unknown = line, unknown
    return args


_OF_TORCHRUN = (
    "--nproc",
    "--nnodes",
    "--node",
    "--rdzv",
    "--standalone",
    "--master",
    "--max-restarts",
    "--max_restarts",
)


def refuse_unknown(name: str, arguments: list[str]) -> None:
    """Raise a UsageError for arguments of a magic's line that belong to no option, if there are any."""
    if arguments:
        is_of_torchrun = name == "dist_run" and arguments[0].startswith(_OF_TORCHRUN)
        hint = "; leave torchrun's options out, the ranks are those of %dist_init" if is_of_torchrun else ""
        PARSERS[name].error(f"unrecognized arguments: {' '.join(arguments)}{hint}")


# Text before a comment, as in a shell: a # inside a token or quotes does not start one.
_BEFORE_COMMENT = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|(?<=\S)#|[^"'\\#])*""")


def _without_comment(line: str) -> str:
    before = _BEFORE_COMMENT.match(line)
    assert before is not None  # it also matches the empty string
    return before.group() if line[before.end() :].startswith("#") else line


def complete_options(_shell: Any, event: Any) -> list[str]:
    """Return the options of the line's magic, or the choices of the option before the cursor."""
    words = event.line.split()
    previous = words[-1] if not event.symbol else (words[-2] if len(words) > 1 else "")
    # argparse has no public list of its actions.
    actions = [each for each in PARSERS[words[0].lstrip("%")]._actions if each.help != argparse.SUPPRESS]  # noqa: SLF001
    for action in actions:
        if previous in action.option_strings and action.choices:
            return [str(choice) for choice in action.choices]
    return sorted(name for action in actions for name in action.option_strings)


def parse_gpus(text: str | None) -> tuple[int, ...] | None:
    """Parse ``"0,1"``."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.strip("[]() ").split(",") if part.strip())
    except ValueError:
        raise UsageError(f"cannot read the GPUs {text!r}; name them as in: -g 0,1") from None


def hosts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the hosts that %dist_init names, as the fields of a configuration.

    Raises a UsageError if they can't be parsed, or are named in two ways.
    """
    if args.hosts and args.hostfile:
        raise UsageError("hosts are named by --hosts or by --hostfile; leave one out")
    hosts = parse_hosts(args.hosts) if args.hosts else parse_hostfile(args.hostfile) if args.hostfile else ()
    if not hosts and (args.node_count or args.process_count_per_node):
        raise UsageError("--node-count and --process-count-per-node need hosts; name them, e.g. --hosts node1,node2")
    return {
        "hosts": take_hosts(hosts, args.node_count, args.process_count_per_node),
        "spares": tuple(host.name for host in parse_hosts(args.spare)) if args.spare else (),
        "controller_ports": _read_ports(args.controller_ports) if args.controller_ports else None,
    }


def _read_ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise UsageError(f"cannot read the ports {text!r}; name the first and the last, e.g. 40000-40007")
    return int(first), int(last)
