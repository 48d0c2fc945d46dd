/**
 * The item in the status bar: ranks, their states, use of the GPUs.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import { button } from '../view/dom';
import { summarizeServer } from '../view/summary';
import type { ServerClient } from './serverClient';

export class StatusItem extends Widget {
  constructor(
    client: ServerClient,
    trans: TranslationBundle,
    onClick: () => void
  ) {
    super();
    this.addClass('jdt-status');
    const item = button('', trans.__('show the ranks'), onClick);
    this.node.append(item);
    const show = (): void => {
      const { clusters, starting } = client.state;
      item.textContent = summarizeServer(client.state, (text, ...args) =>
        trans.__(text, ...args)
      );
      this.setHidden(clusters.length + starting.length === 0);
    };
    client.stateChanged.connect(show);
    show();
  }
}
