/**
 * The plots of metrics and of processes, with how they are looked at.
 *
 * Covers: which lines a plot has, smoothing, logarithms, mean and range, hidden
 * ranks, values as CSV.
 * Does not cover: drawing (plot), the metrics (series).
 */

import { download, element } from './dom';
import type { ILines } from './plot';
import { Plot, titleOf } from './plot';
import { type Quantity, unitOf } from './scales';
import type { MetricStore, Series } from './series';
import { band, commonOf, smooth } from './series';
import type { DeviceHistory, Plots, Translate } from './types';

/** More ranks than this are drawn as their mean with a band, at first. */
const MOST_LINES = 8;
const MOST_PLOTS = 24;
const SMOOTHING = ['0', '0.6', '0.9', '0.97'];
const DEVICE_POINTS = 600;

interface IDevice {
  at: number;
  title: string;
  quantity: Quantity;
}

/** Columns of a device's history, with how they are drawn. */
const DEVICES: IDevice[] = [
  { at: 5, title: 'steps/s', quantity: 'rate' },
  { at: 3, title: 'GPU use (%)', quantity: 'percent' },
  { at: 4, title: 'GPU memory', quantity: 'bytes' },
  { at: 1, title: 'CPU (% of a core)', quantity: 'percent' },
  { at: 2, title: 'memory', quantity: 'bytes' }
];

/** All plots of one cluster. */
export class Charts {
  readonly node: HTMLElement;
  private readonly plots = new Map<string, Plot>();
  private readonly metrics = section('jdt-metrics');
  private readonly devices = section('jdt-devices');
  private readonly mean = element('input', {
    type: 'checkbox',
    class: 'jdt-mean'
  });
  private readonly meanLabel: HTMLElement;
  private readonly more = element('p', { class: 'jdt-quiet' });
  private readonly hidden = new Set<number>();
  private readonly known = new Set<number>();
  private readonly history = new Map<number, (number | null)[][]>();
  private filter: ReadonlySet<number> | null = null;
  private wanted: Plots = 'all';
  private isLog = false;
  private isMean: boolean | null = null;
  private weight = 0;
  private isDirty = false;

  constructor(
    private readonly store: MetricStore,
    private readonly trans: Translate
  ) {
    this.meanLabel = element(
      'label',
      {},
      this.mean,
      trans('mean and range over ranks')
    );
    this.mean.addEventListener('change', () => {
      this.isMean = this.mean.checked;
      this.change();
    });
    this.metrics.head.append(
      element('h4', {}, trans('metrics')),
      ...this.metricControls()
    );
    this.devices.head.append(element('h4', {}, trans('processes')));
    this.metrics.node.append(this.more);
    this.node = element(
      'div',
      { class: 'jdt-charts' },
      element('div', { class: 'jdt-controls' }, this.meanLabel),
      this.metrics.node,
      this.devices.node
    );
  }

  private metricControls(): HTMLElement[] {
    const log = element('input', { type: 'checkbox' });
    log.addEventListener('change', () => {
      this.isLog = log.checked;
      this.change();
    });
    const smoothing = element('select', {
      'aria-label': this.trans('smoothing')
    });
    for (const value of SMOOTHING) {
      const text =
        value === '0'
          ? this.trans('no smoothing')
          : this.trans('smoothing %1', value);
      smoothing.append(element('option', { value }, text));
    }
    smoothing.addEventListener('change', () => {
      this.weight = Number(smoothing.value);
      this.change();
    });
    return [
      element('label', { title: this.trans('log scale') }, log, 'log'),
      element('label', {}, smoothing)
    ];
  }

  private change(): void {
    this.isDirty = true;
    this.draw();
  }

  takeDevices(devices: DeviceHistory): void {
    for (const [rank, points] of Object.entries(devices)) {
      const history = this.history.get(Number(rank)) ?? [];
      const last = history.at(-1)?.[0] ?? 0;
      history.push(...points.filter(point => (point[0] ?? 0) > last));
      history.splice(0, history.length - DEVICE_POINTS);
      this.history.set(Number(rank), history);
    }
    this.isDirty = true;
  }

  /** Draw metrics, devices, both or neither. */
  choose(plots: Plots): void {
    this.wanted = plots;
    this.node.hidden = plots === 'none';
    this.change();
  }

  /** Draw only these ranks; null draws all. */
  chooseRanks(ranks: ReadonlySet<number> | null): void {
    const key = (set: typeof ranks): string => (set ? [...set].join() : 'all');
    this.isDirty ||= key(ranks) !== key(this.filter);
    this.filter = ranks;
  }

  /** Leave the plots as they are for good. */
  freeze(): void {
    for (const each of this.node.querySelectorAll('input, select')) {
      each.setAttribute('disabled', '');
    }
  }

  invalidate(): void {
    this.isDirty = true;
  }

  /** Draw what has changed; called once per frame at most. */
  draw(): void {
    if (!this.isDirty || this.node.clientWidth === 0) {
      return;
    }
    this.isDirty = false;
    const names = [...this.store.byName.keys()];
    const shown = names.slice(-MOST_PLOTS); // those that were logged last
    for (const [key, plot] of this.plots) {
      if (!plot.options.time && !shown.includes(key)) {
        plot.destroy();
        plot.node.remove();
        this.plots.delete(key);
      }
    }
    this.metrics.node.hidden = shown.length === 0 || this.wanted === 'devices';
    for (const name of this.metrics.node.hidden ? [] : shown) {
      this.show(name, 'metric', false, weight => this.linesOf(name, weight));
    }
    this.more.textContent =
      names.length > shown.length
        ? this.trans(
            '%1 more metrics are not drawn; cluster.metrics has them',
            String(names.length - shown.length)
          )
        : '';
    this.devices.node.hidden =
      this.history.size === 0 || this.wanted === 'metrics';
    for (const device of this.devices.node.hidden ? [] : DEVICES) {
      this.show(device.title, device.quantity, true, () =>
        this.devicesLines(device)
      );
    }
    this.meanLabel.hidden = this.known.size < 2;
  }

