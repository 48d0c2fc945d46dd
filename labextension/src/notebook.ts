/**
 * Edit and run cells of a notebook.
 *
 * Covers: a new cell with given code, the magic on top of a cell.
 * Does not cover: which notebook, when, and what to ask first (commands).
 */

import type { ISessionContextDialogs } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { ITranslator } from '@jupyterlab/translation';

/** The magic that ships a cell to every rank. */
export const RUN_ON_ALL_RANKS = '%%distributed';

// A cell that names its ranks keeps them: `%%distributed -r 0`, `%%rank [0]`.
const SAYS_WHERE_IT_RUNS = /^\s*%%(distributed|rank)(\s|$)/;

/**
 * What running a cell needs beside the notebook.
 */
export interface IRunServices {
  translator: ITranslator;
  /** Asks for a kernel where the notebook has none; the default asks too. */
  sessionDialogs: ISessionContextDialogs | null;
}

/**
 * Whether the active cell can be given the magic: a code cell that may be
 * edited, or one that has the magic already.
 */
export function canRunOnAllRanks(panel: NotebookPanel): boolean {
  const cell = panel.content.activeCell?.model;
  if (cell?.type !== 'code') {
    return false;
  }
  return (
    SAYS_WHERE_IT_RUNS.test(cell.sharedModel.getSource()) ||
    (canEdit(panel) && cell.getMetadata('editable') !== false)
  );
}

/**
 * Whether cells can be added to the notebook.
 */
export function canEdit(panel: NotebookPanel): boolean {
  return panel.model !== null && !panel.model.readOnly;
}

/**
 * Run the active cell on all ranks, with the magic as its first line.
 */
export async function runActiveCellOnAllRanks(
  panel: NotebookPanel,
  services: IRunServices
): Promise<void> {
  const cell = panel.content.activeCell?.model;
  if (cell === undefined || !canRunOnAllRanks(panel)) {
    return;
  }
  if (!SAYS_WHERE_IT_RUNS.test(cell.sharedModel.getSource())) {
    // An insertion, not a new source: the cursor and the undo history stay.
    cell.sharedModel.updateSource(0, 0, `${RUN_ON_ALL_RANKS}\n`);
  }
  await runActiveCell(panel, services);
}

/**
 * Add a code cell below the active one and run it, so that what was done is
 * seen and saved with the notebook.
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
  // Without an active cell the index is -1, and the cell comes first.
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
  // JupyterLab runs every selected cell.
  panel.content.deselectAll();
  await NotebookActions.run(
    panel.content,
    panel.sessionContext,
    sessionDialogs ?? undefined,
    translator
  );
}
