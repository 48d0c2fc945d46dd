"""Log metrics from training libraries through ``log_metrics``.

Covers: Lightning, transformers, accelerate; one line each, the same on ranks and in a script, where nothing is logged.
Does not cover: keeping values (``features.telemetry.metrics_table``).

Each class is created at its first use, because it is derived from the library's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NAME = "jupyter_disttrain"


def log_metrics(step: int | None = None, **values: Any) -> None:
    """Log values of this rank, as in a cell; do nothing in a script under torchrun, where no client collects them."""
    from .features.telemetry.rank.log_metrics import current  # noqa: PLC0415  (a script that never logs pays nothing)

    log = current()
    if log is not None:
        log.log_metrics(step, **values)


def _log_numbers(step: int | None, values: Mapping[str, Any]) -> None:
    """Log those values that are numbers: libraries log texts and dicts beside them."""
    from .features.telemetry.rank.log_metrics import current  # noqa: PLC0415

    log = current()
    numbers = {
        name: value
        for name, value in values.items()
        if isinstance(value, (bool, int, float)) or (hasattr(value, "numel") and value.numel() == 1)
    }
    if log is not None and numbers:
        log.log(step, numbers)


def _lightning_logger() -> type[Any]:
    try:
        from lightning.pytorch.loggers.logger import Logger  # noqa: PLC0415
    except ImportError:
        from pytorch_lightning.loggers.logger import Logger  # noqa: PLC0415  (the same under its earlier name)

    class LightningLogger(Logger):
        """``Trainer(logger=LightningLogger())``: logs a module's metrics, on every rank."""

        name = _NAME
        version = "0"

        def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            """Log the module's metrics."""
            _log_numbers(step, metrics)

        def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
            """Ignore hyperparameters: they are no metrics."""

    return LightningLogger


def _transformers_callback() -> type[Any]:
    from transformers import TrainerCallback  # noqa: PLC0415

    class TransformersCallback(TrainerCallback):
        """``Trainer(..., callbacks=[TransformersCallback()])``: logs the trainer's metrics, on every rank."""

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_options: Any) -> None:
            """Log the trainer's metrics."""
            _log_numbers(state.global_step, logs or {})

    return TransformersCallback


def _accelerate_tracker() -> type[Any]:
    from accelerate.tracking import GeneralTracker  # noqa: PLC0415

    class AccelerateTracker(GeneralTracker):
        """``Accelerator(log_with=AccelerateTracker())``: logs the values of ``accelerator.log``, of rank 0 only."""

        name = _NAME
        requires_logging_directory = False
        main_process_only = False

        @property
        def tracker(self) -> None:
            """None: there is no underlying tracker."""

        def store_init_configuration(self, values: Any) -> None:
            """Ignore the configuration: it is no metric."""

        def log(self, values: Mapping[str, Any], step: int | None = None, **_options: Any) -> None:
            """Log values."""
            _log_numbers(step, values)

    return AccelerateTracker


_MADE: dict[str, Callable[[], type[Any]]] = {
    "LightningLogger": _lightning_logger,
    "TransformersCallback": _transformers_callback,
    "AccelerateTracker": _accelerate_tracker,
}


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _MADE[name]()
    return made
