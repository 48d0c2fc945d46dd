"""What a rank's look at itself costs the training, and what it survives."""

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


def test_a_long_record_of_collectives_is_read_seldom_while_training_goes_on() -> None:
    with Cluster(n=1, launcher="local", sample_s=0.2, name="seldom") as cluster:
        cluster.run(LONG_RECORD)
        assert 1 <= cluster.run(TRAIN).results[0] < 5  # 11 of 12 looks would be without a bound
        assert cluster.run(STAND).results[0] > 5  # who stands loses nothing by it
