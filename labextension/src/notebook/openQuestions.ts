/**
 * The input line of a question that a rank asks no more.
 *
 * Covers: removing it when its cell has ended, or when the cell asks the next
 * question.
 * Does not cover: showing and answering it, which JupyterLab does.
 *
 * JupyterLab keeps the line of a question that the kernel has withdrawn; what
 * is typed there would answer the next one.
 */

import { CodeCell } from '@jupyterlab/cells';
import { NotebookActions } from '@jupyterlab/notebook';
import type { Widget } from '@lumino/widgets';

const LINE = 'jp-OutputArea-stdin-item';
const ANSWERED = 'jp-OutputArea-stdin-hiding';

/** Remove the lines among the outputs that were not answered. */
export function removeOpenLines(outputs: readonly Widget[]): void {
  outputs
    .filter(each => each.hasClass(LINE) && !each.hasClass(ANSWERED))
    .forEach(each => {
      each.dispose();
    });
}

/** Remove such lines in every notebook from now on. */
export function watchQuestions(): void {
  const watched = new WeakSet<CodeCell['outputArea']>();
  NotebookActions.executionScheduled.connect((_, { cell }) => {
    if (cell instanceof CodeCell && !watched.has(cell.outputArea)) {
      watched.add(cell.outputArea);
      // The new line is not among the outputs yet.
      cell.outputArea.inputRequested.connect(area => {
        removeOpenLines(area.widgets);
      });
    }
  });
  NotebookActions.executed.connect((_, { cell }) => {
    if (cell instanceof CodeCell) {
      removeOpenLines(cell.outputArea.widgets);
    }
  });
}
