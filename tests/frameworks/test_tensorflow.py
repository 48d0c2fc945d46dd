"""TensorFlow on ranks that have TF_CONFIG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_disttrain import Cluster
from jupyter_disttrain.config.cluster import parse_roles

from ..integration.features.scripts.test_scripts import lines_of, write

if TYPE_CHECKING:
    from pathlib import Path

PARAMETER_SERVER = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    )
"""
COORDINATE = """
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    variable = tf.Variable(0.0)
@tf.function
def add():
    variable.assign_add(1.0)
    return variable.read_value()
for _ in range(5):
    coordinator.schedule(add)
coordinator.join()
variable.numpy().item(), variable.device
"""
SCRIPT = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(2.0)))
print(f"sum {float(strategy.experimental_local_results(total)[0])}")
"""


def test_workers_and_parameter_servers() -> None:
    with Cluster(tf_roles=parse_roles("chief=1,worker=2,ps=1")) as cluster:
        configs = cluster.run("import json, os; json.loads(os.environ['TF_CONFIG'])").results
        assert [configs[rank]["task"] for rank in range(4)] == [
            {"type": "chief", "index": 0},
            {"type": "worker", "index": 0},
            {"type": "worker", "index": 1},
            {"type": "ps", "index": 0},
        ]
        addresses = [address for task in configs[0]["cluster"].values() for address in task]
        assert len(set(addresses)) == 4
        cluster.run(PARAMETER_SERVER)
        (total, device) = cluster.run(COORDINATE, 0).results[0]
        assert (total, "job:ps" in device) == (5.0, True)
        assert cluster.run("dist.get_world_size()").results == dict.fromkeys(range(4), 4)


def test_script_runs_in_fresh_processes_beside_the_session(folder: Path) -> None:
    script = write(folder, "mirrored.py", SCRIPT)
    with Cluster(tf_roles=parse_roles("worker=2"), launcher="local") as cluster:
        for _ in range(2):
            assert lines_of(cluster.scripts.run(script)) == {0: ["sum 4.0"], 1: ["sum 4.0"]}
