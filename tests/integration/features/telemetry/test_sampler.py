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
"""
TRAIN = """
until = time.monotonic() + 3
while time.monotonic() < until: time.sleep(0.001)  # in every look it sleeps, and since the last look it has run
len(readings)
"""
STAND = """
readings.clear()
time.sleep(3)
len(readings)
"""


def test_long_collective_record_is_read_rarely_while_training() -> None:
    with Cluster(n=1, launcher="local", sample_s=0.2, name="seldom") as cluster:
        cluster.run(LONG_RECORD)
        assert 1 <= cluster.run(TRAIN).results[0] < 5  # without a bound, 11 of 12 samples would read it
        assert cluster.run(STAND).results[0] > 5  # a waiting rank loses nothing by it
