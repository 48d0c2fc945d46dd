/**
 * The plugin: wires the commands to JupyterLab.
 *
 * The toolbar's buttons are declared in schema/plugin.json, where a person's
 * settings can move or hide them.
 */

import type {
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette, ISessionContextDialogs } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { addCommands, CommandIDs } from './commands';

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

    const category = trans.__('Distributed Training');
    for (const command of Object.values(CommandIDs)) {
      palette?.addItem({ category, command });
    }
  }
};

export default plugin;
