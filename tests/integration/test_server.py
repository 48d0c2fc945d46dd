"""The server extension: access, replies, and use while the kernel is busy or dead."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from jupyter_disttrain import Cluster
from jupyter_disttrain import server as server_package
from jupyter_disttrain.client.cells.history import Origin

from ..support.notebook_driver import Notebook
from ..support.process_tools import wait_until
from ..support.recovery_tools import stop

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "of-these-tests"
AUTH = {"Authorization": f"token {TOKEN}"}
READY = re.compile(r"http://127\.0\.0\.1:(\d+)/base/")
WAIT = "import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)"


@dataclass
class Server:
    """A Jupyter Server under a base_url."""

    port: int
    process: subprocess.Popen[str]

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}/base/disttrain/api"

    def get(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(f"{self.root}/{path}", data, AUTH)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def post(self, path: str) -> Any:
        return self.get(path, b"")

    def cluster(self, name: str) -> dict[str, Any]:
        """What it reports of a cluster; empty if there is none."""
        return next((each for each in self.get("clusters")["clusters"] if each["name"] == name), {})

    def states(self, name: str) -> list[str]:
        return [rank["state"] for rank in self.cluster(name).get("ranks", [])]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with login, as ``jupyter lab`` starts one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", f"--port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={TOKEN}", "--ServerApp.base_url=/base/", "--ip=127.0.0.1"]
    command += [f"--ServerApp.root_dir={tmp_path_factory.mktemp('root')}"]
    command += ["--allow-root"] if os.getuid() == 0 else []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if READY.search(line):
            break
    assert "jupyter_disttrain" in output, output
    assert wait_until(lambda: listens(port))
    try:
        yield Server(port, process)
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def seen() -> Iterator[Cluster]:
    """Two ranks owned by this process."""
    with Cluster(n=2, launcher="local", backend="gloo", sample_s=0.1, name="seen", grace_s=0.5) as cluster:
        yield cluster


def refused(server: Server, path: str, **options: Any) -> tuple[int, str]:
    """Send a request without credentials; return the status and the body."""
    request = urllib.request.Request(f"{server.root}/{path}", **options)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as reply:
        return reply.code, reply.read().decode()


def test_requests_without_a_login_are_refused(server: Server) -> None:
    assert refused(server, "clusters")[0] == 403
    assert refused(server, "clusters", headers={"Authorization": "token wrong"})[0] == 403
    assert refused(server, "clusters/any/interrupt", data=b"", method="POST")[0] == 403
    assert refused(server, "clusters/any/variables")[0] == 403
    assert refused(server, "live", headers={"Upgrade": "websocket", "Connection": "Upgrade"})[0] == 403


def test_cross_site_requests_are_refused(server: Server, seen: Cluster) -> None:
    """A browser that is logged in by its cookie also needs the XSRF token."""
    jar = CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    browser.open(f"http://127.0.0.1:{server.port}/base/api/status?token={TOKEN}", timeout=60).read()
    with browser.open(f"{server.root}/clusters", timeout=60) as reply:
        assert reply.status == 200
    action = f"{server.root}/clusters/{seen.cluster_id}/interrupt"
    with pytest.raises(urllib.error.HTTPError, match="403") as caught:
        browser.open(urllib.request.Request(action, data=b"", method="POST"), timeout=60)
    with caught.value as reply:
        assert "_xsrf" in reply.read().decode()


def test_cluster_and_its_activity_are_reported(server: Server, seen: Cluster, tmp_path: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:  # only below the base URL
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/disttrain/api/clusters?token={TOKEN}", timeout=60)
    caught.value.close()
    assert wait_until(lambda: server.states("seen") == ["idle", "idle"])
    found = server.cluster("seen")
    assert (found["id"], found["held"]) == (seen.cluster_id, True)
    assert [rank["pid"] for rank in found["ranks"]] == [entry.info.pid for entry in seen.table]
    assert wait_until(lambda: bool(server.cluster("seen")["nodes"]))
    assert wait_until(lambda: server.cluster("seen")["ranks"][0].get("memory_bytes", 0) > 0)
    stop = tmp_path / "stop"
    run = seen.run(WAIT.format(path=str(stop)), 1, block=False, origin=Origin(execution_count=5))
    assert wait_until(lambda: server.states("seen") == ["idle", "running"])
    assert wait_until(lambda: server.cluster("seen")["ranks"][1].get("line") == 2)
    assert server.cluster("seen")["ranks"][1]["cell"] == 5
    stop.touch()
    run.wait()


def test_hang_is_reported_while_its_kernel_is_busy(server: Server, seen: Cluster) -> None:
    seen.change(hang_after_s=0.5)
    run = seen.run("import time\ndist.barrier() if rank == 0 else time.sleep(1000)", block=False)
    assert wait_until(lambda: len(server.cluster("seen")["hang"]) == 2)
    assert server.cluster("seen")["hang"] == ["rank 0: waits in barrier at line 2", "rank 1: in Python code at line 2"]
    stop(seen, run)
    assert wait_until(lambda: server.cluster("seen")["hang"] == [])
    seen.change(hang_after_s=30.0)


def test_dead_rank_and_its_replacement_are_reported(server: Server, seen: Cluster) -> None:
    assert wait_until(lambda: server.states("seen") == ["idle", "idle"])
    before = seen.table[1].info.pid
    seen.replace([1])
    assert wait_until(lambda: server.cluster("seen")["ranks"][1]["pid"] not in (before, None), seconds=60)
    assert wait_until(lambda: server.states("seen") == ["idle", "idle"])
    assert seen.run("rank").results == {0: 0, 1: 1}  # the server has rejected no client


def test_interrupt_goes_through_the_process_that_owns_the_cluster(server: Server, seen: Cluster) -> None:
    run = seen.run("if rank == 1:\n    import time; time.sleep(1000)\ndist.barrier()", block=False)
    assert wait_until(lambda: "in collective" in server.states("seen"))
    reply = server.post(f"clusters/{seen.cluster_id}/interrupt")
    assert reply == {"done": f"requested from process {os.getpid()}"}
    assert wait_until(lambda: run.done)
    assert seen.run("x = torch.ones(1); dist.all_reduce(x); x.item()").results == {0: 2.0, 1: 2.0}


def test_end_of_a_log_is_sent_with_its_streams(server: Server, seen: Cluster) -> None:
    seen.run("import sys\nprint('first', rank, flush=True)\nprint('bad', rank, file=sys.stderr, flush=True)")
    seen.run("print('last', rank)")
    (log,) = server.get(f"clusters/{seen.cluster_id}/log?rank=1")["logs"]
    end = [{"stream": "stderr", "text": "bad 1\n"}, {"stream": "stdout", "text": "last 1\n"}]
    assert (log["rank"], log["parts"][-2:]) == (1, end)
    assert log["parts"][-3]["text"].endswith("first 1\n")
    both = server.get(f"clusters/{seen.cluster_id}/log?rank=all")["logs"]
    assert [each["rank"] for each in both] == [0, 1]
    assert both[1]["parts"][-2:] == end
    request = urllib.request.Request(f"{server.root}/clusters/{seen.cluster_id}/log/file?rank=0", headers=AUTH)
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert reply.headers["Content-Type"] == "text/plain; charset=UTF-8"
        assert reply.read().decode().endswith("first 0\nbad 0\nlast 0\n")
    assert refused(server, f"clusters/{seen.cluster_id}/log/file?rank=0")[0] == 403
    status, output = refused(server, f"clusters/{seen.cluster_id}/log?rank=9", headers=AUTH)
    assert (status, "there is no rank 9 in 'seen'; it has 2 ranks" in output) == (409, True)
    assert refused(server, "clusters/no-1-a/log", headers=AUTH)[0] == 409


def test_variables_are_listed_while_the_ranks_run(server: Server, seen: Cluster, tmp_path: Path) -> None:
    def uses() -> list[int]:
        return [rank.get("uses", 0) for rank in server.cluster("seen")["ranks"]]

    before = uses()
    seen.run("x = torch.ones(2, 3)\nsame = [x]\nepoch = rank")  # too short for a state to show it
    assert wait_until(lambda: all(now > earlier for now, earlier in zip(uses(), before, strict=True)))
    stop = tmp_path / "stop"
    run = seen.run(WAIT.format(path=str(stop)), block=False)
    assert wait_until(lambda: server.states("seen") == ["running", "running"])
    reply = server.get(f"clusters/{seen.cluster_id}/variables")
    found = {(each["name"], each["ranks"]): each for each in reply["variables"]}
    assert (reply["ranks"], reply["silent"]) == ("0-1", "")
    assert (reply["least_tensor_bytes"], reply["most_tensor_bytes"]) == (24, 24)
    shown = {"name": "x", "type": "Tensor", "value": "(2, 3) float32 cpu", "size_bytes": 24}
    assert found["x", "0-1"] == shown | {"ranks": "0-1", "differs": False}
    assert found["same", "0-1"]["size_bytes"] == 24
    assert [(found["epoch", rank]["value"], found["epoch", rank]["differs"]) for rank in "01"] == [
        ("0", True),
        ("1", True),
    ]
    assert not run.done
    stop.touch()
    run.wait()
    assert refused(server, "clusters/no-1-a/variables", headers=AUTH)[0] == 409


def test_variables_of_a_rank_that_does_not_reply_are_left_out(server: Server, seen: Cluster) -> None:
    seen.run("on_both = 1")
    run = seen.run("import ctypes\nif rank == 1: ctypes.PyDLL(None).usleep(8_000_000)", block=False)

    def variables() -> dict[str, Any]:
        found: dict[str, Any] = server.get(f"clusters/{seen.cluster_id}/variables")
        return found

    replies: list[dict[str, Any]] = []
    assert wait_until(lambda: (replies.append(variables()), replies[-1]["silent"] == "1")[1])
    assert replies[-1]["ranks"] == "0"
    (shown,) = (each for each in replies[-1]["variables"] if each["name"] == "on_both")
    assert (shown["ranks"], shown["differs"]) == ("0", False)
    run.wait()
    assert variables()["silent"] == ""


async def connect(server: Server) -> WebSocketClientConnection:
    url = f"ws://127.0.0.1:{server.port}/base/disttrain/api/live"
    return await websocket_connect(HTTPRequest(url, headers=AUTH))


def test_websocket_sends_state_figures_and_metrics(server: Server, seen: Cluster) -> None:
    seen.run("for step in range(20): log_metrics(step, served=step + rank / 2)")

    async def listen() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], bytes]:
        connection = await connect(server)
        await connection.write_message(json.dumps({"watch": [seen.cluster_id]}))
        state: dict[str, Any] = {}
        devices: dict[str, Any] = {}
        packet = b""
        while not (state and devices and packet):
            message = await connection.read_message()
            if isinstance(message, bytes):
                packet = message
            else:
                assert message is not None, connection.close_reason
                content = json.loads(message)
                state, devices = (content, devices) if content["type"] == "state" else (state, content)
        connection.close()
        while await connection.read_message() is not None:
            pass
        size = int.from_bytes(packet[:4], "little")
        return state, devices, json.loads(packet[4 : 4 + size]), packet[4 + size :]

    state, devices, header, columns = asyncio.run(asyncio.wait_for(listen(), timeout=60))
    assert seen.cluster_id in [cluster["id"] for cluster in state["clusters"]]
    assert set(devices["ranks"]) == {"0", "1"}
    assert header["id"] == seen.cluster_id
    assert header["first"]
    assert len(columns) == header["count"] * (8 + 4 + 4 + 2 + 2)
    assert "served" in header["names"]


def test_invalid_request_closes_the_websocket(server: Server) -> None:
    async def ask() -> int | None:
        connection = await connect(server)
        await connection.write_message("[1")
        while await connection.read_message() is not None:
            pass
        connection.close()  # this end
        return connection.close_code

    assert asyncio.run(asyncio.wait_for(ask(), timeout=60)) == 1003


def test_files_of_ended_clusters_and_of_other_versions_are_distinguished(server: Server, seen: Cluster) -> None:
    profiles = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / "disttrain"
    own = json.loads((profiles / seen.cluster_id / "cluster.json").read_text())
    stale, other = profiles / "stale-1-a", profiles / "other-1-a"
    try:
        for folder, change in ((stale, {"local": "/nowhere", "cluster_id": "stale-1-a"}), (other, {"version": "9.9"})):
            folder.mkdir()
            (folder / "cluster.json").write_text(json.dumps(own | change))
        assert wait_until(lambda: bool(server.get("clusters")["unreadable"]))
        reply = server.get("clusters")
        assert "stale-1-a" not in [cluster["id"] for cluster in reply["clusters"]]
        assert [(each["id"], each["version"]) for each in reply["unreadable"]] == [("other-1-a", "9.9")]
    finally:
        for folder in (stale, other):
            (folder / "cluster.json").unlink()
            folder.rmdir()


def test_busy_kernel_is_interrupted_and_ended_from_outside(server: Server) -> None:
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local --backend none --name busy").check()
        cluster_id = server.cluster("busy")["id"]
        request = notebook.client.execute("%%distributed\nimport time; time.sleep(1000)")
        assert wait_until(lambda: server.states("busy") == ["running", "running"])
        server.post(f"clusters/{cluster_id}/interrupt")
        assert "KeyboardInterrupt" in notebook.outcome(request, timeout=60).error
        assert notebook.run("%%distributed\nprint('here')").check().lines == ["ranks 0-1 │ here"]
        pids = [rank["pid"] for rank in server.cluster("busy")["ranks"]]
        server.post(f"clusters/{cluster_id}/reset")
        assert wait_until(
            lambda: [rank["pid"] for rank in server.cluster("busy").get("ranks", [])] not in ([], pids), seconds=30
        )
        assert notebook.run("%%distributed\nprint('again')").check().lines == [
            "ranks 0-1 │ again",
            "all ranks were started again, with fresh variables: it was requested in the side panel",
        ]
        server.post(f"clusters/{server.cluster('busy')['id']}/stop")
        assert wait_until(lambda: server.cluster("busy") == {})
        assert "was ended from the side panel" in notebook.run("%%distributed\n1").error


def test_stopped_kernel_does_not_block(server: Server) -> None:
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local --backend none --name stopped").check()
        cluster_id = server.cluster("stopped")["id"]
        notebook.run("%%distributed --noblock\nimport time; time.sleep(1000)").check()
        assert wait_until(lambda: server.states("stopped") == ["running", "running"])
        os.kill(notebook.pid, signal.SIGSTOP)
        try:
            assert server.post(f"clusters/{cluster_id}/interrupt") == {"done": "done by the server"}
            assert wait_until(lambda: server.states("stopped") == ["idle", "idle"])
        finally:
            os.kill(notebook.pid, signal.SIGCONT)
        assert "KeyboardInterrupt" in notebook.run("%dist_wait").error


def test_persistent_cluster_of_a_killed_kernel_stays_usable(server: Server) -> None:
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local --name orphan --keep").check()
        notebook.run("%%distributed --noblock\nif rank: import time; time.sleep(1000)\ndist.barrier()").check()
        os.kill(notebook.pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(notebook.pid)], timeout=60)
    assert wait_until(lambda: "in collective" in server.states("orphan"))
    cluster_id = server.cluster("orphan")["id"]
    assert not server.cluster("orphan")["held"]
    assert server.post(f"clusters/{cluster_id}/interrupt") == {"done": "done by the server"}
    assert wait_until(lambda: server.states("orphan") == ["idle", "idle"])
    again = Cluster.attach("orphan")
    assert again.run("x = torch.ones(1); dist.all_reduce(x); x.item()").results == {0: 2.0, 1: 2.0}
    again.run("if rank: import time; time.sleep(1000)\ndist.barrier()", block=False)
    again.detach()
    assert wait_until(lambda: "in collective" in server.states("orphan"))  # of a group that was formed again since
    assert server.post(f"clusters/{cluster_id}/interrupt") == {"done": "done by the server"}
    assert wait_until(lambda: server.states("orphan") == ["idle", "idle"])
    status, text = refused(server, f"clusters/{cluster_id}/reset", data=b"", headers=AUTH)
    assert status == 409
    assert text.endswith(
        "does not respond, and only the process that holds a cluster can restart its ranks; stop it here, or attach "
        'a notebook to it with %dist_attach"}'
    )
    assert server.post(f"clusters/{cluster_id}/stop") == {"done": "done by the server"}
    assert wait_until(lambda: server.cluster("orphan") == {})


def test_server_unpickles_nothing() -> None:
    """A client that reaches the server's sockets must not be able to run code in it."""
    code = "import sys, jupyter_disttrain.server.handlers, jupyter_disttrain.server.clusters; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in modules
    assert "jupyter_disttrain.notebook" not in modules
    for path in Path(server_package.__file__).parent.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        imports = " ".join(ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
        assert "pickle" not in imports, path
