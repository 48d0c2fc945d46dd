"""The options of every magic.

Covers: the parsers, reading a line with one, their help.
Does not cover: what the magics do (``magics``).
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from ..config import BACKENDS, LAUNCHERS, ON_RANK_DEATH
from ..errors import UsageError
from ..hosts import parse_hostfile, parse_hosts, take_hosts
from .slurm_arguments import add_slurm_options

if TYPE_CHECKING:
    from collections.abc import Callable


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line in the notebook and never end the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; {self.prog}? shows its options")


def _parser(name: str, *, cell: bool = False) -> _Parser:
    prog = f"%%{name}" if cell else f"%{name}"
    # No abbreviations: --ntasks of sbatch would be taken for --ntasks-per-node.
    how = argparse.RawDescriptionHelpFormatter
    return _Parser(prog=prog, add_help=False, allow_abbrev=False, formatter_class=how)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="the cluster's name, where there are several (default: the one used last)")


def _init() -> _Parser:
    parser = _parser("dist_init")
    add = parser.add_argument
    add("-n", "--num-ranks", type=int, help="the number of ranks (default: one per GPU, or 2 without GPUs)")
    add("-g", "--gpus", help="the GPUs to use among the visible ones, e.g. 0,1 (default: all)")
    add(
        "--share-gpus",
        action="store_true",
        help="allow more ranks than GPUs, over Gloo; LOCAL_RANK may then name no GPU, the variable device does",
    )
    add(
        "--launcher",
        choices=LAUNCHERS,
        help="mpi: one MPI job; local: plain processes; ssh: on hosts, without MPI; slurm: a job (default: mpi)",
    )
    add("--hosts", help="hosts reached by ssh, each with its number of ranks, e.g. node1:4,node2:4")
    add("--hostfile", metavar="FILE", help="the same as a file: a host on each line, with slots=N")
    add("--node-count", type=int, metavar="N", help="use the first N of these hosts (default: all)")
    add("--process-count-per-node", type=int, metavar="N", help="ranks on each (default: as named, or one per GPU)")
    add("--spare", metavar="HOSTS", help="hosts on which ranks start again if one is lost (--launcher ssh)")
    add("--interface", help="of the hosts' network: its name, or the network as in 10.1.0.0/16 (default: chosen)")
    add(
        "--controller-ports",
        metavar="FIRST-LAST",
        help="8 ports of this machine that ranks on other hosts connect to, for a firewall (default: any)",
    )
    add("--ssh", metavar="COMMAND", help="the ssh to use, with its options (default: ssh)")
    add("-x", "--forward", action="append", metavar="NAME[=VALUE]", help="a variable for ranks on other hosts")
    add_slurm_options(parser)
    add("--backend", choices=BACKENDS, help="of the process group; none: ranks without torch (default: auto)")
    add("-a", "--address", help="MASTER_ADDR (default: chosen)")
    add("--port", type=int, help="MASTER_PORT (default: a free one)")
    add("--timeout", type=float, metavar="S", help="seconds a collective may take (default: 1800)")
    add("--start-timeout", type=float, metavar="S", help="seconds the ranks may take to start (default: 120)")
    add("--grace", type=float, metavar="S", help="seconds ranks may go on once another has failed (default: 3)")
    add(
        "--hang-after",
        type=float,
        metavar="S",
        help="seconds in one collective until who is missing is said (default: 30)",
    )
    add("--on-rank-death", choices=ON_RANK_DEATH, help="replace it, reset all ranks or stop (default: replace)")
    add("--tf-config", metavar="ROLES", help="set TF_CONFIG for TensorFlow, e.g. worker=2 or chief=1,worker=2,ps=1")
    add("--keep", action="store_true", help="let the ranks outlive the notebook's kernel")
    add(
        "--idle-timeout",
        type=float,
        metavar="S",
        help="end the cluster when nobody has used it for so many seconds (default: never)",
    )
    add("--name", default=None, help="a name, to have several clusters side by side (default: default)")
    return parser


def _cell(name: str) -> _Parser:
    parser = _parser(name, cell=True)
    add = parser.add_argument
    if name == "rank":
        add("ranks", nargs="+", help="e.g. 0, [0,2] or 0-3")
    else:
        add("-r", "--ranks", default="all", help="e.g. 0 or 0,2-3 (default: all)")
    add("--timeout", type=float, metavar="S", help="interrupt the ranks after this many seconds")
    add("-o", "--out", metavar="NAME", help="keep each rank's last value in the notebook, as a dict by rank")
    add("--watch", action="store_true", help="show the ranks and their metrics below the cell, live")
    add("--noblock", action="store_true", help="don't wait; %%dist_wait shows what came of it")
    add("--bare", action="store_true", help=argparse.SUPPRESS)  # %dist_mode added the magic's line to the cell
    _add_name(parser)
    return parser


def _names(name: str, default_ranks: str) -> _Parser:
    parser = _parser(name)
    parser.add_argument("-r", "--ranks", default=default_ranks, help=f"e.g. 0 or 0,2-3 (default: {default_ranks})")
    parser.add_argument("names", nargs="+", metavar="NAME", help="variables")
    _add_name(parser)
    return parser


def _mode() -> _Parser:
    parser = _parser("dist_mode")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-e", "--enable", action="store_true", help="every following cell runs on all ranks")
    group.add_argument("-d", "--disable", action="store_true", help="cells run in the notebook again")
    return parser


def _plain(name: str) -> _Parser:
    parser = _parser(name)
    _add_name(parser)
    return parser


def _status() -> _Parser:
    parser = _plain("dist_status")
    parser.add_argument("--text", action="store_true", help="a table in text, also where a live view could be shown")
    return parser


def _reset() -> _Parser:
    parser = _plain("dist_reset")
    parser.add_argument("-r", "--ranks", help="replace just these, e.g. 1 or 0,2-3 (default: restart all)")
    return parser


def _interrupt() -> _Parser:
    parser = _plain("dist_interrupt")
    parser.add_argument("-r", "--ranks", default="all", help="e.g. 0 or 0,2-3 (default: all)")
    return parser


def _copy() -> _Parser:
    parser = _parser("dist_copy")
    parser.add_argument("--from", dest="source", type=int, default=0, metavar="RANK", help="whose values (default: 0)")
    parser.add_argument(
        "--to", dest="ranks", default="all", metavar="RANKS", help="who gets them (default: all others)"
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="variables")
    _add_name(parser)
    return parser


def _diff() -> _Parser:
    parser = _parser("dist_diff")
    parser.add_argument("-r", "--ranks", default="all", help="e.g. 0 or 0,2-3 (default: all)")
    parser.add_argument("names", nargs="+", metavar="NAME", help="models, optimizers, tensors or other variables")
    _add_name(parser)
    return parser


def _attach() -> _Parser:
    parser = _parser("dist_attach")
    add = parser.add_argument
    add(
        "cluster",
        nargs="?",
        help="its name or id, as `jupyter disttrain list` shows them (default: the only one); or FILE, that a job "
        "wrote whose ranks run `python -m jupyter_disttrain.engine --join FILE`; or HOST:FILE, to go through ssh",
    )
    add("--ssh", metavar="COMMAND", help="the ssh to use, with its options (default: ssh)")
    add("--noblock", action="store_true", help="don't wait for a cell that still runs; %%dist_wait shows it")
    return parser


def _run() -> _Parser:
    parser = _parser("dist_run")
    add = parser.add_argument
    parser.usage = "%%dist_run [options] SCRIPT [ARGUMENTS]\n       %%dist_run [options] -m MODULE [ARGUMENTS]"
    add("-m", dest="is_module", action="store_true", help="a module's name follows in place of a script's path")
    add("-r", "--ranks", default="all", help="e.g. 0 or 0,2-3 (default: all)")
    add("--timeout", type=float, metavar="S", help="interrupt the ranks after this many seconds")
    add("--fresh", dest="how", action="store_const", const="fresh", default="here", help="each rank starts a process")
    add(
        "--per-node",
        dest="how",
        action="store_const",
        const="node",
        help="one process on each node, for programs that start their own, e.g. with mp.spawn",
    )
    add("--watch", action="store_true", help="show the ranks and their metrics below the cell, live")
    add("--noblock", action="store_true", help="don't wait; %%dist_wait shows what came of it")
    _add_name(parser)
    add("target", metavar="SCRIPT", help="its path, from the notebook's folder; or a module's name after -m")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own; $LOCAL_RANK and its kin are each rank's")
    return parser


def _export() -> _Parser:
    parser = _parser("dist_export")
    add = parser.add_argument
    add("path", metavar="SCRIPT", help="where to write it, e.g. train.py; what belongs to it is written beside it")
    for launch in ("torchrun", "slurm", "mpi", "horovodrun"):
        add(
            f"--{launch}",
            dest="launch",
            action="store_const",
            const=launch,
            default="torchrun",
            help=f"to be launched by {launch}" + (" (default)" if launch == "torchrun" else ""),
        )
    add(
        "--all",
        action="store_true",
        help="a cell that ran several times stands there as often (default: as it was last)",
    )
    _add_name(parser)
    return parser


def _save() -> _Parser:
    parser = _parser("dist_save")
    add = parser.add_argument
    add("path", metavar="FOLDER", help="of the checkpoint's versions; all hosts have to see it")
    add("names", nargs="+", metavar="NAME", help="models, optimizers, schedulers and other variables")
    add("--async", dest="beside", action="store_true", help="write while the next cells run")
    add("--keep", type=int, metavar="N", help="how many versions stay (default: all)")
    _add_name(parser)
    return parser


def _load() -> _Parser:
    parser = _parser("dist_load")
    add = parser.add_argument
    add("path", metavar="FOLDER", help="of the checkpoint: its latest version; or that of a version")
    add("names", nargs="*", default=[], metavar="NAME", help="variables (default: all that were saved)")
    add("--trust-owner", action="store_true", help="load another user's checkpoint, which may run any code")
    _add_name(parser)
    return parser


def _stage() -> _Parser:
    parser = _parser("dist_stage")
    add = parser.add_argument
    add("source", metavar="PATH", help="a file or folder, or an address such as s3://bucket/folder")
    add("--to", metavar="DIR", help="in which its folder is made on each node (default: on the node's local disk)")
    add("--as", dest="into", metavar="NAME", help="a variable that is set to the path on each rank")
    add(
        "--verify",
        action="store_true",
        help="compare hashes of all with the source's, in place of sizes and times",
    )
    _add_name(parser)
    return parser


def _sync_code() -> _Parser:
    parser = _parser("dist_sync_code")
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files and folders to bring too (default: what ranks have imported)")
    add("--auto", choices=("on", "off"), help="do it before every cell that runs on ranks, or no longer")
    _add_name(parser)
    return parser


def _shutdown() -> _Parser:
    parser = _plain("dist_shutdown")
    parser.add_argument("--all", action="store_true", help="every cluster of this notebook")
    return parser


PARSERS: dict[str, argparse.ArgumentParser] = {
    "dist_init": _init(),
    "distributed": _cell("distributed"),
    "rank": _cell("rank"),
    "dist_mode": _mode(),
    "dist_status": _status(),
    "dist_wait": _plain("dist_wait"),
    "dist_interrupt": _interrupt(),
    "sync": _plain("sync"),
    "dist_push": _names("dist_push", "all"),
    "dist_pull": _names("dist_pull", "0"),
    "dist_where": _plain("dist_where"),
    "dist_copy": _copy(),
    "dist_diff": _diff(),
    "dist_attach": _attach(),
    "dist_detach": _plain("dist_detach"),
    "dist_run": _run(),
    "dist_export": _export(),
    "dist_save": _save(),
    "dist_load": _load(),
    "dist_stage": _stage(),
    "dist_sync_code": _sync_code(),
    "dist_reset": _reset(),
    "dist_shutdown": _shutdown(),
}


def documented(function: Callable[..., Any]) -> Callable[..., Any]:
    """Append the options to a magic's help, which ``%name?`` shows."""
    function.__doc__ = f"{function.__doc__}\n\n{PARSERS[function.__name__].format_help()}"
    return function


