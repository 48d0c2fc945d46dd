"""The loggers of training libraries, in real training by those libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    """Two ranks with the libraries imported."""
    with Cluster(n=2, name="adapters") as cluster:
        yield cluster


def losses(ranks: Cluster, name: str, logging: tuple[int, ...] = (0, 1)) -> list[list[float]]:
    """Return the logged losses by step and rank; check that exactly these ranks logged every step."""
    found = ranks.metrics.gather(name)
    assert found.ranks == logging
    assert not found.is_missing.any()
    return [[float(value) for value in step] for step in found.values]


def test_lightning(ranks: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run = ranks.run(f"""
import lightning
from jupyter_disttrain.integrations import LightningLogger

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.losses = []
    def training_step(self, batch, _index):
        loss = self.layer(batch).pow(2).mean()
        self.losses.append(loss.item())
        self.log("lightning_loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(rank)
module = Module()
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_steps={STEPS}, log_every_n_steps=1, logger=LightningLogger(),
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir={str(tmp_path)!r},
)
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
module.losses
""")
    expected = zip(run.results[0], run.results[1], strict=True)
    assert losses(ranks, "lightning_loss") == [pytest.approx(step) for step in expected]


def test_transformers(ranks: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = ranks.run(f"""
from transformers import Trainer, TrainingArguments
from jupyter_disttrain.integrations import TransformersCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        return {{"loss": (self.layer(x) - labels).pow(2).mean()}}

torch.manual_seed(0)
data = [{{"x": torch.randn(4), "labels": torch.ones(1)}} for _ in range(64)]
arguments = TrainingArguments(
    output_dir={str(tmp_path)!r}, max_steps={STEPS}, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
    per_device_train_batch_size=4, disable_tqdm=True,
)
trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[TransformersCallback()])
trainer.train()
[each["loss"] for each in trainer.state.log_history if "loss" in each]
""")
    assert run.results[0] == run.results[1]
    assert losses(ranks, "loss") == [[each, each] for each in run.results[0]]
    assert len(run.results[0]) == STEPS


def test_accelerate(ranks: Cluster) -> None:
    pytest.importorskip("accelerate")
    ranks.run(f"""
from accelerate import Accelerator
from jupyter_disttrain.integrations import AccelerateTracker

accelerator = Accelerator(cpu=True, log_with=AccelerateTracker())
accelerator.init_trackers("a project", config={{"lr": 0.1}})
for step in range({STEPS}):
    accelerator.log({{"accelerate_loss": 10 * step + rank, "note": "no number"}}, step=step)
accelerator.end_training()
""")
    # On ranks other than 0 accelerate calls no tracker.
    assert losses(ranks, "accelerate_loss", (0,)) == [[10 * step] for step in range(STEPS)]
    assert ranks.run(SUM).results == {0: 2.0, 1: 2.0}


SUM = "total = torch.ones(()); dist.all_reduce(total); total.item()"


def test_logger_in_a_script_logs_nothing() -> None:
    pytest.importorskip("lightning")
    from jupyter_disttrain.integrations import LightningLogger  # noqa: PLC0415

    LightningLogger().log_metrics({"loss": 1.0}, step=0)
