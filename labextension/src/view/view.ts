/**
 * One cluster: what its ranks do, its metrics, what can be asked of it.
 *
 * The same in the side panel, the main area and the notebook's widget; plain
 * DOM, for there is no JupyterLab around it in VS Code.
 */

import { Announcer } from './announcer';
import { Charts } from './charts';
import { Chooser, countsOf } from './chooser';
import { Confirmation } from './confirmation';
import { button, duration, element, setText, toolbarKeys } from './dom';
import { RankLog } from './log';
import type { MetricStore } from './series';
import { rankCount, RankTable } from './table';
import type {
  Action,
  DeviceHistory,
  IActions,
  ICluster,
  IRank,
  Plots,
  Translate
} from './types';

export class ClusterView {
  readonly node: HTMLElement;
  private readonly charts: Charts;
  private readonly table: RankTable;
  private readonly title = element('span', { class: 'jdt-name' });
  private readonly state = element('span', { class: 'jdt-state' });
  private readonly announcer = new Announcer();
  private readonly progress = element('div', {
    class: 'jdt-progress',
    role: 'progressbar',
    'aria-valuemin': '0'
  });
  private readonly hang = element('div', { class: 'jdt-hang' });
  private readonly remarks = element('div', { class: 'jdt-remarks' });
  private readonly trouble = element('div', {
    role: 'alert',
    class: 'jdt-trouble'
  });
  private readonly log: RankLog;
  private readonly confirmation: Confirmation;
  private readonly chooser: Chooser;
  private readonly reset: HTMLButtonElement;
  private readonly buttons: HTMLElement;
  private cluster: ICluster | null = null;
  private stale = '';
  private isEnded = false;
  private frame = 0;
  private pause = 0;
  private pauseMs = 0;
  private drawnAt = 0;

  constructor(
    private readonly actions: IActions,
    private readonly trans: Translate,
    store: MetricStore
  ) {
    this.charts = new Charts(store, trans);
    this.log = new RankLog(trans, actions);
    this.confirmation = new Confirmation(trans);
    this.table = new RankTable(trans, rank => {
      this.log.open(this.cluster?.id ?? '', rank);
    });
    this.chooser = new Chooser(trans, (filter, order) => {
      this.table.select(filter, order);
      this.schedule();
    });
    this.table.onToggle = (): void => {
      this.schedule();
    };
    this.reset = this.makeReset();
    this.buttons = this.makeButtons();
    this.node = element(
      'div',
      { class: 'jdt-view' },
      element(
        'header',
        { class: 'jdt-header' },
        this.title,
        this.state,
        this.buttons
      ),
      this.confirmation.node,
      this.announcer.node,
      this.progress,
      this.trouble,
      this.hang,
      this.remarks,
      this.chooser.node,
      this.table.node,
      this.log.node,
      this.charts.node
    );
    for (const each of [this.progress, this.trouble, this.hang, this.remarks]) {
      each.hidden = true;
    }
    new ResizeObserver(() => {
      this.charts.invalidate();
      this.schedule();
    }).observe(this.node);
  }

  private makeButtons(): HTMLElement {
    const t = this.trans;
    const made = element(
      'span',
      { class: 'jdt-buttons', role: 'toolbar', 'aria-label': t('cluster') },
      button(
        t('Interrupt'),
        t('interrupt the cell that runs on the ranks'),
        () => {
          void this.ask('interrupt');
        }
      ),
      this.reset,
      button(t('Stop'), t('shut down the ranks'), () => {
        void this.askFirst(
          'stop',
          t('Shut down the ranks?'),
          t('The variables on the ranks are lost. Those of the notebook stay.'),
          t('Shut down')
        );
      })
    );
    const { enlarge } = this.actions;
    if (enlarge !== undefined) {
      made.append(button('⤢', t('open in the main area'), enlarge));
    }
    toolbarKeys(made);
    return made;
  }

  private makeReset(): HTMLButtonElement {
    const t = this.trans;
    return button(t('Reset'), '', () => {
      void this.askFirst(
        'reset',
        t('Restart all ranks?'),
        t('The variables on the ranks are lost. Those of the notebook stay.'),
        t('Restart')
      );
    });
  }

  /** A job's processes can be started anew only where the job was. */
  private offerReset(cluster: ICluster): void {
    this.reset.disabled = !isOwn(cluster);
    this.reset.title = isOwn(cluster)
      ? this.trans('restart all ranks; their variables are lost')
      : this.trans(
          'the ranks are processes of the job of %1, which only its owner can start again',
          cluster.job_file
        );
  }

  private async askFirst(
    action: Action,
    title: string,
    body: string,
    yes: string
  ): Promise<void> {
    if (await this.confirmation.ask(title, body, yes)) {
      await this.ask(action);
    }
  }

  private async ask(action: Action): Promise<void> {
    if (this.cluster === null) {
      return;
    }
    this.showTrouble('');
    try {
      await this.actions.ask(this.cluster.id, action);
    } catch (error) {
      this.showTrouble(error instanceof Error ? error.message : String(error));
    }
  }

  private showTrouble(text: string): void {
    setText(this.trouble, text);
    this.trouble.hidden = !text;
  }

  /** Take the cluster as it is now. */
  show(cluster: ICluster): void {
    this.cluster = cluster;
    this.schedule();
  }

