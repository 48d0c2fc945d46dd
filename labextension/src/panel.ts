/**
 * Every cluster of this server, live: the side panel, and the main area.
 *
 * Covers: one view per cluster, choosing among several, the empty state.
 * Does not cover: the view (view/view), what it shows (client, feeds).
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import type { Client } from './client';
import type { Feeds } from './feeds';
import { startForm } from './start';
import { arrowKeys, button, element, markTab, setText } from './view/dom';
import type { IState } from './view/packets';
import type { IActions, Plots } from './view/types';
import { ClusterView, summary } from './view/view';

let panelsMade = 0;

export interface IPanelOptions {
  client: Client;
  feeds: Feeds;
  trans: TranslationBundle;
  commands: CommandRegistry;
  startCommand: string;
  /** Shows the same in the main area; absent there. */
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
  private secondsBetween = 0;
  private chosen = '';
  private shown = '';
  private readonly prefix = `jdt-cluster-${String(++panelsMade)}`;

  private readonly client: Client;
  private readonly feeds: Feeds;
  private readonly trans: TranslationBundle;
  private readonly actions: IActions;

  constructor(options: IPanelOptions) {
    super();
    const { client, feeds, trans, commands, startCommand, enlarge } = options;
    this.client = client;
    this.feeds = feeds;
    this.trans = trans;
    this.actions = {
      ask: (id, action) => client.ask(id, action),
      log: (id, of) => client.log(id, of),
      logUrl: (id, rank) => client.logUrl(id, rank),
      ...(enlarge && { enlarge })
    };
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
      startForm(trans, options => {
        void commands.execute(startCommand, { options });
      })
    );
    const notify = (): void => {
      const made = this.empty.querySelector('button');
      if (made !== null) {
        made.disabled = !commands.isEnabled(startCommand);
      }
    };
    commands.commandChanged.connect(notify);
    notify();
    this.tabs.setAttribute('aria-label', trans.__('clusters'));
    arrowKeys(this.tabs);
    this.node.append(
      this.notes,
      this.starting,
      this.tabs,
      this.empty,
      this.content
    );
    client.stateChanged.connect(this.onState);
    client.connectionChanged.connect(this.onConnection);
    this.take(client.state);
  }

  private readonly onState = (_: Client, state: IState): void => {
    this.take(state);
  };

  private readonly onConnection = (_: Client, isConnected: boolean): void => {
    this.views.forEach(view => {
      view.setStale(
        isConnected ? '' : this.trans.__('the server is not reached')
      );
    });
  };

  private take(state: IState): void {
    const { clusters } = state;
    for (const [id, view] of this.views) {
      if (!clusters.some(cluster => cluster.id === id)) {
        this.feeds.leave(id, view);
        view.destroy();
        view.node.remove();
        this.views.delete(id);
      }
    }
    for (const cluster of clusters) {
      let view = this.views.get(cluster.id);
      if (view === undefined) {
        const feed = this.feeds.of(cluster.id);
        view = new ClusterView(
          this.actions,
          (text, ...args) => this.trans.__(text, ...args),
          feed.store
        );
        view.configure(this.plots, this.secondsBetween);
        view.node.id = `${this.prefix}-${cluster.id}`;
        this.views.set(cluster.id, view);
        this.content.append(view.node);
        feed.add(view);
      }
      view.show(cluster);
    }
    if (!this.views.has(this.chosen)) {
      this.chosen = clusters.at(-1)?.id ?? '';
    }
    this.showTabs(state);
    this.choose(this.chosen);
    const { starting } = state;
    setText(
      this.starting,
      starting.map(each => `${each.name}: ${each.text}`).join('\n')
    );
    this.starting.hidden = starting.length === 0;
    this.empty.hidden = clusters.length + starting.length > 0;
    const said = state.unreadable.map(each =>
      this.trans.__(
        'The cluster %1 was started by version %2 of jupyter_disttrain, and this server has %3: restart one of them.',
        each.name,
        each.version,
        each.own
      )
    );
    setText(this.notes, said.join('\n'));
  }

  private showTabs({ clusters }: IState): void {
    this.tabs.hidden = clusters.length < 2;
    const wanted = this.tabs.hidden ? [] : clusters;
    const key = wanted.map(cluster => cluster.id).join();
    if (this.tabs.dataset.key !== key) {
      this.tabs.dataset.key = key;
      this.tabs.replaceChildren(
        ...wanted.map(cluster => {
          const tab = button(cluster.name, cluster.id, () => {
            this.choose(cluster.id);
          });
          tab.setAttribute('role', 'tab');
          tab.setAttribute('aria-controls', `${this.prefix}-${cluster.id}`);
          tab.id = `${this.prefix}-${cluster.id}-tab`;
          tab.dataset.id = cluster.id;
          return tab;
        })
      );
    }
    for (const tab of this.tabs.querySelectorAll('button')) {
      const cluster = wanted.find(each => each.id === tab.dataset.id);
      if (cluster !== undefined) {
        const text = (source: string, ...args: string[]): string =>
          this.trans.__(source, ...args);
        tab.title = `${cluster.notebook || cluster.id}: ${summary(cluster, text)}`;
      }
    }
  }

  private choose(id: string): void {
    const isOther = id !== this.shown;
    this.chosen = this.shown = id;
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

  /** The id of the cluster that is looked at; empty without one. */
  get current(): string {
    return this.chosen;
  }

  /** Take what the user has set. */
  configure(plots: Plots, secondsBetween: number): void {
    this.plots = plots;
    this.secondsBetween = secondsBetween;
    this.views.forEach(view => {
      view.configure(plots, secondsBetween);
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
    if (this.isDisposed) {
      return;
    }
    this.client.stateChanged.disconnect(this.onState);
    this.client.connectionChanged.disconnect(this.onConnection);
    this.views.forEach((view, id) => {
      this.feeds.leave(id, view);
      view.destroy();
    });
    super.dispose();
  }
}