def parse(name: str, line: str) -> argparse.Namespace:
    """Read a magic's line.

    Raises
    ------
    UsageError
        If it can't be read; the message says what is wrong and where the options are listed.
    """
    try:
        words = shlex.split(_without_comment(line))
    except ValueError as error:
        raise UsageError(f"cannot read {line!r}: {error}") from error
    if name != "dist_init":
        return PARSERS[name].parse_args(words)
    args, unknown = PARSERS[name].parse_known_args(words)
    args.unknown = unknown  # which may be options of sbatch
    return args


# What stands before a comment, as in a shell: a # within a word or within quotes begins none.
_BEFORE_COMMENT = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|(?<=\S)#|[^"'\\#])*""")


def _without_comment(line: str) -> str:
    before = _BEFORE_COMMENT.match(line)
    assert before is not None  # it matches nothing, too
    return before.group() if line[before.end() :].startswith("#") else line


def parse_gpus(text: str | None) -> tuple[int, ...] | None:
    """Read ``"0,1"``."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.strip("[]() ").split(",") if part.strip())
    except ValueError:
        raise UsageError(f"cannot read the GPUs {text!r}; name them as in: -g 0,1") from None


def hosts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the hosts that %dist_init names, as the fields of a configuration.

    Raises
    ------
    UsageError
        If they can't be read, or are named in two ways.
    """
    if args.hosts and args.hostfile:
        raise UsageError("hosts are named by --hosts or by --hostfile; leave one out")
    hosts = parse_hosts(args.hosts) if args.hosts else parse_hostfile(args.hostfile) if args.hostfile else ()
    if not hosts and (args.node_count or args.process_count_per_node):
        raise UsageError("--node-count and --process-count-per-node need hosts; name them, e.g. --hosts node1,node2")
    ports = _read_ports(args.controller_ports) if args.controller_ports else None
    spares = tuple(host.name for host in parse_hosts(args.spare)) if args.spare else ()
    return {"hosts": take_hosts(hosts, args.node_count, args.process_count_per_node), "spares": spares} | {
        "controller_ports": ports
    }


def _read_ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise UsageError(f"cannot read the ports {text!r}; name the first and the last, e.g. 40000-40007")
    return int(first), int(last)
