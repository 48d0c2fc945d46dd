"""Define the settings that ``%config DistributedMagics`` shows and sets.

Covers: the defaults of the magics' options.
Does not cover: the options (``arguments``), the effect of a change on running clusters (``clusters``).
"""

from __future__ import annotations

from traitlets import Bool, Enum, Float, Int, List, Unicode
from traitlets.config import Configurable

from ...config.cluster import BACKENDS, LAUNCHER_NAMES, ON_RANK_DEATH


class DistributedMagics(Configurable):
    """Distributed training from a notebook: the defaults of the magics."""

    launcher = Enum(LAUNCHER_NAMES, "mpi", help="How ranks are started.").tag(config=True)
    backend = Enum(BACKENDS, "auto", help="Process group backend.").tag(config=True)
    num_ranks = Int(0, min=0, help="Number of ranks; 0: one per GPU, or 2 without GPUs.").tag(config=True)
    interface = Unicode("", help="Network interface of the hosts, or their network; empty: chosen.").tag(config=True)
    ssh = Unicode("ssh", help="The command that reaches other hosts.").tag(config=True)
    address = Unicode("", help="MASTER_ADDR; empty: chosen.").tag(config=True)
    timeout = Float(1800.0, help="Timeout of a collective, in seconds.").tag(config=True)
    start_timeout = Float(120.0, help="Timeout of the start, in seconds.").tag(config=True)
    grace = Float(3.0, min=0, help="Seconds until ranks that wait for a failed one are released.").tag(config=True)
    hang_after = Float(30.0, min=0, help="Seconds until a cell explains a hang.").tag(config=True)
    on_rank_death = Enum(ON_RANK_DEATH, "replace", help="What to do when a rank dies.").tag(config=True)
    idle_timeout = Float(0.0, help="Seconds without use until a cluster ends; 0: never.").tag(config=True)
    keep = Bool(False, help="Keep the ranks running when the kernel ends.").tag(config=True)
    sample = Float(1.0, help="Seconds between two samples of each rank and node; 0: no telemetry.").tag(config=True)
    warm = Bool(True, help="Fork ranks from a warm process on each node that has imported torch.").tag(config=True)
    preload = List(Unicode(), [], help="Modules that the warm process imports besides torch.").tag(config=True)
    prewarm = Bool(False, help="Start the warm process when the extension is loaded.").tag(config=True)
    max_output_lines = Int(50_000, min=1, help="Lines of a cell to show; the logs have all.").tag(config=True)
    max_output_bytes = Int(16_000_000, min=1, help="Bytes of a cell to show; the logs have all.").tag(config=True)
    auto_sync = Bool(False, help="Reload edited modules on the ranks before every cell.").tag(config=True)
    progress_after = Float(2.0, help="Seconds until a line shows which ranks still run.").tag(config=True)
