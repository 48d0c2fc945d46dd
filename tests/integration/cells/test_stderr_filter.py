"""Messages of libraries that the stderr filter drops or shortens."""

from __future__ import annotations

import subprocess
import sys

from jupyter_disttrain.rank.nanny.stderr_filter import without_noise

SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
CLIENT = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
print("connected", flush=True)
sys.stdin.readline()
try:
    store.get("what nobody sets")
except dist.DistNetworkError:
    sys.stderr.write("what the person wrote\\n")
"""


def test_lost_store_is_one_line_without_c_frames() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
        with subprocess.Popen([sys.executable, "-c", CLIENT, port], **pipes) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"connected\n"
            server.kill()
            server.wait()
            _, text = client.communicate(b"\n", timeout=60)
    assert b"\nframe #0:" in text
    first, *rest = without_noise(text).splitlines()
    assert b"Did the remote server shutdown or crash?" in first
    assert rest == [b"what the person wrote"]
