/**
 * The commands, each used by the palette and by the notebook's toolbar.
 *
 * Covers: their names, when they are enabled, what they ask first.
 * Does not cover: how cells are edited and run (notebook).
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import { type INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { Client } from './client';
import { ranksIcon, runCellIcon, stopRanksIcon, startRanksIcon } from './icons';
import type { IRunServices } from './notebook';
import {
  canEdit,
  canRunOnAllRanks,
  RUN_ON_ALL_RANKS,
  runActiveCellOnAllRanks,
  runInNewCell
} from './notebook';
import type { ClustersPanel } from './panel';
import { startCode } from './start';
import type { Action, ICluster } from './view/types';
import { isOwn } from './view/view';

/** schema/plugin.json names them too. */
export const CommandIDs = {
  newNotebook: 'jupyter-disttrain:new-notebook',
  startRanks: 'jupyter-disttrain:start-ranks',
  runCell: 'jupyter-disttrain:run-cell',
  attach: 'jupyter-disttrain:attach',
  showPanel: 'jupyter-disttrain:show-panel',
  openMain: 'jupyter-disttrain:open-main',
  interrupt: 'jupyter-disttrain:interrupt',
  reset: 'jupyter-disttrain:reset',
  stop: 'jupyter-disttrain:stop'
} as const;

const NOTEBOOK_COMMANDS = [
  CommandIDs.startRanks,
  CommandIDs.runCell,
  CommandIDs.attach
];

const ATTACH = '%load_ext jupyter_disttrain\n%dist_attach';

/**
 * Add the commands, and keep their enabled state up to date.
 */
export function addCommands(
  app: JupyterFrontEnd,
  tracker: INotebookTracker,
  trans: TranslationBundle,
  services: IRunServices
): void {
  const { commands, shell } = app;

  /** The notebook in front; null where it is something else. */
  const current = (): NotebookPanel | null =>
    tracker.currentWidget === shell.currentWidget
      ? tracker.currentWidget
      : null;

  const isEnabled = (can: (panel: NotebookPanel) => boolean) => (): boolean => {
    const panel = current();
    return panel !== null && can(panel);
  };

  const onCurrent =
    (run: (panel: NotebookPanel) => Promise<void>) =>
    async (): Promise<void> => {
      const panel = current();
      if (panel !== null) {
        await run(panel);
      }
    };

  commands.addCommand(CommandIDs.startRanks, {
    label: trans.__('Start ranks for this notebook'),
    caption: trans.__('Start ranks for this notebook, from a new cell'),
    icon: startRanksIcon,
    isEnabled: isEnabled(canEdit),
    execute: async ({ options }) => {
      const code = startCode(typeof options === 'string' ? options : '');
      await onCurrent(panel => runInNewCell(panel, code, services))();
    }
  });

  commands.addCommand(CommandIDs.runCell, {
    label: trans.__('Run this cell on all ranks'),
    // An argument, as a translated text takes %% for one percent sign.
    caption: trans.__(
      'Run this cell on all ranks, with %1 as its first line',
      RUN_ON_ALL_RANKS
    ),
    icon: runCellIcon,
    isEnabled: isEnabled(canRunOnAllRanks),
    execute: onCurrent(panel => runActiveCellOnAllRanks(panel, services))
  });

  commands.addCommand(CommandIDs.attach, {
    label: trans.__('Attach to ranks of an earlier kernel'),
    caption: trans.__(
      'Attach to ranks that were started with --keep, from a new cell'
    ),
    isEnabled: isEnabled(canEdit),
    execute: onCurrent(panel => runInNewCell(panel, ATTACH, services))
  });

  commands.addCommand(CommandIDs.newNotebook, {
    label: trans.__('Distributed notebook'),
    caption: trans.__('A new notebook whose first cell starts ranks'),
    icon: ranksIcon,
    execute: async ({ cwd }) => {
      const kernelName = app.serviceManager.kernelspecs.specs?.default;
      const made: unknown = await commands.execute('notebook:create-new', {
        ...(typeof cwd === 'string' && { cwd }),
        ...(kernelName && { kernelName })
      });
      if (made instanceof NotebookPanel) {
        await made.context.ready;
        made.content.model?.sharedModel.cells[0]?.setSource(startCode());
      }
    }
  });

  const notify = (): void => {
    for (const id of NOTEBOOK_COMMANDS) {
      commands.notifyCommandChanged(id);
    }
  };
  tracker.currentChanged.connect(notify);
  tracker.activeCellChanged.connect(notify);
  shell.currentChanged?.connect(notify);
}

