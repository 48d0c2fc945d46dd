"""Fail the run if a test was skipped or deselected.

Covers: skipped tests and modules, and tests deselected by ``-m`` or ``-k``, when ``DISTTRAIN_SKIPS_FAIL=1``
(``.ci/run`` sets it). A skip whose reason contains "GPU" stays a skip, since most machines have none.
Does not cover: expected failures (xfail), which did run.

Loaded by ``make`` with ``-p tests.support.strict_skips``. With ``pytest -n 2`` only the workers record which tests
were skipped; they send that when they end.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ALLOWED_REASON = "GPU"


class StrictSkips:
    """Collect skipped and deselected tests, and fail the session for them."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._add(f"{item.nodeid}: deselected")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = self.left_out
        elif self.left_out and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for line in getattr(node, "workeroutput", {}).get("left_out", []):
            self._add(line)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.section("left out, so this run fails (DISTTRAIN_SKIPS_FAIL=1)", red=True, bold=True)
            for line in self.left_out:
                terminalreporter.write_line(line)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if ALLOWED_REASON not in reason:
            self._add(f"{report.nodeid}: {reason}")

    def _add(self, line: str) -> None:
        if line not in self.left_out:
            self.left_out.append(line)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("DISTTRAIN_SKIPS_FAIL") == "1":
        config.pluginmanager.register(StrictSkips(), "strict-skips")