  private show(
    title: string,
    quantity: Quantity,
    time: boolean,
    linesOf: (weight: number) => ILines | null
  ): void {
    const data = linesOf(this.weight);
    if (data === null) {
      return;
    }
    const key = time ? `${title} (device)` : title;
    let plot = this.plots.get(key);
    if (plot === undefined) {
      plot = new Plot(
        {
          title,
          quantity,
          time,
          onRank: rank => {
            if (!this.hidden.delete(rank)) {
              this.hidden.add(rank);
            }
            this.change();
          },
          onDownload: () => {
            const lines = linesOf(0);
            if (lines !== null) {
              const name = titleOf(title, lines.unit);
              download(`${name}.csv`, csvOf(lines, time ? 'time_s' : 'step'));
            }
          }
        },
        this.trans
      );
      this.plots.set(key, plot);
      (time ? this.devices : this.metrics).grid.append(plot.node);
      if (time) {
        const at = DEVICES.findIndex(device => device.title === title);
        plot.node.style.order = String(at);
      }
    }
    plot.resize(plot.node.clientWidth);
    plot.show(this.asWanted(data, !time), this.isLog && !time);
  }

  private linesOf(name: string, weight: number): ILines | null {
    const series: Series | undefined = this.store.byName.get(name);
    if (series === undefined) {
      return null;
    }
    const ranks = [...series.lines.keys()].sort((a, b) => a - b);
    const lines = this.seen(ranks).map(rank => ({
      label: this.trans('rank %1', String(rank)),
      rank,
      values: smooth(series.lines.get(rank) ?? [], weight)
    }));
    return { x: series.x, lines, hidden: this.hiddenOf(ranks) };
  }

  private seen(ranks: number[]): number[] {
    ranks.forEach(rank => this.known.add(rank));
    return ranks.filter(
      rank => !this.hidden.has(rank) && (this.filter?.has(rank) ?? true)
    );
  }

  private hiddenOf(ranks: number[]): number[] {
    return ranks.filter(rank => this.hidden.has(rank));
  }

  private devicesLines({ at: column, quantity }: IDevice): ILines | null {
    const unit = quantity === 'bytes' ? unitOf(this.most(column)) : null;
    const times = new Set<number>();
    const byRank = new Map<number, Map<number, number>>();
    for (const [rank, points] of this.history) {
      const values = new Map<number, number>();
      for (const point of points) {
        // Ranks report at different moments: a second is what they share.
        const time = Math.round(point[0] ?? 0);
        const value = point[column] ?? null;
        if (value !== null) {
          values.set(time, value / (unit?.size ?? 1));
          times.add(time);
        }
      }
      if (values.size > 0) {
        byRank.set(rank, values);
      }
    }
    if (byRank.size === 0) {
      return null;
    }
    const ranks = [...byRank.keys()].sort((a, b) => a - b);
    const x = [...times].sort((a, b) => a - b);
    const lines = this.seen(ranks).map(rank => ({
      label: this.trans('rank %1', String(rank)),
      rank,
      values: x.map(time => byRank.get(rank)?.get(time) ?? null)
    }));
    return { x, lines, hidden: this.hiddenOf(ranks), unit: unit?.name };
  }

  /** The largest value in a column of all ranks' histories. */
  private most(column: number): number {
    let most = 0;
    for (const points of this.history.values()) {
      for (const point of points) {
        most = Math.max(most, point[column] ?? 0);
      }
    }
    return most;
  }

  private asWanted(data: ILines, mayBeCommon: boolean): ILines {
    const { x, lines, hidden, unit } = data;
    const isMean = this.isMean ?? this.known.size > MOST_LINES;
    this.mean.checked = isMean;
    if (lines.length < 2) {
      return data;
    }
    const values = lines.map(each => each.values);
    const common = mayBeCommon ? commonOf(values) : null;
    if (common !== null) {
      const label = hidden.length
        ? this.trans('all others')
        : this.trans('all ranks');
      return { x, lines: [{ label, rank: null, values: common }], hidden };
    }
    if (!isMean) {
      return data;
    }
    const { mean, least, greatest } = band(values);
    const label = this.trans('mean');
    return {
      x,
      lines: [{ label, rank: null, values: mean }],
      band: { least, greatest },
      hidden: [],
      unit
    };
  }

  restyle(): void {
    for (const plot of this.plots.values()) {
      plot.restyle();
    }
    this.change();
  }

  destroy(): void {
    for (const plot of this.plots.values()) {
      plot.destroy();
    }
    this.plots.clear();
  }
}

interface ISection {
  node: HTMLElement;
  head: HTMLElement;
  grid: HTMLElement;
}

function section(name: string): ISection {
  const head = element('div', { class: 'jdt-controls' });
  const grid = element('div', { class: 'jdt-plots' });
  const node = element('section', { class: name, hidden: '' }, head, grid);
  return { node, head, grid };
}

/** All values of a plot, a row per place of x. */
function csvOf({ x, lines }: ILines, name: string): string {
  const rows = x.map((each, at) =>
    [each, ...lines.map(line => line.values[at] ?? '')].join(',')
  );
  return [[name, ...lines.map(line => line.label)].join(','), ...rows, ''].join(
    '\n'
  );
}
