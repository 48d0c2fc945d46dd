/**
 * The commands of the palette, menus, toolbar and launcher.
 *
 * Covers: their ids and labels, when they are enabled, confirmation.
 * Does not cover: editing and running cells (notebook/cells).
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import { type INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';

import { ranksIcon, runCellIcon, stopRanksIcon, startRanksIcon } from './icons';
import {
  canEdit,
  canRunOnAllRanks,
  type IRunServices,
  runActiveCellOnAllRanks,
  runInNewCell
} from './notebook/cells';
import { RUN_ON_ALL_RANKS } from './notebook/magics';
import type { ClustersPanel } from './panel/clustersPanel';
import type { ServerClient } from './panel/serverClient';
import { startCode } from './panel/startCode';
import type { Action, ICluster } from './protocol/types';
import { ownsRanks } from './view/summary';

/** Also used in schema/plugin.json. */
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

const ATTACH_CODE = '%load_ext jupyter_disttrain\n%dist_attach';

/**
 * Add the commands for notebooks, and keep their enabled state up to date.
 */
export function addCommands(
  app: JupyterFrontEnd,
  tracker: INotebookTracker,
  trans: TranslationBundle,
  services: IRunServices
): void {
  const { commands, shell } = app;

  /** The current notebook; null if another document is current. */
  const current = (): NotebookPanel | null =>
    tracker.currentWidget === shell.currentWidget
      ? tracker.currentWidget
      : null;

  const isEnabled =
    (isPossible: (panel: NotebookPanel) => boolean) => (): boolean => {
      const panel = current();
      return panel !== null && isPossible(panel);
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
    // As an argument, because %% in a text to translate becomes one percent sign.
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
    execute: onCurrent(panel => runInNewCell(panel, ATTACH_CODE, services))
  });

  commands.addCommand(CommandIDs.newNotebook, {
    label: trans.__('Distributed notebook'),
    caption: trans.__('A new notebook whose first cell starts ranks'),
    icon: ranksIcon,
    execute: async ({ cwd }) => {
      const kernelName = app.serviceManager.kernelspecs.specs?.default;
      const panel: unknown = await commands.execute('notebook:create-new', {
        ...(typeof cwd === 'string' && { cwd }),
        ...(kernelName && { kernelName })
      });
      if (panel instanceof NotebookPanel) {
        await panel.context.ready;
        panel.content.model?.sharedModel.cells[0]?.setSource(startCode());
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
 * Add the commands for the cluster of the current notebook, or else for the
 * cluster that the panel shows. They also work while the kernel is busy.
 *
 * @param openMain - opens the main area; undefined where there is none
 */
export function addClusterCommands(
  app: JupyterFrontEnd,
  client: ServerClient,
  panel: ClustersPanel,
  trans: TranslationBundle,
  openMain: (() => void) | undefined
): void {
  const { commands, shell } = app;
  commands.addCommand(CommandIDs.showPanel, {
    label: trans.__('Show ranks in the side panel'),
    caption: trans.__('Show states and metrics of the ranks in the side panel'),
    icon: ranksIcon,
    execute: () => {
      shell.activateById(panel.id);
    }
  });
  if (openMain !== undefined) {
    commands.addCommand(CommandIDs.openMain, {
      label: trans.__('Show ranks in the main area'),
      caption: trans.__(
        'Show states and metrics of the ranks with large plots'
      ),
      icon: ranksIcon,
      execute: openMain
    });
  }
  const hasCluster = (): boolean => target() !== undefined;
  const target = (): ICluster | undefined => {
    const { clusters } = client.state;
    const current = shell.currentWidget;
    const path = current instanceof NotebookPanel ? current.context.path : null;
    // The server sends the absolute path of the notebook.
    const own = clusters.findLast(
      each => path !== null && `/${each.notebook}`.endsWith(`/${path}`)
    );
    return own ?? clusters.find(each => each.id === panel.current);
  };
  const request = async (action: Action, cluster = target()): Promise<void> => {
    try {
      await client.actions.request(cluster?.id ?? '', action);
    } catch (error) {
      await showErrorMessage(
        cluster?.name ?? '',
        error instanceof Error ? error : String(error)
      );
    }
  };
  commands.addCommand(CommandIDs.interrupt, {
    label: trans.__('Interrupt the ranks'),
    isEnabled: hasCluster,
    execute: () => request('interrupt')
  });
  commands.addCommand(CommandIDs.reset, {
    label: trans.__('Restart the ranks'),
    isEnabled: () => {
      const cluster = target();
      return cluster !== undefined && ownsRanks(cluster);
    },
    execute: async () => {
      const cluster = target();
      const title = trans.__('Restart all ranks of %1?', describe(cluster));
      if (await confirmLoss(trans, title, trans.__('Restart'))) {
        await request('reset', cluster);
      }
    }
  });
  commands.addCommand(CommandIDs.stop, {
    label: trans.__('Shut down the ranks'),
    icon: stopRanksIcon,
    isEnabled: hasCluster,
    execute: async () => {
      const cluster = target();
      const title = trans.__('Shut down the ranks of %1?', describe(cluster));
      if (await confirmLoss(trans, title, trans.__('Shut Down'))) {
        await request('stop', cluster);
      }
    }
  });
  client.stateChanged.connect(() => {
    for (const id of ['interrupt', 'reset', 'stop'] as const) {
      commands.notifyCommandChanged(CommandIDs[id]);
    }
  });
}

/** The name of a cluster, with the notebook that started it. */
function describe(cluster: ICluster | undefined): string {
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
