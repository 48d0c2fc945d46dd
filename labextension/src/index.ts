/**
 * The plugins: wire the commands, the side panel and the status bar to
 * JupyterLab and Notebook.
 *
 * The toolbar's buttons are declared in schema/plugin.json, where a person's
 * settings can move or hide them.
 */

import type {
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ILayoutRestorer } from '@jupyterlab/application';
import {
  ICommandPalette,
  ISessionContextDialogs,
  IThemeManager
} from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { Client } from './client';
import { addClusterCommands, addCommands, CommandIDs } from './commands';
import { ranksIcon } from './icons';
import { ClustersPanel } from './panel';
import { StatusItem } from './status';
import { rankOutputs } from './tabs';
import { isPlots } from './view/types';

/** Before plain text, which stands at 120. */
const RANKS_RANK = 40;
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
    ISessionContextDialogs
  ],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker | null,
    palette: ICommandPalette | null,
    labTranslator: ITranslator | null,
    sessionDialogs: ISessionContextDialogs | null
  ): void => {
    if (tracker === null) {
      return;
    }
    const translator = labTranslator ?? nullTranslator;
    const trans = translator.load('jupyter_disttrain');
    addCommands(app, tracker, trans, { sessionDialogs, translator });
    addToPalette(palette, trans.__('Distributed Training'), [
      CommandIDs.startRanks,
      CommandIDs.runCell,
      CommandIDs.shutDownRanks,
      CommandIDs.attach
    ]);
  }
};

const panelPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-disttrain:panel',
  description: 'The ranks of every cluster of this server, live.',
  autoStart: true,
  optional: [
    ISettingRegistry,
    ICommandPalette,
    ITranslator,
    IStatusBar,
    ILayoutRestorer,
    IThemeManager
  ],
  activate: (
    app: JupyterFrontEnd,
    registry: ISettingRegistry | null,
    palette: ICommandPalette | null,
    translator: ITranslator | null,
    statusBar: IStatusBar | null,
    restorer: ILayoutRestorer | null,
    themes: IThemeManager | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_disttrain');
    const client = new Client(app.serviceManager.serverSettings);
    const panel = new ClustersPanel(
      client,
      trans,
      app.commands,
      CommandIDs.startRanks
    );
    panel.id = PANEL;
    panel.title.icon = ranksIcon;
    panel.title.caption = trans.__('Distributed Training');
    app.shell.add(panel, 'right', { rank: 900, type: 'Distributed Training' });
    restorer?.add(panel, PANEL);
    themes?.themeChanged.connect(() => {
      panel.restyle();
    });
    addClusterCommands(app, client, panel, trans);
    addToPalette(palette, trans.__('Distributed Training'), [
      CommandIDs.showPanel,
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
    let stands = 'right';
    void registry?.load(panelPlugin.id).then(settings => {
      const apply = (): void => {
        const { side, plots, rate } = settings.composite;
        panel.configure(isPlots(plots) ? plots : 'all', Number(rate));
        if ((side === 'left' || side === 'right') && side !== stands) {
          stands = side;
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
  description: 'A tab for each rank over what a cell has put out.',
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
    registry.addFactory(rankOutputs(tracker, trans), RANKS_RANK);
  }
};

export default [plugin, panelPlugin, outputPlugin];
