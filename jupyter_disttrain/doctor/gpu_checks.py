"""The checks of ``jupyter disttrain gpu-check``, each on real ranks.

Covers: start, training, failures, interrupts, deaths, subgroups, mismatches, errors of CUDA, scripts, values, the end.
Does not cover: which ranks there are, the table (``gpu_check``).

A check returns what was seen, in a line, and raises if that is not as it should be.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from jupyter_disttrain.cluster.devices import visible_gpus
from jupyter_disttrain.errors import DisttrainError, RankFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from jupyter_disttrain import CellRun, Cluster

LIMIT_S = 60.0  # for anything to happen
FREED_S = 6.0  # after the grace period, for ranks that waited to be released
LONE_S = 25.0  # for a rank that alone makes a group to be released, or replaced
FORM_S = 45.0  # for the group to be formed after a death in the midst of that
SUM_OF_TWO = 8.0  # of four ones on each of two ranks
ROUNDS = 5
MIB = 2**20
WAIT = "x = torch.ones(4, device=device)\ndist.all_reduce(x)\nvalue = x.sum().item()"


class NeedsGpuError(Exception):
    """A check makes no sense without a GPU."""


class NotSoError(Exception):
    """Something is not as it should be."""


@dataclass(slots=True)
class Bench:
    """The ranks that the checks share."""

    device: str
    starts: Callable[..., Cluster]
    watch_s: float  # after a release, for ranks that torch could end later
    _cluster: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        """Ranks that are usable, each with a variable that must stay."""
        if self._cluster is None or self._cluster.closed:
            self._cluster = self.starts()
        self._cluster.run("import os, time; kept = rank * 11; value = None; os.getpid()")
        return self._cluster

    def close(self) -> None:
        """End the ranks."""
        if self._cluster is not None:
            self._cluster.shutdown()
        self._cluster = None

    def needs_gpu(self, what: str) -> None:
        """Skip a check on the CPU."""
        if self.device == "cpu":
            raise NeedsGpuError(f"{what} needs a GPU")


def require(holds: object, what: str) -> None:
    """Raise what is not so."""
    if not holds:
        raise NotSoError(what)


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> float:
    """Wait for what no event tells; returns how long that took, in seconds."""
    began = time.monotonic()
    while not condition():
        require(time.monotonic() - began < limit_s, f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


def pids(cluster: Cluster) -> dict[int, int]:
    """Return the process of each rank."""
    return {entry.info.rank: entry.info.pid for entry in cluster.table}


def check_whole(cluster: Cluster, before: dict[int, int], replaced: Collection[int] = ()) -> None:
    """Check that all ranks can sum, and that those that were not replaced have their process and variables."""
    new = set(replaced)
    total = float(sum(range(cluster.world_size)))
    code = "import os\ny = torch.tensor([float(rank)], device=device); dist.all_reduce(y)\n"
    seen = cluster.run(f"{code}y.item(), os.getpid(), globals().get('kept')", timeout_s=LIMIT_S).results
    require(all(each[0] == total for each in seen.values()), f"a sum of ranks afterwards: {seen}, not {total}")
    for rank, (_, pid, kept) in seen.items():
        if rank in new:
            require(pid != before[rank], f"rank {rank} has its old process")
        else:
            require((pid, kept) == (before[rank], rank * 11), f"rank {rank} lost its process or its variables")


def ended(run: CellRun) -> RankFailure:
    """Wait for a cell that fails."""
    try:
        run.wait(timeout_s=LIMIT_S)
    except RankFailure as failure:
        return failure
    raise NotSoError("the cell ended well")


def waiting(run: CellRun, cluster: Cluster, ranks: set[int]) -> None:
    """Wait until ranks are seen waiting for others."""

    def seen() -> bool:
        looks = run._guardian.look_now(ranks, 5)  # noqa: SLF001
        return all(look.waits_s is not None for look in looks.values())

    until(seen, f"ranks {sorted(ranks)} were not seen waiting; they are: {cluster.where()}")


def stop(cluster: Cluster, code: str, ranks: set[int]) -> tuple[RankFailure, float]:
    """Interrupt a cell once, while ranks wait; returns how it ended and how long that took, in seconds."""
    run = cluster.run(code, block=False)
    waiting(run, cluster, ranks)
    began = time.monotonic()
    cluster.interrupt()
    return ended(run), time.monotonic() - began


def start(bench: Bench) -> str:
    """Compare ranks, devices and figures."""
    cluster = bench.cluster
    seen = cluster.run("str(device), dist.get_backend(), os.environ['LOCAL_RANK'], gpu_id").results
    check_whole(cluster, pids(cluster))
    if bench.device != "cpu":
        require(all(each[0].startswith("cuda:") for each in seen.values()), f"devices: {seen}")
        require(all("nccl" in each[1] for each in seen.values()), f"backends: {seen}")
        figures = cluster.telemetry.ranks
        count = range(cluster.world_size)
        until(lambda: all(rank in figures and figures[rank].vitals.gpu for rank in count), "figures of the GPUs")
        name = cluster.run("torch.cuda.get_device_name(), str(torch.cuda.get_device_properties(device).uuid)").results
        for rank in range(cluster.world_size):
            gpu = figures[rank].vitals.gpu or {}
            require(gpu.get("name") == name[rank][0], f"rank {rank}: NVML has {gpu.get('name')}, CUDA {name[rank][0]}")
    return f"{cluster.world_size} ranks in {cluster.start_seconds:.1f} s: {seen[0]}"


def training(bench: Bench) -> str:
    """Train with DDP and with FSDP2."""
    cluster = bench.cluster
    model = "torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)"
    loop = (
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\nfor _ in range({steps}):\n    optimizer.zero_grad()\n"
        "    model(torch.randn(32, 64, device=device)).square().mean().backward()\n    optimizer.step()\n"
    )
    ddp = f"torch.manual_seed(0)\nmodel = torch.nn.parallel.DistributedDataParallel({model})\n"
    weights = cluster.run(ddp + loop.format(steps=50) + "next(model.parameters()).sum().item()", timeout_s=120).results
    require(len(set(weights.values())) == 1, f"DDP's weights differ: {weights}")
    fsdp = (
        f"from torch.distributed.fsdp import fully_shard\ntorch.manual_seed(0)\nmodel = {model}\nfully_shard(model)\n"
    )
    cluster.run(fsdp + loop.format(steps=20), timeout_s=120)
    cluster.run("del model, optimizer")
    return "50 steps of DDP, 20 of FSDP2; weights are equal"


def failure(bench: Bench) -> str:
    """Have one rank raise while the others wait."""
    cluster = bench.cluster
    before, last = pids(cluster), cluster.world_size - 1
    began = time.monotonic()
    failed = ended(cluster.run(f"if rank == {last}: raise ValueError('the cause')\n{WAIT}", block=False))
    took_s = time.monotonic() - began
    require([each.evalue for each in failed.failures] == ["the cause"], f"told: {failed}")
    require(set(failed.waited) == set(range(last)), f"released: {sorted(failed.waited)}")
    require(took_s < cluster.config.grace_s + FREED_S, f"released after {took_s:.1f} s")
    values = cluster.run("value").results
    require(set(values.values()) == {None}, f"values of an aborted collective were kept: {values}")
    check_whole(cluster, before)
    return f"released after {took_s:.1f} s, no value was kept"


def interrupts(bench: Bench) -> str:
    """Stop once, in each kind of wait."""
    cluster = bench.cluster
    before, last = pids(cluster), cluster.world_size - 1
    waits = {
        "item": WAIT,
        "barrier": "dist.barrier()",
        "backward": "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device))\n"
        f"if rank == {last}: time.sleep(1000)\nmodel(torch.ones(8, 8, device=device)).sum().backward()\n"
        "next(model.parameters()).grad.sum().item()",
    }
    if bench.device != "cpu":
        waits["synchronize"] = "x = torch.ones(4, device=device); dist.all_reduce(x); torch.cuda.synchronize()"
    took = {}
    for name, code in waits.items():
        absent = "" if name == "backward" else f"if rank == {last}: time.sleep(1000)\n"
        _, took[name] = stop(cluster, absent + code, set(range(last)))
        check_whole(cluster, before)
    if bench.device != "cpu":
        code = f"if rank < {last}: dist.all_reduce(torch.ones(4, device=device))\nwhile True: pass"
        run = cluster.run(code, block=False)
        time.sleep(1.0)
        looks = [run._guardian.look_now(set(range(last)), 5) for _ in range(3)]  # noqa: SLF001
        require(
            all(look.waits_s is None for each in looks for look in each.values()), "a loop in Python is called a wait"
        )
        cluster.interrupt()
        ended(run)
        check_whole(cluster, before)
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())


def _death(bench: Bench, rank: int, number: int) -> str:
    cluster = bench.cluster
    before = pids(cluster)
    others = set(range(cluster.world_size)) - {rank}
    run = cluster.run(f"if rank == {rank}: time.sleep(1000)\n{WAIT}", block=False)
    waiting(run, cluster, others)
    os.kill(before[rank], number)
    began = time.monotonic()
    ended(run)
    took_s = time.monotonic() - began
    check_whole(cluster, before, {rank})
    now = pids(cluster)
    with suppress(NotSoError):
        until(lambda: not all(map(psutil.pid_exists, now.values())), "", bench.watch_s)
    require(all(map(psutil.pid_exists, now.values())), f"a rank died within {bench.watch_s:g} s after it was freed")
    cluster.run("kept = rank * 11")
    check_whole(cluster, now)
    return f"back after {took_s:.1f} s; all ranks lived {bench.watch_s:g} s more"


def death(bench: Bench) -> str:
    """Kill the last rank while the others wait for it."""
    return _death(bench, bench.cluster.world_size - 1, signal.SIGKILL)


def death_of_rank_0(bench: Bench) -> str:
    """Kill rank 0, which serves the store."""
    return _death(bench, 0, signal.SIGKILL)


def subgroups(bench: Bench) -> str:
    """Stop in a subgroup's collective, again and again; memory, threads and descriptors stay."""
    cluster = bench.cluster
    before = pids(cluster)
    mesh = "from torch.distributed.device_mesh import init_device_mesh\n"
    mesh += "mesh = init_device_mesh(device.type, (world_size // 2, 2)) if world_size % 2 == 0 else None"
    cluster.run(f"pair = dist.new_group([0, 1])\n{mesh}", timeout_s=LIMIT_S)
    held = []
    for _ in range(ROUNDS):
        alone = "x = torch.ones(4, device=device)\nif rank == 0: dist.all_reduce(x, group=pair); value = x.sum().item()"
        stop(cluster, alone, {0})
        total = "x = torch.ones(4, device=device)\nif rank < 2: dist.all_reduce(x, group=pair)\nx.sum().item()"
        sums = cluster.run(total, timeout_s=LIMIT_S).results
        require(sums[0] == sums[1] == SUM_OF_TWO, f"sums of the subgroup: {sums}")
        over = "x = torch.ones(1, device=device)\nif mesh: dist.all_reduce(x, group=mesh.get_group(0))\nx.item()"
        cluster.run(over, timeout_s=LIMIT_S)
        process = psutil.Process(before[0])
        memory = cluster.run("torch.cuda.memory_reserved() if device.type == 'cuda' else 0").results[0]
        held.append((process.num_threads(), process.num_fds(), memory // MIB))
    check_whole(cluster, before)
    grown = [last - first for first, last in zip(held[1], held[-1], strict=True)]
    require(max(grown) <= ROUNDS, f"threads, descriptors, MiB: {held}")
    return f"{ROUNDS} rounds; threads, descriptors, MiB of the GPU: {held[0]} to {held[-1]}"


def lone_group(bench: Bench) -> str:
    """Have one rank alone make a group, and stop it: the rank is released or replaced."""
    cluster = bench.cluster
    before = pids(cluster)
    code = f"if rank == 0:\n    group = dist.new_group(list(range(world_size)))\n    {WAIT.splitlines()[0]}\n"
    run = cluster.run(code + "    dist.all_reduce(x, group=group); value = x.sum().item()", block=False)
    with suppress(NotSoError):
        until(lambda: run._guardian.look_now({0}, 5)[0].waits_s is not None, "", 10)  # noqa: SLF001
    began = time.monotonic()
    cluster.interrupt()
    with suppress(NotSoError):
        until(lambda: run.done, "", 3.0)
    cluster.interrupt(forced=True)
    ended(run)
    took_s = time.monotonic() - began
    require(took_s < LONE_S, f"back after {took_s:.1f} s")
    cluster.run("kept = rank * 11", timeout_s=LIMIT_S)
    replaced = {rank for rank, pid in pids(cluster).items() if pid != before[rank]}
    check_whole(cluster, before, replaced)
    return f"back after {took_s:.1f} s; {len(replaced)} ranks were replaced"


def mismatch(bench: Bench) -> str:
    """Give tensors of two sizes to one collective."""
    cluster = bench.cluster
    before = pids(cluster)
    code = "x = torch.ones(4 if rank else 8, device=device)\nif rank < world_size - 1: dist.all_reduce(x)\n"
    run = cluster.run(f"{code}value = x.sum().item()\ntime.sleep(1000)", block=False)
    until(lambda: any("is not the same on all ranks" in line for line in cluster.where()), f"named: {cluster.where()}")
    said = cluster.where()[0]
    cluster.interrupt()
    ended(run)
    check_whole(cluster, before)
    return said


def out_of_memory(bench: Bench) -> str:
    """Ask for more memory than the GPU has, on one rank."""
    bench.needs_gpu("out of memory")
    cluster = bench.cluster
    before = pids(cluster)
    failed = ended(cluster.run("if rank == 0: big = torch.empty(2**50, device=device)", block=False))
    require("torch.cuda.empty_cache()" in failed.failures[0].evalue, f"told: {failed}")
    require(not any("memory held" in note for note in failed.notes), f"figures of the host: {failed.notes}")
    check_whole(cluster, before)
    return f"{failed.failures[0].evalue[:60]}; {'; '.join(failed.notes)}"


def lost_context(bench: Bench) -> str:
    """Fail an assert on the GPU, without and with a pending collective: the rank is replaced."""
    bench.needs_gpu("an assert on the device")
    for pending in ("", "dist.all_reduce(torch.ones(4, device=device))\n"):
        cluster = bench.cluster
        before, last = pids(cluster), cluster.world_size - 1
        lookup = "torch.nn.Embedding(4, 4).to(device)(torch.tensor([9], device=device)); torch.cuda.synchronize()"
        failed = ended(cluster.run(f"{pending}if rank == {last}: {lookup}", block=False))
        check_whole(cluster, before, {last})
    return failed.by_rank[last].evalue[:120]


def death_in_forming(bench: Bench) -> str:
    """Kill a rank while the group is formed again, at different moments."""
    cluster = bench.cluster
    slowest = 0.0
    for at in range(ROUNDS):
        cluster.run("kept = rank * 11", timeout_s=LIMIT_S)
        rank = cluster.world_size - 1
        run = cluster.run("dist.destroy_process_group()", block=False)
        with suppress(DisttrainError):
            run.wait()
        began = time.monotonic()
        old = pids(cluster)[rank]
        timer = _kill_after(old, 0.02 * at)
        with suppress(DisttrainError):
            cluster.run("dist.barrier()", timeout_s=LIMIT_S)  # forms the group first
        timer.join()
        until(lambda old=old, rank=rank: pids(cluster)[rank] != old, "a new process for the killed rank")  # type: ignore[misc]
        total = "y = torch.ones(1, device=device); dist.all_reduce(y); y.item()"
        seen = cluster.run(total, timeout_s=LIMIT_S).results
        require(set(seen.values()) == {float(cluster.world_size)}, f"sums: {seen}")
        slowest = max(slowest, time.monotonic() - began)
    require(slowest < FORM_S, f"back after {slowest:.1f} s")
    return f"{ROUNDS} rounds; the slowest took {slowest:.1f} s"


def _kill_after(pid: int, seconds: float) -> Any:
    import threading  # noqa: PLC0415

    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.start()
    return timer


SCRIPT = """
import os, torch, torch.distributed as dist
gpu = {gpu}
if gpu: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl" if gpu else "gloo")
x = torch.ones(1, device="cuda" if gpu else "cpu")
dist.all_reduce(x)
print("sum", x.item(), os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
dist.destroy_process_group()
"""


def script(bench: Bench) -> str:
    """Run a script that torchrun would run, twice, in processes of its own."""
    cluster = bench.cluster
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(SCRIPT.format(gpu=bench.device != "cpu"))
        for _ in range(2):
            said = cluster.run_script(path, how="fresh", timeout_s=120).stdout
            expected = f"sum {float(cluster.world_size)} None"
            require(all(expected in each for each in said.values()), f"printed: {said}")
    check_whole(cluster, pids(cluster))
    return "two runs; torch's own TORCH_NCCL_ settings"


def values(bench: Bench) -> str:
    """Mix devices: tensors on the CPU in the session's group, objects, values, metrics, a checkpoint."""
    cluster = bench.cluster
    count = cluster.world_size
    code = "x = torch.ones(2); dist.all_reduce(x); all_of = [None] * world_size; dist.all_gather_object(all_of, rank)\n"
    seen = cluster.run(code + "on_gpu = torch.full((3,), 7.0, device=device); x.tolist(), all_of").results
    require(all(each == ([float(count)] * 2, list(range(count))) for each in seen.values()), f"seen: {seen}")
    pulled = cluster.pull("on_gpu")[0]["on_gpu"]
    require(pulled.tolist() == [7.0] * 3 and pulled.device.type == "cpu", f"pulled: {pulled}")
    cluster.run("log_metrics(1, on_gpu=on_gpu.sum())")
    until(lambda: "on_gpu" in cluster.metrics.names, "the metric")
    with tempfile.TemporaryDirectory() as folder:
        cluster.save(folder, ["on_gpu"])
        cluster.run("on_gpu.zero_()")
        cluster.load(folder)
        loaded = cluster.run("on_gpu.sum().item(), on_gpu.device.type").results[0]
    require(loaded == (7.0 * 3, bench.cluster.run("device.type").results[0]), f"loaded: {loaded}")
    return f"CPU tensors, objects, values, a metric and a checkpoint ({loaded[1]})"


def time_out(bench: Bench) -> str:
    """Wait for longer than the group's time-out: no process ends."""
    bench.needs_gpu("NCCL's watchdog")
    bench.close()
    with bench.starts(timeout_s=10.0, hang_after_s=5.0) as cluster:
        cluster.run("import os, time; kept = rank * 11")
        before = pids(cluster)
        ended_by = "by the stop"
        run = cluster.run(f"if rank == 0: time.sleep(25)\n{WAIT}", block=False)
        with suppress(RankFailure):
            run.wait(timeout_s=LIMIT_S)
            ended_by = "by itself"
        check_whole(cluster, before)
    return f"the cell ended {ended_by}, with all processes"


def shared_gpu(bench: Bench) -> str:
    """Have two ranks share a GPU over Gloo: new groups and DDP."""
    bench.close()
    options = (
        {"n": 2, "backend": "gloo"} if bench.device == "cpu" else {"n": len(visible_gpus()) + 1, "backend": "auto"}
    )
    with bench.starts(**options, share_gpus=True) as cluster:
        cluster.run("lone = dist.new_group([0]); pair = dist.new_group([0, 1])", timeout_s=LIMIT_S)
        model = "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).to(device))"
        cluster.run(f"{model}(torch.ones(4, 8, device=device)).sum().backward()", timeout_s=LIMIT_S)
        seen = cluster.run("dist.get_backend(), str(device)").results
    return f"{seen}"


def end(bench: Bench) -> str:
    """Shut down in the midst of a collective: no process and no memory is left."""
    cluster = bench.cluster
    processes = pids(cluster)
    run = cluster.run(f"if rank == 0: time.sleep(1000)\n{WAIT}", block=False)
    waiting(run, cluster, set(range(1, cluster.world_size)))
    before = set(Path("/dev/shm").glob("nccl-*"))  # noqa: S108
    bench.close()
    took_s = until(lambda: not any(map(psutil.pid_exists, processes.values())), "the end of all processes")
    left = before & set(Path("/dev/shm").glob("nccl-*"))  # noqa: S108
    require(not left, f"left in shared memory: {sorted(map(str, left))}")
    return f"no process {took_s:.1f} s after the shutdown"


CHECKS: dict[str, Callable[[Bench], str]] = {
    "start": start,
    "training": training,
    "failure": failure,
    "interrupts": interrupts,
    "death": death,
    "death of rank 0": death_of_rank_0,
    "subgroups": subgroups,
    "lone group": lone_group,
    "mismatch": mismatch,
    "out of memory": out_of_memory,
    "lost context": lost_context,
    "death in forming": death_in_forming,
    "script": script,
    "values": values,
    "time-out": time_out,
    "shared GPU": shared_gpu,
    "end": end,
}
