/**
 * The view of one cluster: its ranks, its metrics, buttons that control it.
 *
 * The side panel, the main area and the widget share it. It is plain DOM, since
 * not every front end has JupyterLab's libraries.
 */

import { messageOf } from '../protocol/messages';
import type {
  Action,
  IActions,
  ICluster,
  Plots,
  Translate
} from '../protocol/types';
import type { ClusterStore } from '../stores/clusterStore';
import { Confirmation } from './confirmation';
import { addToolbarKeys, button, element, setText } from './dom';
import { LiveRegion } from './liveRegion';
import { RankLog } from './log/rankLog';
import { Charts } from './plots/charts';
import { RankFilter } from './rankFilter';
import {
  formatProgress,
  ownsRanks,
  silentRanks,
  slowestLoop,
  summarizeActivity,
  summarizeStates
} from './summary';
import { RankTable } from './table/rankTable';
import { VariablesView } from './variables/variablesView';

export class ClusterView {
  readonly node: HTMLElement;
  private readonly title = element('span', { class: 'jdt-name' });
  private readonly state = element('span', { class: 'jdt-state' });
  private readonly liveRegion = new LiveRegion();
  private readonly progress = element('div', {
    class: 'jdt-progress',
    role: 'progressbar',
    'aria-valuemin': '0'
  });
  private readonly hang = element('div', { class: 'jdt-hang' });
  private readonly warnings = element('div', { class: 'jdt-warnings' });
  private readonly error = element('div', {
    role: 'alert',
    class: 'jdt-error'
  });
  private readonly charts: Charts;
  private readonly table: RankTable;
  private readonly log: RankLog;
  /** Null where no variables can be read. */
  private readonly variables: VariablesView | null;
  private readonly confirmation: Confirmation;
  private readonly filter: RankFilter;
  private readonly resetButton: HTMLButtonElement;
  private readonly toolbar: HTMLElement;
  private readonly resizes: ResizeObserver;
  private readonly unsubscribe: () => void;
  private cluster: ICluster | null = null;
  /** Why what is shown is out of date; empty if it is not. */
  private staleReason = '';
  private hasEnded = false;
  private frame = 0;
  private timer = 0;
  private minIntervalMs = 0;
  private drawnAt = 0;

  constructor(
    private readonly actions: IActions,
    private readonly trans: Translate,
    store: ClusterStore
  ) {
    this.charts = new Charts(store, trans);
    this.log = new RankLog(trans, actions);
    const { variables } = actions;
    this.variables = variables ? new VariablesView(trans, variables) : null;
    this.confirmation = new Confirmation(trans);
    this.table = new RankTable(
      trans,
      rank => {
        this.log.open(this.cluster?.id ?? '', rank);
      },
      () => {
        this.schedule();
      }
    );
    this.filter = new RankFilter(trans, (filter, order) => {
      this.table.setFilter(filter, order);
      this.schedule();
    });
    this.resetButton = this.makeResetButton();
    this.toolbar = this.makeToolbar();
    this.node = element(
      'div',
      { class: 'jdt-view' },
      element(
        'header',
        { class: 'jdt-header' },
        this.title,
        this.state,
        this.toolbar
      ),
      this.confirmation.node,
      this.liveRegion.node,
      this.progress,
      this.error,
      this.hang,
      this.warnings,
      this.filter.node,
      this.table.node,
      this.log.node,
      ...(this.variables ? [this.variables.node] : []),
      this.charts.node
    );
    for (const each of [this.progress, this.error, this.hang, this.warnings]) {
      each.hidden = true;
    }
    const onChange = (): void => {
      this.charts.invalidate();
      this.schedule();
    };
    this.resizes = new ResizeObserver(onChange);
    this.resizes.observe(this.node);
    this.unsubscribe = store.subscribe(onChange);
    onChange();
  }

  private makeToolbar(): HTMLElement {
    const t = this.trans;
    const made = element(
      'span',
      { class: 'jdt-buttons', role: 'toolbar', 'aria-label': t('cluster') },
      button(
        t('Interrupt'),
        t('interrupt the cell that runs on the ranks'),
        () => {
          void this.request('interrupt');
        }
      ),
      this.resetButton,
      button(t('Stop'), t('shut down the ranks'), () => {
        void this.confirmAndRequest(
          'stop',
          t('Shut down the ranks?'),
          t('Shut down')
        );
      })
    );
    if (this.variables !== null) {
      made.append(this.variables.button);
    }
    const { enlarge } = this.actions;
    if (enlarge !== undefined) {
      made.append(button('⤢', t('open in the main area'), enlarge));
    }
    addToolbarKeys(made);
    return made;
  }

  private makeResetButton(): HTMLButtonElement {
    const t = this.trans;
    return button(t('Reset'), '', () => {
      void this.confirmAndRequest(
        'reset',
        t('Restart all ranks?'),
        t('Restart')
      );
    });
  }

