/**
 * All clusters of this server: the side panel, and the panel in the main area.
 *
 * Covers: one view per cluster, tabs for several clusters, the empty state.
 * Does not cover: the view (view/clusterView), its data (serverClient,
 * clusterStores).
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import type {
  IActions,
  ICluster,
  IServerState,
  Plots,
  Translate
} from '../protocol/types';
import { ClusterView } from '../view/clusterView';
import { addTabKeys, button, element, markTab, setText } from '../view/dom';
import { summarizeStates } from '../view/summary';
import type { ClusterStores } from './clusterStores';
import type { ServerClient } from './serverClient';
import { makeStartForm } from './startForm';

let panelCount = 0;

export interface IPanelOptions {
  client: ServerClient;
  stores: ClusterStores;
  trans: TranslationBundle;
  commands: CommandRegistry;
  startCommand: string;
  /** Opens the panel in the main area; absent there. */
  enlarge?: () => void;
}

export class ClustersPanel extends Widget {
  private readonly views = new Map<string, ClusterView>();
  private readonly tabs = element('div', {
    class: 'jdt-tabs',
    role: 'tablist'
  });
  private readonly notes = element('div', {
    class: 'jdt-notes',
    role: 'status'
  });
  private readonly starting = element('div', {
    class: 'jdt-starting',
    role: 'status'
  });
  private readonly empty: HTMLElement;
  private readonly content = element('div', { class: 'jdt-content' });
  private plots: Plots = 'all';
  private minIntervalS = 0;
  private selected = '';
  private shown = '';
  private readonly idPrefix = `jdt-cluster-${String(++panelCount)}`;

  private readonly stores: ClusterStores;
  private readonly trans: TranslationBundle;
  private readonly actions: IActions;

  constructor(options: IPanelOptions) {
    super();
    const { client, stores, trans, commands, startCommand, enlarge } = options;
    this.stores = stores;
    this.trans = trans;
    this.actions = { ...client.actions, ...(enlarge && { enlarge }) };
    this.addClass('jdt-panel');
    this.empty = element(
      'div',
      { class: 'jdt-empty' },
      element('h3', {}, trans.__('No ranks run')),
      element(
        'p',
        {},
        trans.__(
          'Ranks are the processes that train together. Start them from a notebook, with'
        )
      ),
      makeStartForm(trans, options => {
        void commands.execute(startCommand, { options });
      })
    );
    const updateStartButton = (): void => {
      const start = this.empty.querySelector('button');
      if (start !== null) {
        start.disabled = !commands.isEnabled(startCommand);
      }
    };
    // With a receiver, dispose() disconnects these.
    commands.commandChanged.connect(updateStartButton, this);
    client.stateChanged.connect((_, state) => {
      this.showState(state);
    }, this);
    client.connectionChanged.connect((_, isConnected) => {
      const reason = isConnected ? '' : trans.__('the server is not reached');
      this.views.forEach(view => {
        view.setStale(reason);
      });
    }, this);
    updateStartButton();
    this.tabs.setAttribute('aria-label', trans.__('clusters'));
    addTabKeys(this.tabs);
    this.node.append(
      this.notes,
      this.starting,
      this.tabs,
      this.empty,
      this.content
    );
    this.showState(client.state);
  }

  private readonly translate: Translate = (text, ...args) =>
    this.trans.__(text, ...args);

  private showState(state: IServerState): void {
    const { clusters, starting } = state;
    for (const [id, view] of this.views) {
      if (!clusters.some(cluster => cluster.id === id)) {
        view.destroy();
        view.node.remove();
        this.views.delete(id);
      }
    }
    for (const cluster of clusters) {
      this.viewOf(cluster).show(cluster);
    }
    if (!this.views.has(this.selected)) {
      this.selected = clusters.at(-1)?.id ?? '';
    }
    this.showTabs(clusters);
    this.select(this.selected);
    setText(
      this.starting,
      starting.map(each => `${each.name}: ${each.text}`).join('\n')
    );
    this.starting.hidden = starting.length === 0;
    this.empty.hidden = clusters.length + starting.length > 0;
    const notes = state.unreadable.map(each =>
      this.trans.__(
        'The cluster %1 was started by version %2 of jupyter_disttrain, and this server has %3: restart one of them.',
        each.name,
        each.version,
        each.own
      )
    );
    setText(this.notes, notes.join('\n'));
  }

  private viewOf(cluster: ICluster): ClusterView {
    let view = this.views.get(cluster.id);
    if (view === undefined) {
      const store = this.stores.get(cluster.id);
      view = new ClusterView(this.actions, this.translate, store);
      view.configure(this.plots, this.minIntervalS);
      view.node.id = `${this.idPrefix}-${cluster.id}`;
      this.views.set(cluster.id, view);
      this.content.append(view.node);
    }
    return view;
  }

  private showTabs(clusters: ICluster[]): void {
    this.tabs.hidden = clusters.length < 2;
    const tabbed = this.tabs.hidden ? [] : clusters;
    const key = tabbed.map(cluster => cluster.id).join();
    if (this.tabs.dataset.key !== key) {
      this.tabs.dataset.key = key;
      this.tabs.replaceChildren(...tabbed.map(each => this.makeTab(each)));
    }
    for (const tab of this.tabs.querySelectorAll('button')) {
      const cluster = tabbed.find(each => each.id === tab.dataset.id);
      if (cluster !== undefined) {
        const states = summarizeStates(cluster, this.translate);
        tab.title = `${cluster.notebook || cluster.id}: ${states}`;
      }
    }
  }

  private makeTab(cluster: ICluster): HTMLButtonElement {
    const tab = button(cluster.name, cluster.id, () => {
      this.select(cluster.id);
    });
    tab.setAttribute('role', 'tab');
    tab.setAttribute('aria-controls', `${this.idPrefix}-${cluster.id}`);
    tab.id = `${this.idPrefix}-${cluster.id}-tab`;
    tab.dataset.id = cluster.id;
    return tab;
  }

  private select(id: string): void {
    const isOther = id !== this.shown;
    this.selected = this.shown = id;
    for (const [each, view] of this.views) {
      view.node.hidden = each !== id;
      const isTab = !this.tabs.hidden;
      view.node.setAttribute('role', isTab ? 'tabpanel' : 'region');
      view.node.setAttribute(
        isTab ? 'aria-labelledby' : 'aria-label',
        isTab ? `${view.node.id}-tab` : this.trans.__('cluster')
      );
    }
    for (const tab of this.tabs.querySelectorAll('button')) {
      markTab(tab, tab.dataset.id === id);
    }
    if (isOther) {
      this.views.get(id)?.restyle();
    }
  }

  /** The id of the cluster that is shown; empty without one. */
  get current(): string {
    return this.selected;
  }

  /** Apply the user's settings to all views. */
  configure(plots: Plots, minIntervalS: number): void {
    this.plots = plots;
    this.minIntervalS = minIntervalS;
    this.views.forEach(view => {
      view.configure(plots, minIntervalS);
    });
  }

  restyle(): void {
    this.views.forEach(view => {
      view.restyle();
    });
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.restyle();
  }

  override dispose(): void {
    this.views.forEach(view => {
      view.destroy();
    });
    super.dispose();
  }
}
