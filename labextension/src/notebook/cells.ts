/**
 * Edit and run cells of a notebook.
 *
 * Covers: a new cell with given code, adding the magic to a cell.
 * Does not cover: which notebook, when, dialogs before (commands).
 */

import type { ISessionContextDialogs } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { ITranslator } from '@jupyterlab/translation';

import { RUN_ON_ALL_RANKS, selectsRanks } from './magics';

/** Services that running a cell needs. */
export interface IRunServices {
  translator: ITranslator;
  /** Dialogs for a notebook without a kernel; null uses the default ones. */
  sessionDialogs: ISessionContextDialogs | null;
}

/**
 * Whether the active cell can run on all ranks: a code cell that may be edited,
 * or that has a magic of ranks.
 */
export function canRunOnAllRanks(panel: NotebookPanel): boolean {
  const cell = panel.content.activeCell?.model;
  if (cell?.type !== 'code') {
    return false;
  }
  return (
    selectsRanks(cell.sharedModel.getSource()) ||
    (canEdit(panel) && cell.getMetadata('editable') !== false)
  );
}

/** Whether cells can be added to the notebook. */
export function canEdit(panel: NotebookPanel): boolean {
  return panel.model !== null && !panel.model.readOnly;
}

/** Run the active cell on all ranks, with the magic as its first line. */
export async function runActiveCellOnAllRanks(
  panel: NotebookPanel,
  services: IRunServices
): Promise<void> {
  const cell = panel.content.activeCell?.model;
  if (cell === undefined || !canRunOnAllRanks(panel)) {
    return;
  }
  if (!selectsRanks(cell.sharedModel.getSource())) {
    // An insertion keeps the cursor and the undo history, a new source does not.
    cell.sharedModel.updateSource(0, 0, `${RUN_ON_ALL_RANKS}\n`);
  }
  await runActiveCell(panel, services);
}

/**
 * Add a code cell below the active one and run it, so that the notebook records
 * what was done.
 */
export async function runInNewCell(
  panel: NotebookPanel,
  source: string,
  services: IRunServices
): Promise<void> {
  const notebook = panel.content;
  if (notebook.model === null || !canEdit(panel)) {
    return;
  }
  // Without an active cell the index is -1, and the new cell is the first.
  const index = notebook.activeCellIndex + 1;
  notebook.model.sharedModel.insertCell(index, {
    cell_type: 'code',
    metadata: { trusted: true },
    source
  });
  notebook.activeCellIndex = index;
  await runActiveCell(panel, services);
}

async function runActiveCell(
  panel: NotebookPanel,
  { sessionDialogs, translator }: IRunServices
): Promise<void> {
  panel.content.deselectAll(); // JupyterLab runs every selected cell
  await NotebookActions.run(
    panel.content,
    panel.sessionContext,
    sessionDialogs ?? undefined,
    translator
  );
}
