/**
 * The plugins: wire commands, side panel, status bar and output to JupyterLab
 * and Notebook.
 *
 * The toolbar's buttons are declared in schema/plugin.json, so that the user's
 * settings can move or hide them.
 */

import type {
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import {
  ICommandPalette,
  ISessionContextDialogs,
  IThemeManager
} from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { addClusterCommands, addCommands, CommandIDs } from './commands';
import { ranksIcon } from './icons';
import { watchQuestions } from './notebook/openQuestions';
import { rankOutputFactory } from './notebook/rankTabs';
import { ClustersPanel, type IPanelOptions } from './panel/clustersPanel';
import { ClusterStores } from './panel/clusterStores';
import { MainArea } from './panel/mainArea';
import { ServerClient } from './panel/serverClient';
import { StatusItem } from './panel/statusItem';
import { isPlots } from './protocol/messages';
import type { Plots } from './protocol/types';

/** Preferred to plain text, whose rank is 120. */
const RENDERER_RANK = 40;
const PANEL = 'jupyter-disttrain-panel';

function addToPalette(
  palette: ICommandPalette | null,
  category: string,
  commands: string[]
): void {
  for (const command of commands) {
    palette?.addItem({ category, command });
  }
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-disttrain:plugin',
  description: 'Commands for training on several ranks from a notebook.',
  autoStart: true,
  optional: [
    INotebookTracker,
    ICommandPalette,
    ITranslator,
    ISessionContextDialogs,
    ILauncher
  ],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker | null,
    palette: ICommandPalette | null,
    labTranslator: ITranslator | null,
    sessionDialogs: ISessionContextDialogs | null,
    launcher: ILauncher | null
  ): void => {
    if (tracker === null) {
      return;
    }
    const translator = labTranslator ?? nullTranslator;
    const trans = translator.load('jupyter_disttrain');
    addCommands(app, tracker, trans, { sessionDialogs, translator });
    addToPalette(palette, trans.__('Distributed Training'), [
      CommandIDs.newNotebook,
      CommandIDs.startRanks,
      CommandIDs.runCell,
      CommandIDs.attach
    ]);
    launcher?.add({
      command: CommandIDs.newNotebook,
      category: trans.__('Other'),
      rank: 0
    });
  }
};

const panelPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-disttrain:panel',
  description: 'A panel with the ranks of all clusters of this server, live.',
  autoStart: true,
  optional: [
    ISettingRegistry,
    ICommandPalette,
    ITranslator,
    IStatusBar,
    ILayoutRestorer,
    IThemeManager,
    ILabShell
  ],
  activate: (
    app: JupyterFrontEnd,
    registry: ISettingRegistry | null,
    palette: ICommandPalette | null,
    translator: ITranslator | null,
    statusBar: IStatusBar | null,
    restorer: ILayoutRestorer | null,
    themes: IThemeManager | null,
    labShell: ILabShell | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_disttrain');
    const client = new ServerClient(app.serviceManager.serverSettings);
    const options: IPanelOptions = {
      client,
      stores: new ClusterStores(client),
      trans,
      commands: app.commands,
      startCommand: CommandIDs.startRanks
    };
    // Notebook 7 shows one document only.
    const main =
      labShell &&
      new MainArea(labShell, trans.__('Ranks'), () => {
        const content = new ClustersPanel(options);
        content.configure(plots, minIntervalS);
        return content;
      });
    const enlarge = main && {
      enlarge: (): void => {
        main.open();
      }
    };
    const panel = new ClustersPanel({ ...options, ...enlarge });
    panel.id = PANEL;
    panel.title.icon = ranksIcon;
    panel.title.caption = trans.__('Distributed Training');
    app.shell.add(panel, 'right', { rank: 900, type: 'Distributed Training' });
    restorer?.add(panel, PANEL);
    themes?.themeChanged.connect(() => {
      panel.restyle();
      main?.panel?.restyle();
    });
    addClusterCommands(app, client, panel, trans, enlarge?.enlarge);
    if (restorer !== null) {
      main?.restore(restorer, CommandIDs.openMain);
    }
    addToPalette(palette, trans.__('Distributed Training'), [
      CommandIDs.showPanel,
      ...(main ? [CommandIDs.openMain] : []),
      CommandIDs.interrupt,
      CommandIDs.reset,
      CommandIDs.stop
    ]);
    statusBar?.registerStatusItem('jupyter-disttrain:status', {
      item: new StatusItem(client, trans, () => {
        app.shell.activateById(PANEL);
      }),
      align: 'left',
      rank: 50
    });
    let currentSide = 'right';
    let plots: Plots = 'all';
    let minIntervalS = 0;
    void registry?.load(panelPlugin.id).then(settings => {
      const apply = (): void => {
        const { side, plots: setting, rate } = settings.composite;
        plots = isPlots(setting) ? setting : 'all';
        minIntervalS = Number(rate);
        panel.configure(plots, minIntervalS);
        main?.panel?.configure(plots, minIntervalS);
        if ((side === 'left' || side === 'right') && side !== currentSide) {
          currentSide = side;
          app.shell.add(panel, side, { rank: 900 });
        }
      };
      settings.changed.connect(apply);
      apply();
    });
    client.connect();
  }
};

const outputPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-disttrain:outputs',
  description: 'Tabs that select the output of one rank; questions of ranks.',
  autoStart: true,
  requires: [IRenderMimeRegistry],
  optional: [INotebookTracker, ITranslator],
  activate: (
    _app: JupyterFrontEnd,
    registry: IRenderMimeRegistry,
    tracker: INotebookTracker | null,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_disttrain');
    registry.addFactory(rankOutputFactory(tracker, trans), RENDERER_RANK);
    watchQuestions();
  }
};

export default [plugin, panelPlugin, outputPlugin];
