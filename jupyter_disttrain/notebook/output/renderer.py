"""Show the output of a cell's ranks while they print it.

Covers: drawing a transcript on the cell's output, few updates for much output, the progress line, asking the user.
Does not cover: merging (``transcript``), errors (``errors``), widgets of ranks (``comms``).

The output is a series of displays that are updated in place, so that a front end, nbclient and nbconvert all end with
the same. Each holds some hundred lines as plain text, in which JupyterLab, VS Code and nbconvert show the colours. The
data also includes which ranks printed which line, from which JupyterLab makes a tab per rank
(labextension/src/notebook/rankTabs.ts).
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...client.cells.events import Cleared, CommSent, Died, Displayed, Elided, LogFailed, Printed, Replied
from ...client.cells.open_questions import prompt_of
from ...protocol.ranks import label_ranks, short_label, size_text
from .comms import WidgetBars
from .rows import TAIL_ROWS, Line, Row, Section
from .transcript import Transcript, merge_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ...client.cells.cell_run import CellRun
    from ...client.cells.events import Asked, Event
    from .displays import Sink

# Grey, not "faint", which JupyterLab shows as plain text. Blue is readable in a light and in a dark theme, and is yet
# quieter than the text.
QUIET, RED, RESET = "\x1b[34m", "\x1b[31m", "\x1b[0m"
RANKS_MIME = "application/vnd.disttrain.ranks+json"
SHORTEST_PAUSE = 0.05  # seconds between two draws
PAUSE_PER_COST = 4.0  # a draw that took long is followed by a pause this many times as long
MOST_EARLIER = 1000  # displays of earlier cells that a later one can update
_earlier: dict[tuple[int, str], tuple[str, dict[str, Any]]] = {}  # by rank and id: the sink's name, the ranks


class Screen:
    """Listen to a cell and draw it.

    Parameters
    ----------
    sink
        Where it is drawn.
    ranks
        The ranks of the cell. A single rank is not labelled, until late output of another rank is shown too.
    world_size
        The number of ranks in the cluster.
    log_folder
        Named where not everything is shown.
    max_lines, max_bytes
        The bound on what is shown.
    progress_after_s
        Show which ranks still run after this many seconds.
    forward_comm
        Receives widgets' messages.
    below_view
        Something stands above in the same output that must stay.
    """

    def __init__(  # noqa: PLR0913
        self,
        sink: Sink,
        ranks: Sequence[int],
        world_size: int,
        log_folder: str,
        *,
        max_lines: int,
        max_bytes: int,
        progress_after_s: float,
        forward_comm: Callable[[CommSent], None],
        below_view: bool = False,
    ) -> None:
        self._sink = sink
        self._labelled = len(ranks) > 1
        self._ranks = sorted(ranks)  # and those of other ranks that have late output here
        self._width = len(label_ranks(range(world_size)))
        self._label_width = self._width  # width of the labels on the screen: those of scattered ranks are longer
        self._labels: dict[tuple[frozenset[int], str], tuple[str, int]] = {}  # cached, because lines are many
        self._log_folder = log_folder
        self._forward_comm = forward_comm
        self._widget_bars = WidgetBars()
        self._bounds = max_lines, max_bytes
        self._lock = threading.RLock()  # output after the end is handled on another thread
        self._timer: threading.Timer | None = None
        self._below_view = below_view
        self._transcript = Transcript(max_lines, max_bytes)
        self._notes: list[str] = []
        self._progress: list[str] = []
        self._progress_at = time.monotonic() + progress_after_s
        self._names: list[str] = []  # the sink's names of the places on the screen, from top to bottom
        self._texts: list[str | None] = []  # what is drawn there; None: a display
        self._drawn: list[Section] = []  # what is at the places that are in use
        self._carrier: Section | None = None  # section last drawn with the lines below everything
        self._changed = False
        self._due = 0.0

    # Listener of the cell

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        """Handle events, and draw if a draw is due."""
        events = sorted(events, key=lambda event: event.rank)  # events of one batch are handled in rank order
        with self._lock:
            for event in events:
                self._take(event)
        for event in events:
            if isinstance(event, (Replied, Died)):
                self._note_failure(event.rank, run)
        now = time.monotonic()
        if run.state.done and run.coming_back:
            self._set_coming_back(run)
        elif now >= self._progress_at and not run.done:
            self._progress_at = now + 1.0
            self._set_progress(run)
        if self._changed and now >= self._due and not (run.done and not run.coming_back):
            with self._lock:
                self._update()

    def on_end(self, run: CellRun) -> None:
        """Draw the final state."""
        with self._lock:
            if not run.failures and not run.timed_out:
                self._notes += run.notes  # else the error includes them
            self._complete()
            self._below_view = False

    def before_question(self, hint: str) -> None:
        """Draw what was shown so far; later output is shown below the answer."""
        with self._lock:
            self._notes += [f"{QUIET}{hint}{RESET}"] if hint else []
            self._complete()
            self._below_view = True  # the output holds the questions and answers too, and must not be cleared

    def ask(self, question: Asked) -> str:
        """Ask the user below what was shown so far."""
        return self._sink.ask(prompt_of(question), is_password=question.record.is_password)

    def _complete(self) -> None:
        """Draw what was shown so far as it stays; later output is shown below it, as a transcript of its own."""
        displays = self._transcript.displays()
        self._transcript.close()
        self._progress = []
        self._fit_labels(self._transcript.lines, self._width)
        self._finish()
        for key, section in displays.items():
            if section.place >= 0 and section in self._transcript.sections:
                _earlier[key] = self._names[section.place], self._ranks_of(section)
        while len(_earlier) > MOST_EARLIER:
            del _earlier[next(iter(_earlier))]
        self._transcript, self._carrier, self._notes = Transcript(*self._bounds), None, []
        self._names, self._texts, self._drawn = [], [], []

    def on_late(self, event: Event) -> Event | None:
        """Show output after the end in the same cell output; if that was removed, label it for the next cell."""
        gone = self._sink.where_it_was()
        if gone:
            if not isinstance(event, Printed):
                return event
            return replace(event, text="".join(f"{gone}: {line}" for line in event.text.splitlines(keepends=True)))
        with self._lock:
            self._take(event)
            if self._timer is None:
                self._timer = threading.Timer(max(0.0, self._due - time.monotonic()), self._draw_late)
                self._timer.daemon = True
                self._timer.start()
        return None

    def _draw_late(self) -> None:
        with self._lock:
            self._timer = None
            self._update()

    def _finish(self) -> None:
        count = len(self._visible())
        if not self._below_view and count < len(self._names):
            # Places that are no longer in use would be empty boxes.
            self._sink.clear(wait=count > 0)
            self._names.clear()
            self._texts.clear()
            self._drawn.clear()
        self._draw()
        for name in self._names[len(self._drawn) :]:
            self._sink.show(name, {"text/plain": ""}, {})  # removing them would remove the view, too

    def _take(self, event: Event) -> None:
        self._changed = True
        if event.rank not in self._ranks:  # late output of an earlier cell of that rank
            self._ranks = sorted([*self._ranks, event.rank])
            self._labelled = True
            self._mark_all()
        transcript = self._transcript
        if isinstance(event, Printed):
            transcript.add_text(event.rank, event.stream, event.text)
        elif isinstance(event, Displayed):
            transcript.show(event.rank, event.data, event.metadata, event.display_id, event.kind)
        elif isinstance(event, Cleared):
            transcript.clear(event.rank, wait=event.wait)
        elif isinstance(event, Elided):
            transcript.add_unsent(event.rank, event.record)
        elif isinstance(event, LogFailed):
            record = event.record
            self._notes.append(
                f"rank {event.rank} on {record.host} can't write its log {record.log_path}: {record.reason}; "
                "its output is still shown here; free the disk, then %dist_reset"
            )
        elif isinstance(event, CommSent):
            self._widget_bars.take(event)
            self._forward_comm(event)

    def _note_failure(self, rank: int, run: CellRun) -> None:
        """Report a failure at once while others still run; at the end the exception lists all of them."""
        running, failure = run.state.running, run.state.failures.get(rank)
        if failure is None or not running:
            return
        self._progress = [f"{RED}{failure.headline}{RESET}{QUIET} · {label_ranks(running)} still running{RESET}"]
        self._progress_at = time.monotonic() + 1.0

    def _set_coming_back(self, run: CellRun) -> None:
        """Show the error and the current recovery step until the prompt returns."""
        progress = [*_headline(run), f"{QUIET}{run.coming_back} …{RESET}"]
        self._changed = self._changed or progress != self._progress
        self._progress = progress

    def _set_progress(self, run: CellRun) -> None:
        """Show which ranks still run; a failure that was reported stays in front of it.

        The progress of the loop is left out where a progress bar shows it already.
        """
        running, failed = run.state.running, run.state.failures
        done = set(run.ranks) - running - failed.keys()
        parts = [f"{time.time() - run.started_s:.0f} s", "" if self._has_bar() else run.progress]
        parts += [f"{label_ranks(running)} running"]
        parts += [f"{label_ranks(done)} done"] if done else []
        parts += [f"{label_ranks(failed)} failed"] if failed else []
        self._progress = [*_headline(run), f"{QUIET}{' · '.join(filter(None, parts))}{RESET}"]
        hang = run.hang
        if hang:
            waits = "ranks are waiting; an interrupt ends the wait and keeps all variables:"
            self._progress.append("since the interrupt:" if run.interrupts else waits)
            self._progress += [f"  {line}" for line in hang]
        else:
            self._progress += [f"{RED}{remark}{RESET}" for remark in run.remarks]
        if run.interrupts:
            advice = "interrupt sent; a second one aborts what ranks wait for, a third one returns control"
            self._progress.append(f"{QUIET}{advice}{RESET}")
        self._changed = True

    def _has_bar(self) -> bool:
        return self._transcript.has_bar or self._widget_bars.has_bar

    # Drawing

    def _update(self) -> None:
        """Merge what was printed since the last draw, draw it, and determine when the next draw is due."""
        start = time.monotonic()
        self._draw_live()
        now = time.monotonic()
        self._due = now + max(SHORTEST_PAUSE, PAUSE_PER_COST * (now - start))

    def _draw_live(self) -> None:
        self._transcript.arrange()
        self._transcript.divide()
        self._draw()

    def _draw(self) -> None:
        self._changed = False
        dirty = (line for section in self._transcript.sections if section.is_dirty for line in section.lines)
        self._fit_labels(dirty, self._label_width)
        visible = self._visible()
        for place, section in enumerate(visible):
            if section.is_dirty or place >= len(self._drawn) or self._drawn[place] is not section:
                self._draw_section(section, place)
        for key, (data, metadata) in self._transcript.of_earlier_cells.items():
            if key in _earlier:
                name, of_ranks = _earlier[key]
                self._sink.show(name, data, metadata | of_ranks)
        self._transcript.of_earlier_cells.clear()
        for place in range(len(visible), len(self._drawn)):
            self._sink.show(self._names[place], {}, {})
            self._texts[place] = None
        self._drawn = visible

    def _visible(self) -> list[Section]:
        """Return the visible sections; the last one carries the lines below everything."""
        visible = [section for section in self._transcript.sections if self._can_see(section)]
        carrier = None
        if self._transcript.hidden or self._notes or self._progress:
            carrier = visible[-1] if visible else None
            if carrier is None or carrier.data is not None:
                carrier = Section()
                visible.append(carrier)
        for section in (carrier, self._carrier):
            if section is not None:
                section.is_dirty = True  # the lines it carries have changed
        self._carrier = carrier
        return visible

    def _can_see(self, section: Section) -> bool:
        return bool(section.data) or any(self._labelled or line.row.stream != "label" for line in section.lines)

    def _mark_all(self) -> None:
        """Draw every section again."""
        for section in self._transcript.sections:
            section.is_dirty = True

    def _fit_labels(self, lines: Iterable[Line], width: int) -> None:
        """Make the column of labels as wide as the longest one of these lines, at least ``width``."""
        if not self._labelled:
            return
        width = max([width, *(len(short_label(ranks)) for ranks in {line.ranks for line in lines})])
        if width != self._label_width:
            self._label_width = width
            self._labels.clear()
            self._mark_all()

    def _draw_section(self, section: Section, place: int) -> None:
        section.is_dirty, section.place = False, place
        data, metadata = section.data, section.metadata
        text = None
        if data is None:
            is_carrier = section is self._carrier
            lines, of_lines = self._lines([*section.lines, *(self._tail() if is_carrier else ())])
            text = "\n".join([*lines, *([*self._red_notes(), *self._progress] if is_carrier else ())])
            if place < len(self._texts) and self._texts[place] == text:
                return  # e.g. an unchanged progress line
            data = {"text/plain": text}
            if self._labelled:
                data[RANKS_MIME] = {"version": 2, "ranks": self._ranks, **of_lines}
        else:
            metadata = metadata | self._ranks_of(section)
        if place < len(self._names):
            self._sink.show(self._names[place], data, metadata)
            self._texts[place] = text
        else:
            self._names.append(self._sink.show(None, data, metadata))
            self._texts.append(text)

    def _ranks_of(self, display: Section) -> dict[str, Any]:
        """Return the metadata by which JupyterLab finds the ranks of a display."""
        return {"disttrain": {"ranks": sorted(display.ranks)}} if self._labelled else {}

    def _lines(self, shown: Iterable[Line]) -> tuple[list[str], dict[str, Any]]:
        """Return lines, and their ranks.

        ``groups`` are sets of ranks. ``lines`` are runs of lines: how many, by which group, after how many characters
        of label. The last lines, which no run covers, are for all ranks. A label above a display belongs to no rank.
        """
        texts: list[str] = []
        groups: dict[frozenset[int], int] = {}
        runs: list[list[int]] = []
        for line in shown:
            row = line.row
            if not self._labelled and row.stream == "label":
                continue
            label, cut = self._label(line.ranks, row.stream) if self._labelled and row.stream != "note" else ("", 0)
            texts.append(self._line(label, row.stream, row.text))
            ranks = frozenset[int]() if row.stream == "label" else line.ranks
            run = [1 + row.text.count("\n"), groups.setdefault(ranks, len(groups)), cut]
            if runs and runs[-1][1:] == run[1:]:
                runs[-1][0] += run[0]
            else:
                runs.append(run)
        return texts, {"groups": [sorted(ranks) for ranks in groups], "lines": runs}

    def _line(self, label: str, stream: str, text: str) -> str:
        if "\x1b" in text:
            text += RESET
        if not self._labelled:
            return f"{RED}{text}{RESET}" if stream == "stderr" and "\x1b" not in text else text
        if "\n" in text:
            text = text.replace("\n", "\n" + self._label(frozenset(), stream)[0])
        return label + text

    def _label(self, ranks: frozenset[int], stream: str) -> tuple[str, int]:
        """Return the label of a line, and how many characters of it are left out where the rank is known."""
        known = self._labels.get((ranks, stream))
        if known is None:
            name = f"{QUIET}{short_label(ranks) if ranks else '':<{self._label_width}} "
            label = f"{name}{RESET}{RED}┃{RESET} " if stream == "stderr" else f"{name}│{RESET} "
            known = self._labels[ranks, stream] = label, len(name if stream == "stderr" else label)
        return known

    def _tail(self) -> list[Line]:
        """Return lines for the lines that are not shown: their number, and the last of them."""
        hidden = self._transcript.hidden
        if not hidden:
            return []
        logs = f"rank{hidden[0].rank}.log" if len(hidden) == 1 else "rank*.log"
        lines = sum(output.hidden_lines for output in hidden)
        size = f"{lines:,} more lines ({size_text(sum(output.hidden_bytes for output in hidden))})"
        text = f"{QUIET}… {size}; everything is in {self._log_folder}/{logs}; the last ones:"
        each = max(1, TAIL_ROWS // len(hidden))
        tails = {output.rank: list(output.tail)[-each:] for output in hidden}
        return [Line([Row(text, "note")], frozenset(self._ranks)), *merge_rows(tails)]

    def _red_notes(self) -> list[str]:
        return [f"{RED}{note}{RESET}" for note in self._notes]


def _headline(run: CellRun) -> list[str]:
    """Return the first failure, if there is one."""
    return [f"{RED}{failure.headline}{RESET}" for failure in run.failures[:1]]
