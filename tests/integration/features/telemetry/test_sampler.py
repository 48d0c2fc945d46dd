"""The cost of sampling a rank."""

from __future__ import annotations

from jupyter_disttrain import Cluster

LONG_RECORD = """
import time
from jupyter_disttrain.features.telemetry.rank import sampler
read, readings = sampler.pending_collective, []
def read_slowly():
    readings.append(time.monotonic())
    begun = time.thread_time()
    while time.thread_time() - begun < 0.05: pass  # as torch's record of thousands of collectives takes
    return read()
sampler.pending_collective = read_slowly
import queue, threading
items = queue.SimpleQueue()  # its get() sleeps in C code as the wait() of a collective does
"""
TRAIN = """
until = time.monotonic() + 3
def feed():
    while time.monotonic() < until + 1:
        time.sleep(0.001)
        items.put(None)
feeder = threading.Thread(target=feed)
feeder.start()
while time.monotonic() < until: items.get()  # in every look it sleeps, and since the last look it has run
feeder.join()
len(readings)
"""
STAND = """
readings.clear()
while not items.empty(): items.get()
threading.Timer(3, items.put, [None]).start()
items.get()
len(readings)
"""


def test_long_collective_record_is_read_rarely_while_training() -> None:
    with Cluster(n=1, launcher="local", sample_s=0.2, name="seldom") as cluster:
        cluster.run(LONG_RECORD)
        assert 1 <= cluster.run(TRAIN).results[0] < 5  # without a bound, 11 of 12 samples would read it
        assert cluster.run(STAND).results[0] > 5  # a waiting rank loses nothing by it
