/**
 * The item in the status bar: ranks, their state, use of the GPUs.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import type { Client } from './client';
import { button } from './view/dom';
import { summary } from './view/view';

export class StatusItem extends Widget {
  constructor(client: Client, trans: TranslationBundle, onClick: () => void) {
    super();
    this.addClass('jdt-status');
    const made = button('', trans.__('show the ranks'), onClick);
    this.node.append(made);
    const show = (): void => {
      const { clusters, starting } = client.state;
      const gpus = clusters
        .flatMap(cluster => cluster.ranks)
        .flatMap(rank => rank.gpu?.percent ?? []);
      const use = gpus.length
        ? ` · GPU ${(gpus.reduce((sum, each) => sum + each, 0) / gpus.length).toFixed(0)} %`
        : '';
      const said = clusters.map(cluster =>
        summary(cluster, (text, ...args) => trans.__(text, ...args))
      );
      const begun = starting.map(each => each.text);
      made.textContent = [...said, ...begun].join(' | ') + use;
      this.setHidden(clusters.length + starting.length === 0);
    };
    client.stateChanged.connect(show);
    show();
  }
}
