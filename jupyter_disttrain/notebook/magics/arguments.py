"""Define the options of every magic.

Covers: the parsers, parsing a line, their help.
Does not cover: what the magics do (``cluster_magics``).
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from ...config.cluster import BACKENDS, LAUNCHERS, ON_RANK_DEATH
from ...config.hosts import parse_hostfile, parse_hosts, take_hosts
from ...errors import UsageError
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
    parser.add_argument("--name", help="the cluster, if there are several (default: the one used last)")


def _init() -> _Parser:
    parser = _parser("dist_init")
    add = parser.add_argument
    add("-n", "--num-ranks", type=int, help="the number of ranks (default: one per GPU, or 2 without GPUs)")
    add("-g", "--gpus", help="the GPUs to use among the visible ones, e.g. 0,1 (default: all)")
    add(
        "--share-gpus",
        action="store_true",
        help="allow more ranks than GPUs, over Gloo; use the variable device, LOCAL_RANK may not be a GPU",
    )
    add(
        "--launcher",
        choices=LAUNCHERS,
        help="mpi: one MPI job; local: plain processes; ssh: hosts, without MPI; slurm: a Slurm job (default: mpi)",
    )
    add("--hosts", help="hosts to reach by ssh, each with its number of ranks, e.g. node1:4,node2:4")
    add("--hostfile", metavar="FILE", help="a hostfile of Open MPI or MPICH in place of --hosts")
    add("--node-count", type=int, metavar="N", help="use the first N of these hosts (default: all)")
    add("--process-count-per-node", type=int, metavar="N", help="ranks per host (default: as named, or one per GPU)")
    add("--spare", metavar="HOSTS", help="hosts that replace a lost one (--launcher ssh)")
    add("--interface", help="the hosts' network: an interface, or a network such as 10.1.0.0/16 (default: chosen)")
    add(
        "--controller-ports",
        metavar="FIRST-LAST",
        help="8 ports of this machine that ranks on other hosts connect to (default: any)",
    )
    add("--ssh", metavar="COMMAND", help="the ssh command, with its options (default: ssh)")
    add("-x", "--forward", action="append", metavar="NAME[=VALUE]", help="a variable to set on other hosts")
    add_slurm_options(parser)
    add("--backend", choices=BACKENDS, help="process group backend; none: ranks without torch (default: auto)")
    add("-a", "--address", help="MASTER_ADDR (default: chosen)")
    add("--port", type=int, help="MASTER_PORT (default: a free one)")
    add("--timeout", type=float, metavar="S", help="timeout of a collective, in seconds (default: 1800)")
    add("--start-timeout", type=float, metavar="S", help="timeout of the start, in seconds (default: 120)")
    add("--grace", type=float, metavar="S", help="seconds until ranks that wait for a failed one are released (3)")
    add("--hang-after", type=float, metavar="S", help="seconds until a cell explains a hang (default: 30)")
    add("--on-rank-death", choices=ON_RANK_DEATH, help="replace the rank, reset all ranks or stop (default: replace)")
    add("--tf-config", metavar="ROLES", help="set TF_CONFIG for TensorFlow, e.g. worker=2 or chief=1,worker=2,ps=1")
    add("--keep", action="store_true", help="keep the ranks running when the kernel ends")
    add("--idle-timeout", type=float, metavar="S", help="end the cluster after S seconds without use (default: never)")
    add("--name", default=None, help="the cluster's name, to have several side by side (default: default)")
    return parser


def _cell(name: str) -> _Parser:
    parser = _parser(name, cell=True)
    add = parser.add_argument
    if name == "rank":
        add("ranks", nargs="+", help="ranks, e.g. 0, [0,2] or 0-3")
    else:
        add("-r", "--ranks", default="all", help="ranks, e.g. 0 or 0,2-3 (default: all)")
    add("--timeout", type=float, metavar="S", help="interrupt the ranks after S seconds")
    add("-o", "--out", metavar="NAME", help="store each rank's last value in the notebook, as a dict by rank")
    add("--watch", action="store_true", help="show the ranks and their metrics below the cell, live")
    add("--noblock", action="store_true", help="return at once; %%dist_wait shows output and result")
    add("--bare", action="store_true", help=argparse.SUPPRESS)  # %dist_mode added the magic's line to the cell
    _add_name(parser)
    return parser


def _names(name: str, default_ranks: str) -> _Parser:
    parser = _parser(name)
    parser.add_argument(
        "-r", "--ranks", default=default_ranks, help=f"ranks, e.g. 0 or 0,2-3 (default: {default_ranks})"
    )
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
    parser.add_argument("--text", action="store_true", help="print a table, even where a live view is possible")
    return parser


def _reset() -> _Parser:
    parser = _plain("dist_reset")
    parser.add_argument("-r", "--ranks", help="replace only these, e.g. 1 or 0,2-3 (default: all)")
    return parser


def _interrupt() -> _Parser:
    parser = _plain("dist_interrupt")
    parser.add_argument("-r", "--ranks", default="all", help="ranks, e.g. 0 or 0,2-3 (default: all)")
    return parser


def _copy() -> _Parser:
    parser = _parser("dist_copy")
    parser.add_argument("--from", dest="source", type=int, default=0, metavar="RANK", help="the source (default: 0)")
    to = "the targets (default: all others)"
    parser.add_argument("--to", dest="ranks", default="all", metavar="RANKS", help=to)
    parser.add_argument("names", nargs="+", metavar="NAME", help="variables")
    _add_name(parser)
    return parser


def _diff() -> _Parser:
    parser = _parser("dist_diff")
    parser.add_argument("-r", "--ranks", default="all", help="ranks, e.g. 0 or 0,2-3 (default: all)")
    parser.add_argument("names", nargs="+", metavar="NAME", help="models, optimizers, tensors or other variables")
    _add_name(parser)
    return parser


def _attach() -> _Parser:
    parser = _parser("dist_attach")
    add = parser.add_argument
    add(
        "cluster",
        nargs="?",
        metavar="CLUSTER|FILE|HOST:FILE",
        help="a name or id from `jupyter disttrain list` (default: the only one); or the FILE of a batch job whose "
        "ranks run `python -m jupyter_disttrain.rank --join FILE`; or HOST:FILE, to connect through ssh",
    )
    add("--ssh", metavar="COMMAND", help="the ssh command, with its options (default: ssh)")
    add("--noblock", action="store_true", help="do not wait for a cell that still runs; %%dist_wait shows it")
    return parser


def _run() -> _Parser:
    parser = _parser("dist_run")
    add = parser.add_argument
    parser.usage = "%%dist_run [options] SCRIPT [ARGUMENTS]\n       %%dist_run [options] -m MODULE [ARGUMENTS]"
    add("-m", dest="is_module", action="store_true", help="run a module in place of a script")
    add("-r", "--ranks", default="all", help="ranks, e.g. 0 or 0,2-3 (default: all)")
    add("--timeout", type=float, metavar="S", help="interrupt the ranks after S seconds")
    add("--fresh", dest="how", action="store_const", const="fresh", default="here", help="use new processes")
    add(
        "--per-node",
        dest="how",
        action="store_const",
        const="node",
        help="use one process per node, for programs that start their own, e.g. with mp.spawn",
    )
    add("--watch", action="store_true", help="show the ranks and their metrics below the cell, live")
    add("--noblock", action="store_true", help="return at once; %%dist_wait shows output and result")
    _add_name(parser)
    add("target", metavar="SCRIPT", help="its path, relative to the notebook's folder; after -m a module's name")
    add("arguments", nargs=argparse.REMAINDER, help="the script's arguments; $LOCAL_RANK etc. are each rank's")
    return parser


def _export() -> _Parser:
    parser = _parser("dist_export")
    add = parser.add_argument
    add("path", metavar="SCRIPT", help="the file to write, e.g. train.py; its launch file is written beside it")
    for launch in ("torchrun", "slurm", "mpi", "horovodrun"):
        add(
            f"--{launch}",
            dest="launch",
            action="store_const",
            const=launch,
            default="torchrun",
            help=f"write a launch file for {launch}" + (" (default)" if launch == "torchrun" else ""),
        )
    add("--all", action="store_true", help="write every run of a cell (default: its last run only)")
    _add_name(parser)
    return parser


def _save() -> _Parser:
    parser = _parser("dist_save")
    add = parser.add_argument
    add("path", metavar="FOLDER", help="the checkpoint folder, shared by all hosts")
    add("names", nargs="+", metavar="NAME", help="models, optimizers, schedulers and other variables")
    add("--async", dest="beside", action="store_true", help="write while the next cells run")
    add("--keep", type=int, metavar="N", help="keep only the last N versions (default: all)")
    _add_name(parser)
    return parser


def _load() -> _Parser:
    parser = _parser("dist_load")
    add = parser.add_argument
    add("path", metavar="FOLDER", help="the checkpoint folder, for its latest version; or the folder of one version")
    add("names", nargs="*", default=[], metavar="NAME", help="variables (default: all saved ones)")
    add("--trust-owner", action="store_true", help="load another user's checkpoint, which can run any code")
    _add_name(parser)
    return parser


def _stage() -> _Parser:
    parser = _parser("dist_stage")
    add = parser.add_argument
    add("source", metavar="PATH", help="a file or folder, or an address such as s3://bucket/folder")
    add("--to", metavar="DIR", help="the parent folder of the copy on each node (default: on the node's local disk)")
    add("--as", dest="into", metavar="NAME", help="a variable to set to the path on each rank")
    add("--verify", action="store_true", help="compare hashes with the source, in place of sizes and times")
    _add_name(parser)
    return parser


def _sync_code() -> _Parser:
    parser = _parser("dist_sync_code")
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files and folders to copy too (default: what ranks have imported)")
    add("--auto", choices=("on", "off"), help="reload before every cell that runs on ranks, or stop doing so")
    _add_name(parser)
    return parser


def _shutdown() -> _Parser:
    parser = _plain("dist_shutdown")
    parser.add_argument("--all", action="store_true", help="end all clusters of this notebook")
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
    """Parse a magic's line.

    Raises
    ------
    UsageError
        If it can't be parsed; the message states what is wrong and where the options are listed.
    """
    try:
        words = shlex.split(_without_comment(line))
    except ValueError as error:
        raise UsageError(f"cannot read {line!r}: {error}") from error
    if name != "dist_init":
        return PARSERS[name].parse_args(words)
    args, unknown = PARSERS[name].parse_known_args(words)
    args.unknown = unknown  # may be options of sbatch
    return args


# Text before a comment, as in a shell: a # inside a token or quotes does not start one.
_BEFORE_COMMENT = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|(?<=\S)#|[^"'\\#])*""")


def _without_comment(line: str) -> str:
    before = _BEFORE_COMMENT.match(line)
    assert before is not None  # it also matches the empty string
    return before.group() if line[before.end() :].startswith("#") else line


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

    Raises
    ------
    UsageError
        If they can't be parsed, or are named in two ways.
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