  /** Draw what has come into the store. */
  showMetrics(): void {
    this.charts.invalidate();
    this.schedule();
  }

  takeDevices(devices: DeviceHistory): void {
    this.charts.takeDevices(devices);
    this.schedule();
  }

  /** Say that what is seen is of the past; empty: it is not. */
  setStale(reason: string): void {
    if (!this.isEnded) {
      this.stale = reason;
      this.node.classList.toggle('jdt-stale', Boolean(reason));
      this.buttons.hidden = Boolean(reason);
      this.schedule();
    }
  }

  /** Show how the cluster was last, with nothing to be asked of it. */
  end(reason: string): void {
    this.setStale(reason);
    this.isEnded = true;
    this.node.classList.add('jdt-ended');
    this.log.close();
    this.table.freeze();
    this.charts.freeze();
    this.schedule();
  }

  restyle(): void {
    this.charts.restyle();
  }

  /** Take what the user has set: which plots, and how often they are drawn. */
  configure(plots: Plots, secondsBetween: number): void {
    this.charts.choose(plots);
    this.pauseMs = 1000 * secondsBetween;
    this.schedule();
  }

  /** Draw at the next frame, however often it is asked for. */
  schedule(): void {
    if (this.frame !== 0 || this.pause !== 0) {
      return;
    }
    const wait = this.drawnAt + this.pauseMs - performance.now();
    if (wait > 0) {
      this.pause = window.setTimeout(() => {
        this.pause = 0;
        this.schedule();
      }, wait);
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
      setText(this.state, this.stale || summary(cluster, this.trans));
      this.offerReset(cluster);
      this.showProgress(cluster);
      const hang = this.hangLines(cluster);
      showLines(this.hang, hang);
      showLines(this.remarks, cluster.remarks);
      this.announcer.take([
        ...hang,
        ...cluster.remarks,
        this.activity(cluster)
      ]);
      this.chooser.show(cluster);
      this.table.show(cluster);
      this.charts.chooseRanks(this.chooser.chosen(cluster));
    }
    this.charts.draw();
  }

  private hangLines(cluster: ICluster): string[] {
    const lines = cluster.hang ?? [];
    const head = this.trans(
      "ranks wait for others that don't come; Interrupt ends the wait and keeps all variables:"
    );
    return lines.length > 0 ? [head, ...lines] : [];
  }

  /** What the ranks do, without the change between computing and waiting. */
  private activity(cluster: ICluster): string {
    if (this.stale) {
      return this.stale;
    }
    const isBusy = cluster.ranks.some(
      rank => rank.state === 'running' || rank.state === 'in collective'
    );
    const silent = cluster.ranks.filter(
      rank => rank.state === 'dead' || rank.state === 'not responding'
    );
    return [
      isBusy ? this.trans('the ranks run a cell') : this.trans('no cell runs'),
      ...silent.map(each =>
        this.trans('rank %1: %2', String(each.rank), this.trans(each.state))
      )
    ].join(', ');
  }

  private showProgress(cluster: ICluster): void {
    const slowest = slowestLoop(cluster);
    this.progress.hidden = slowest === null || Boolean(this.stale);
    if (slowest !== null) {
      const { done = 0, total = 1 } = slowest;
      const text = loopText(slowest, this.trans);
      setText(this.progress, text);
      this.progress.setAttribute('aria-valuenow', String(done));
      this.progress.setAttribute('aria-valuemax', String(total));
      this.progress.setAttribute('aria-valuetext', text);
      this.progress.style.setProperty(
        '--jdt-part',
        `${((100 * done) / total).toFixed(2)}%`
      );
    }
  }

  destroy(): void {
    cancelAnimationFrame(this.frame);
    window.clearTimeout(this.pause);
    this.log.close();
    this.announcer.destroy();
    this.charts.destroy();
  }
}

/** Whether the ranks are the cluster's own, not those of a batch job. */
export function isOwn(cluster: ICluster): boolean {
  return !cluster.job_file;
}

function showLines(node: HTMLElement, lines: string[]): void {
  setText(node, lines.join('\n'));
  node.hidden = lines.length === 0;
}

/**
 * The rank whose loop will take longest, of those in the loop that the first
 * is in; null where none knows its length. As Remarks.of_progress does it.
 */
export function slowestLoop(cluster: ICluster): IRank | null {
  const known = cluster.ranks.filter(rank => rank.total !== undefined);
  const loops = known.filter(rank => rank.total === known[0]?.total);
  loops.sort((a, b) => (b.left_s ?? 0) - (a.left_s ?? 0));
  return loops[0] ?? null;
}

function loopText(rank: IRank, trans: Translate): string {
  const count = (value: number): string => value.toLocaleString('en');
  const { done = 0, total = 0, left_s: left } = rank;
  return left === undefined
    ? trans('%1 of %2', count(done), count(total))
    : trans(
        '%1 of %2 · %3 left in this loop',
        count(done),
        count(total),
        duration(left)
      );
}

/** How many ranks are in which state, in words. */
export function summary(cluster: ICluster, trans: Translate): string {
  const counts = countsOf(cluster);
  const only = counts[0];
  if (counts.length === 1 && only !== undefined) {
    return `${rankCount(only.count, trans)} ${trans(only.state)}`;
  }
  return counts
    .map(each => `${String(each.count)} ${trans(each.state)}`)
    .join(' · ');
}