  /** Processes of a batch job can be restarted only from where it runs. */
  private updateResetButton(cluster: ICluster): void {
    this.resetButton.disabled = !ownsRanks(cluster);
    this.resetButton.title = ownsRanks(cluster)
      ? this.trans('restart all ranks; their variables are lost')
      : this.trans(
          'the ranks are processes of the job of %1, which only its owner can start again',
          cluster.job_file
        );
  }

  private async confirmAndRequest(
    action: Action,
    title: string,
    acceptLabel: string
  ): Promise<void> {
    const body = this.trans(
      'The variables on the ranks are lost. Those of the notebook stay.'
    );
    if (await this.confirmation.open(title, body, acceptLabel)) {
      await this.request(action);
    }
  }

  private async request(action: Action): Promise<void> {
    if (this.cluster === null) {
      return;
    }
    this.showError('');
    try {
      await this.actions.request(this.cluster.id, action);
    } catch (error) {
      this.showError(messageOf(error));
    }
  }

  private showError(text: string): void {
    setText(this.error, text);
    this.error.hidden = !text;
  }

  /** Show the current state of the cluster. */
  show(cluster: ICluster): void {
    this.cluster = cluster;
    this.schedule();
  }

  /** Mark what is shown as out of date, with the reason; empty: it is not. */
  setStale(reason: string): void {
    if (!this.hasEnded) {
      this.staleReason = reason;
      this.node.classList.toggle('jdt-stale', Boolean(reason));
      this.toolbar.hidden = Boolean(reason);
      this.schedule();
    }
  }

  /** Show the last state of a cluster that has ended, without controls. */
  end(reason: string): void {
    this.setStale(reason);
    this.hasEnded = true;
    this.node.classList.add('jdt-ended');
    this.log.close();
    this.variables?.close();
    this.table.freeze();
    this.charts.freeze();
    this.schedule();
  }

  restyle(): void {
    this.charts.restyle();
  }

  /** Set which plots are shown, and the minimum time between two draws. */
  configure(plots: Plots, minIntervalS: number): void {
    this.charts.setPlots(plots);
    this.minIntervalMs = 1000 * minIntervalS;
    this.schedule();
  }

  /** Draw in the next frame, once for all changes until then. */
  private schedule(): void {
    if (this.frame !== 0 || this.timer !== 0) {
      return;
    }
    const delay = this.drawnAt + this.minIntervalMs - performance.now();
    if (delay > 0) {
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        this.schedule();
      }, delay);
      return;
    }
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.drawnAt = performance.now();
      this.draw();
    });
  }

  private draw(): void {
    const cluster = this.cluster;
    if (cluster !== null) {
      setText(this.title, cluster.name);
      this.title.title = `${cluster.id} · ${cluster.launcher} · ${cluster.backend}`;
      setText(
        this.state,
        this.staleReason || summarizeStates(cluster, this.trans)
      );
      this.updateResetButton(cluster);
      this.showProgress(cluster);
      const hang = this.hangLines(cluster);
      showLines(this.hang, hang);
      showLines(this.warnings, cluster.remarks);
      this.liveRegion.update([
        ...hang,
        ...cluster.remarks,
        this.staleReason || summarizeActivity(cluster, this.trans)
      ]);
      this.filter.show(cluster);
      this.table.show(cluster);
      this.variables?.show(cluster);
      this.charts.setRanks({
        filter: this.filter.matching(cluster),
        silent: silentRanks(cluster)
      });
    }
    this.charts.draw();
  }

  private hangLines(cluster: ICluster): string[] {
    const lines = cluster.hang ?? [];
    const head = this.trans(
      'ranks wait for missing ranks; Interrupt ends the wait and keeps all variables:'
    );
    return lines.length > 0 ? [head, ...lines] : [];
  }

  private showProgress(cluster: ICluster): void {
    const slowest = slowestLoop(cluster);
    this.progress.hidden = slowest === null || Boolean(this.staleReason);
    if (slowest !== null) {
      const { done = 0, total = 1 } = slowest;
      const text = formatProgress(slowest, this.trans);
      setText(this.progress, text);
      this.progress.setAttribute('aria-valuenow', String(done));
      this.progress.setAttribute('aria-valuemax', String(total));
      this.progress.setAttribute('aria-valuetext', text);
      this.progress.style.setProperty(
        '--jdt-progress',
        `${((100 * done) / total).toFixed(2)}%`
      );
    }
  }

  destroy(): void {
    this.unsubscribe();
    this.resizes.disconnect();
    cancelAnimationFrame(this.frame);
    window.clearTimeout(this.timer);
    this.log.close();
    this.variables?.close();
    this.liveRegion.destroy();
    this.charts.destroy();
  }
}

function showLines(node: HTMLElement, lines: string[]): void {
  setText(node, lines.join('\n'));
  node.hidden = lines.length === 0;
}
