"""Check sessions on GPUs with real ranks (``jupyter disttrain gpu-check``).

Covers: start, training, failures, interrupts, deaths, subgroups, mismatches, errors of CUDA, scripts, values, the end.
Does not cover: the number of ranks, the table of results (``gpu_check``).

A check returns a line on what it observed, and raises if that is not as it should be.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from jupyter_disttrain.errors import DisttrainError, RankFailure

from ..protocol.time_limits import FREED_SECONDS, GPU_BENCH_LIMIT_SECONDS, GPU_CHECKS_FORM_SECONDS, LONE_SECONDS
from .gpu_bench import NotSoError, ended, pids, require, stop, until, waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from .gpu_bench import Bench

SUM_OF_TWO = 8.0  # sum of four ones on each of two ranks
ROUNDS = 5
MIB = 2**20
WAIT = "x = torch.ones(4, device=device)\ndist.all_reduce(x)\nvalue = x.sum().item()"


CHECKS: dict[str, Callable[[Bench], str]] = {}
NEED_GPU = ("out of memory", "lost context", "timeout")


def _check(function: Callable[[Bench], str]) -> Callable[[Bench], str]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@_check
def start(bench: Bench) -> str:
    """Compare ranks, devices and figures."""
    cluster = bench.cluster
    seen = bench.run("str(device), dist.get_backend(), os.environ['LOCAL_RANK']")
    bench.check_whole()
    if bench.has_gpu:
        require(all(each[0].startswith("cuda:") and "nccl" in each[1] for each in seen.values()), f"seen: {seen}")
        figures, ranks = cluster.telemetry.ranks, range(cluster.world_size)
        until(lambda: all(rank in figures and figures[rank].vitals.gpu for rank in ranks), "figures of the GPUs")
        in_nvml = {rank: (figures[rank].vitals.gpu or {}).get("name") for rank in ranks}
        in_cuda = bench.run("torch.cuda.get_device_name()")
        require(in_nvml == in_cuda, f"names of the GPUs: NVML has {in_nvml}, CUDA {in_cuda}")
    return f"{cluster.world_size} ranks in {cluster.start_report.seconds:.1f} s; rank 0 has {seen[0][0]}, {seen[0][1]}"


@_check
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
    fsdp = f"from torch.distributed.fsdp import fully_shard\nmodel = {model}\nfully_shard(model)\n"
    cluster.run(fsdp + loop.format(steps=20), timeout_s=120)
    cluster.run("del model, optimizer")
    return "50 steps of DDP, 20 of FSDP2; weights are equal"


@_check
def failure(bench: Bench) -> str:
    """Raise on one rank while the others wait."""
    cluster = bench.cluster
    failed, took_s = ended(cluster.run(f"if rank == {bench.last}: raise ValueError('the cause')\n{WAIT}", block=False))
    require([each.evalue for each in failed.failures] == ["the cause"], f"reported: {failed}")
    require(set(failed.waited) == set(range(bench.last)), f"released: {sorted(failed.waited)}")
    require(took_s < cluster.config.grace_s + FREED_SECONDS, f"released after {took_s:.1f} s")
    values = bench.run("value")
    require(set(values.values()) == {None}, f"values of an aborted collective were kept: {values}")
    bench.check_whole()
    return f"released after {took_s:.1f} s, no value was kept"


@_check
def interrupts(bench: Bench) -> str:
    """Interrupt once, in each kind of wait."""
    cluster = bench.cluster
    last = bench.last
    waits = {
        "item": WAIT,
        "barrier": "dist.barrier()",
        "backward": "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device))\n"
        f"if rank == {last}: time.sleep(1000)\nmodel(torch.ones(8, 8, device=device)).sum().backward()\n"
        "next(model.parameters()).grad.sum().item()",
    }
    if bench.has_gpu:
        waits["synchronize"] = "x = torch.ones(4, device=device); dist.all_reduce(x); torch.cuda.synchronize()"
    took = {}
    for name, code in waits.items():
        absent = "" if name == "backward" else f"if rank == {last}: time.sleep(1000)\n"
        took[name] = stop(cluster, absent + code, set(range(last)))
        bench.check_whole()
    if bench.has_gpu:
        code = f"if rank < {last}: dist.all_reduce(torch.ones(4, device=device))\nwhile True: pass"
        run = cluster.run(code, block=False)
        time.sleep(1.0)
        looks = [run._supervisor.stacks.collect(set(range(last)), 5) for _ in range(3)]  # noqa: SLF001
        seen = [look for each in looks for look in each.values() if look.waits_s is not None]
        require(not seen, f"a loop in Python is called a wait: {seen}")
        cluster.interrupt()
        ended(run)
        bench.check_whole()
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())


@_check
def death(bench: Bench) -> str:
    """Kill the last rank while the others wait for it, then rank 0, which serves the store."""
    took = []
    for is_last in (True, False):
        cluster = bench.cluster
        rank = bench.last if is_last else 0
        run = cluster.run(f"if rank == {rank}: time.sleep(1000)\n{WAIT}", block=False)
        waiting(run, set(bench.pids) - {rank})
        os.kill(bench.pids[rank], signal.SIGKILL)
        took.append(f"rank {rank}: back after {ended(run)[1]:.1f} s")
        bench.check_whole({rank})
        assert bench.cluster  # also updates bench.pids for the new process
        time.sleep(bench.watch_s)
        require(
            all(map(psutil.pid_exists, bench.pids.values())),
            f"a rank died within {bench.watch_s:g} s after its release",
        )
        bench.check_whole()
    return f"{'; '.join(took)}; all ranks lived {bench.watch_s:g} s more"


@_check
def subgroups(bench: Bench) -> str:
    """Interrupt a subgroup's collective repeatedly; memory, threads and descriptors must not grow."""
    cluster = bench.cluster
    mesh = "from torch.distributed.device_mesh import init_device_mesh\n"
    mesh += "mesh = init_device_mesh(device.type, (world_size // 2, 2)) if world_size % 2 == 0 else None"
    bench.run(f"pair = dist.new_group([0, 1])\n{mesh}")
    held = []
    for _ in range(ROUNDS):
        alone = "x = torch.ones(4, device=device)\nif rank == 0: dist.all_reduce(x, group=pair); value = x.sum().item()"
        stop(cluster, alone, {0})
        total = "x = torch.ones(4, device=device)\nif rank < 2: dist.all_reduce(x, group=pair)\nx.sum().item()"
        sums = bench.run(total)
        require(sums[0] == sums[1] == SUM_OF_TWO, f"sums of the subgroup: {sums}")
        over = "x = torch.ones(1, device=device)\nif mesh: dist.all_reduce(x, group=mesh.get_group(0))\nx.item()"
        bench.run(over)
        process = psutil.Process(bench.pids[0])
        memory = bench.run("torch.cuda.memory_reserved() if device.type == 'cuda' else 0")[0]
        held.append((process.num_threads(), process.num_fds(), memory // MIB))
    bench.check_whole()
    grown = [last - first for first, last in zip(held[1], held[-1], strict=True)]
    require(max(grown) <= ROUNDS, f"threads, descriptors, MiB: {held}")
    return f"{ROUNDS} rounds; threads, descriptors, MiB of the GPU: {held[0]} to {held[-1]}"


@_check
def lone_group(bench: Bench) -> str:
    """Create a group on only one rank, and interrupt it: the rank is released or replaced."""
    cluster = bench.cluster
    code = "group = dist.new_group(list(range(world_size))); x = torch.ones(4, device=device)\n"
    run = cluster.run(f"{code}dist.all_reduce(x, group=group); value = x.sum().item()", 0, block=False)
    with suppress(NotSoError):
        waiting(run, {0}, 10.0)
    began = time.monotonic()
    cluster.interrupt()
    with suppress(NotSoError):
        until(lambda: run.done, "", 3.0)
    cluster.interrupt(forced=True)
    ended(run)
    took_s = time.monotonic() - began
    require(took_s < LONE_SECONDS, f"back after {took_s:.1f} s")
    old = bench.pids
    replaced = {rank for rank, pid in pids(bench.cluster).items() if pid != old[rank]}
    bench.check_whole()
    return f"back after {took_s:.1f} s; {len(replaced)} ranks were replaced"


@_check
def mismatch(bench: Bench) -> str:
    """Call one collective with tensors of two sizes."""
    cluster = bench.cluster
    code = "x = torch.ones(4 if rank else 8, device=device)\nif rank < world_size - 1: dist.all_reduce(x)\n"
    run = cluster.run(f"{code}value = x.sum().item()\ntime.sleep(1000)", block=False)
    until(lambda: any("is not the same on all ranks" in line for line in cluster.where()), f"named: {cluster.where()}")
    report = cluster.where()[0]
    cluster.interrupt()
    ended(run)
    bench.check_whole()
    return report


@_check
def out_of_memory(bench: Bench) -> str:
    """Request more memory than the GPU has, on one rank."""
    cluster = bench.cluster
    failed, _ = ended(cluster.run("if rank == 0: big = torch.empty(2**50, device=device)", block=False))
    require("torch.cuda.empty_cache()" in failed.failures[0].evalue, f"reported: {failed}")
    require(not any("memory held" in note for note in failed.notes), f"figures of the host: {failed.notes}")
    bench.check_whole()
    return f"{failed.failures[0].evalue[:60]}; {'; '.join(failed.notes)}"


@_check
def lost_context(bench: Bench) -> str:
    """Fail an assertion on the GPU, without and with a pending collective: the rank is replaced."""
    for pending in ("", "dist.all_reduce(torch.ones(4, device=device))\n"):
        cluster = bench.cluster
        last = bench.last
        lookup = "torch.nn.Embedding(4, 4).to(device)(torch.tensor([9], device=device)); torch.cuda.synchronize()"
        failed, _ = ended(cluster.run(f"{pending}if rank == {last}: {lookup}", block=False))
        bench.check_whole({last})
    return failed.by_rank[last].evalue[:120]


@_check
def death_in_forming(bench: Bench) -> str:
    """Kill a rank while the group is formed again, at different moments."""
    slowest = 0.0
    for at in range(ROUNDS):
        cluster = bench.cluster
        rank = bench.last
        with suppress(DisttrainError):
            cluster.run("dist.destroy_process_group()")
        began = time.monotonic()
        old = bench.pids[rank]
        timer = threading.Timer(0.02 * at, os.kill, (old, signal.SIGKILL))
        timer.start()
        with suppress(DisttrainError):
            cluster.run("dist.barrier()", timeout_s=GPU_BENCH_LIMIT_SECONDS)  # forms the group first
        timer.join()
        until(lambda: pids(cluster)[rank] != old, "a new process for the killed rank")  # noqa: B023
        bench.check_whole({rank})
        slowest = max(slowest, time.monotonic() - began)
    require(slowest < GPU_CHECKS_FORM_SECONDS, f"back after {slowest:.1f} s")
    return f"{ROUNDS} rounds; the slowest took {slowest:.1f} s"


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


@_check
def script(bench: Bench) -> str:
    """Run a script written for torchrun twice."""
    cluster = bench.cluster
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(SCRIPT.format(gpu=bench.has_gpu))
        for _ in range(2):
            output = cluster.scripts.run(path, timeout_s=120).stdout
            expected = f"sum {float(cluster.world_size)} None"
            require(all(expected in each for each in output.values()), f"printed: {output}")
    bench.check_whole()
    return "two runs; torch's own TORCH_NCCL_ settings"


@_check
def values(bench: Bench) -> str:
    """Mix devices: tensors on the CPU in the session's group, objects, values, metrics, a checkpoint."""
    cluster = bench.cluster
    count = cluster.world_size
    code = "x = torch.ones(2); dist.all_reduce(x); all_of = [None] * world_size; dist.all_gather_object(all_of, rank)\n"
    seen = bench.run(code + "on_gpu = torch.full((3,), 7.0, device=device); x.tolist(), all_of")
    require(all(each == ([float(count)] * 2, list(range(count))) for each in seen.values()), f"seen: {seen}")
    pulled = cluster.pull("on_gpu")[0]["on_gpu"]
    require(pulled.tolist() == [7.0] * 3 and pulled.device.type == "cpu", f"pulled: {pulled}")
    cluster.run("log_metrics(1, on_gpu=on_gpu.sum())")
    until(lambda: "on_gpu" in cluster.metrics.names, "the metric")
    with tempfile.TemporaryDirectory() as folder:
        cluster.checkpoints.save(folder, ["on_gpu"])
        cluster.run("on_gpu.zero_()")
        cluster.checkpoints.load(folder)
        loaded = bench.run("on_gpu.sum().item(), on_gpu.device.type, device.type")[0]
    require(loaded == (7.0 * 3, loaded[2], loaded[2]), f"loaded: {loaded}")
    return f"CPU tensors, objects, values, a metric and a checkpoint ({loaded[1]})"


@_check
def timeout(bench: Bench) -> str:
    """Wait for longer than the group's timeout: no process may end."""
    bench.close()
    with bench.starts(timeout_s=10.0, hang_after_s=5.0) as cluster:
        before = cluster.run("import os, time; os.getpid()").results
        run = cluster.run(f"if rank == 0: time.sleep(25)\n{WAIT}", block=False)
        with suppress(RankFailure):
            run.wait(timeout_s=GPU_BENCH_LIMIT_SECONDS)
        after = cluster.run("os.getpid()", timeout_s=GPU_BENCH_LIMIT_SECONDS).results
        require(after == before, f"processes: {before} before, {after} afterwards")
    return "all processes are the same after a wait of 25 s with a timeout of 10 s"


@_check
def shared_gpu(bench: Bench) -> str:
    """Share a GPU between two ranks over Gloo: new groups and DDP."""
    bench.close()
    count, backend = (bench.gpus + 1, "auto") if bench.has_gpu else (2, "gloo")
    with bench.starts(n=count, backend=backend, share_gpus=True) as cluster:
        cluster.run("lone = dist.new_group([0]); pair = dist.new_group([0, 1])", timeout_s=GPU_BENCH_LIMIT_SECONDS)
        model = "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).to(device))"
        cluster.run(f"{model}(torch.ones(4, 8, device=device)).sum().backward()", timeout_s=GPU_BENCH_LIMIT_SECONDS)
        backend, device = cluster.run("dist.get_backend(), str(device)").results[0]
    return f"new groups and DDP over {backend} on {device}"


@_check
def end(bench: Bench) -> str:
    """Shut down during a collective: no process and no shared memory may be left."""
    cluster = bench.cluster
    processes = bench.pids
    run = cluster.run(f"if rank == 0: time.sleep(1000)\n{WAIT}", block=False)
    waiting(run, set(range(1, cluster.world_size)))
    before = set(Path("/dev/shm").glob("nccl-*"))  # noqa: S108
    bench.close()
    took_s = until(lambda: not any(map(psutil.pid_exists, processes.values())), "the end of all processes")
    left = before & set(Path("/dev/shm").glob("nccl-*"))  # noqa: S108
    require(not left, f"left in shared memory: {sorted(map(str, left))}")
    return f"no process {took_s:.1f} s after the shutdown"