/**
 * Add what is asked of a cluster, of the notebook in front or else of the one
 * that the panel shows: it works while the notebook's kernel is busy, too.
 *
 * @param openMain - shows the ranks in the main area, where there is one
 */
export function addClusterCommands(
  app: JupyterFrontEnd,
  client: Client,
  panel: ClustersPanel,
  trans: TranslationBundle,
  openMain: (() => void) | undefined
): void {
  const { commands, shell } = app;
  commands.addCommand(CommandIDs.showPanel, {
    label: trans.__('Show ranks in the side panel'),
    caption: trans.__('Show what the ranks do, in the side panel'),
    icon: ranksIcon,
    execute: () => {
      shell.activateById(panel.id);
    }
  });
  if (openMain !== undefined) {
    commands.addCommand(CommandIDs.openMain, {
      label: trans.__('Show ranks in the main area'),
      caption: trans.__('Show what the ranks do, with large plots'),
      icon: ranksIcon,
      execute: openMain
    });
  }
  const hasCluster = (): boolean => target() !== undefined;
  const target = (): ICluster | undefined => {
    const { clusters } = client.state;
    const front = shell.currentWidget;
    const path = front instanceof NotebookPanel ? front.context.path : null;
    // The server tells the notebook's whole path.
    const own = clusters.findLast(
      each => path !== null && `/${each.notebook}`.endsWith(`/${path}`)
    );
    return own ?? clusters.find(each => each.id === panel.current);
  };
  const ask = async (action: Action, cluster = target()): Promise<void> => {
    try {
      await client.ask(cluster?.id ?? '', action);
    } catch (reason) {
      await showErrorMessage(
        cluster?.name ?? '',
        reason instanceof Error ? reason : String(reason)
      );
    }
  };
  commands.addCommand(CommandIDs.interrupt, {
    label: trans.__('Interrupt the ranks'),
    isEnabled: hasCluster,
    execute: () => ask('interrupt')
  });
  commands.addCommand(CommandIDs.reset, {
    label: trans.__('Restart the ranks'),
    isEnabled: () => {
      const cluster = target();
      return cluster !== undefined && isOwn(cluster);
    },
    execute: async () => {
      const cluster = target();
      const title = trans.__('Restart all ranks of %1?', named(cluster));
      if (await confirmLoss(trans, title, trans.__('Restart'))) {
        await ask('reset', cluster);
      }
    }
  });
  commands.addCommand(CommandIDs.stop, {
    label: trans.__('Shut down the ranks'),
    icon: stopRanksIcon,
    isEnabled: hasCluster,
    execute: async () => {
      const cluster = target();
      const title = trans.__('Shut down the ranks of %1?', named(cluster));
      if (await confirmLoss(trans, title, trans.__('Shut Down'))) {
        await ask('stop', cluster);
      }
    }
  });
  client.stateChanged.connect(() => {
    for (const id of ['interrupt', 'reset', 'stop'] as const) {
      commands.notifyCommandChanged(CommandIDs[id]);
    }
  });
}

/** A cluster by its name, and the notebook that started it. */
function named(cluster: ICluster | undefined): string {
  const notebook = cluster?.notebook.split('/').pop();
  return `${cluster?.name ?? ''}${notebook ? ` (${notebook})` : ''}`;
}

async function confirmLoss(
  trans: TranslationBundle,
  title: string,
  label: string
): Promise<boolean> {
  const result = await showDialog({
    title,
    body: trans.__(
      'The variables on the ranks are lost. Those of the notebook stay.'
    ),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label })
    ]
  });
  return result.button.accept;
}
