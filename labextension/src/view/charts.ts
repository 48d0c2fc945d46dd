/**
 * The plots of metrics and devices, with how they are looked at.
 */

import { button, element } from './dom';
import { colourOfRank } from './colours';
import type { ILines } from './plot';
import { Plot } from './plot';
import type { MetricStore, Series } from './series';
import { band, smooth } from './series';
import type { DeviceHistory, Plots, Translate } from './types';

/** More ranks than this are drawn as their mean with a band, at first. */
const MOST_LINES = 8;
const MOST_PLOTS = 24;
const SMOOTHING = ['0', '0.6', '0.9', '0.97'];
const DEVICE_POINTS = 600;

/** Columns of a device's history, with how they are drawn. */
const DEVICES = [
  { at: 5, title: 'steps/s', scale: 1 },
  { at: 3, title: 'GPU use (%)', scale: 1 },
  { at: 4, title: 'GPU memory (GiB)', scale: 2 ** -30 },
  { at: 1, title: 'CPU (% of a core)', scale: 1 },
  { at: 2, title: 'memory (GiB)', scale: 2 ** -30 }
] as const;

/** All plots of one cluster. */
export class Charts {
  readonly node: HTMLElement;
  private readonly plots = new Map<string, Plot>();
  private readonly grid: HTMLElement;
  private readonly ranks: HTMLElement;
  private readonly more: HTMLElement;
  private readonly hidden = new Set<number>();
  private readonly known = new Set<number>();
  private readonly history = new Map<number, (number | null)[][]>();
  private isLog = false;
  private isMean: boolean | null = null;
  private weight = 0;
  private isDirty = false;

  constructor(
    private readonly store: MetricStore,
    private readonly trans: Translate
  ) {
    this.grid = element('div', { class: 'jdt-plots' });
    this.ranks = element('div', { class: 'jdt-ranks-shown' });
    this.more = element('p', { class: 'jdt-quiet' });
    this.node = element(
      'div',
      { class: 'jdt-charts' },
      this.controls(),
      this.ranks,
      this.grid,
      this.more
    );
  }

  private controls(): HTMLElement {
    const log = element('input', { type: 'checkbox' });
    log.addEventListener('change', () => {
      this.isLog = log.checked;
      this.change();
    });
    const mean = element('input', { type: 'checkbox', class: 'jdt-mean' });
    mean.addEventListener('change', () => {
      this.isMean = mean.checked;
      this.change();
    });
    const smoothing = element('select', {
      'aria-label': this.trans('smoothing')
    });
    for (const value of SMOOTHING) {
      smoothing.append(
        element(
          'option',
          { value },
          value === '0' ? this.trans('no smoothing') : value
        )
      );
    }
    smoothing.addEventListener('change', () => {
      this.weight = Number(smoothing.value);
      this.change();
    });
    return element(
      'div',
      { class: 'jdt-controls' },
      element('label', {}, mean, this.trans('mean and range over ranks')),
      element('label', {}, log, this.trans('log scale')),
      smoothing
    );
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
    const hides = { all: '', metrics: 'devices', devices: 'metrics', none: '' };
    this.node.hidden = plots === 'none';
    this.grid.dataset.hides = hides[plots];
    this.change();
  }

  invalidate(): void {
    this.isDirty = true;
  }

  /** Draw what has changed; called once per frame at most. */
  draw(): void {
    if (!this.isDirty || this.grid.clientWidth === 0) {
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
    for (const name of shown) {
      const series = this.store.byName.get(name);
      if (series !== undefined) {
        this.show(name, false, this.linesOf(series));
      }
    }
    this.more.textContent =
      names.length > shown.length
        ? this.trans(
            '%1 more metrics are not drawn; cluster.metrics has them',
            String(names.length - shown.length)
          )
        : '';
    for (const device of DEVICES) {
      const lines = this.devicesLines(device.at, device.scale);
      if (lines !== null) {
        this.show(device.title, true, lines);
      }
    }
    this.showRanks();
  }

  private show(title: string, time: boolean, data: ILines): void {
    const key = time ? `${title} (device)` : title;
    let plot = this.plots.get(key);
    if (plot === undefined) {
      plot = new Plot({ title, log: this.isLog, time });
      plot.node.classList.toggle('jdt-device', time);
      this.plots.set(key, plot);
      this.grid.append(plot.node);
    }
    plot.resize(plot.node.clientWidth);
    plot.show(data, this.isLog && !time);
  }

  private linesOf(series: Series): ILines {
    const ranks = [...series.lines.keys()].sort((a, b) => a - b);
    ranks.forEach(rank => this.known.add(rank));
    const seen = ranks.filter(rank => !this.hidden.has(rank));
    const lines = seen.map(rank => ({
      label: this.trans('rank %1', String(rank)),
      rank,
      values: smooth(series.lines.get(rank) ?? [], this.weight)
    }));
    return this.asWanted(series.x, lines);
  }

  private devicesLines(column: number, scale: number): ILines | null {
    const times = new Set<number>();
    const byRank = new Map<number, Map<number, number>>();
    for (const [rank, points] of this.history) {
      if (this.hidden.has(rank)) {
        continue;
      }
      const values = new Map<number, number>();
      for (const point of points) {
        // Ranks tell at moments of their own: a second is what they share.
        const time = Math.round(point[0] ?? 0);
        const value = point[column] ?? null;
        if (value !== null) {
          values.set(time, value * scale);
          times.add(time);
        }
      }
      if (values.size > 0) {
        byRank.set(rank, values);
        this.known.add(rank);
      }
    }
    if (byRank.size === 0) {
      return null;
    }
    const x = [...times].sort((a, b) => a - b);
    const lines = [...byRank].map(([rank, values]) => ({
      label: this.trans('rank %1', String(rank)),
      rank,
      values: x.map(time => values.get(time) ?? null)
    }));
    return this.asWanted(x, lines);
  }

  private asWanted(x: number[], lines: ILines['lines']): ILines {
    if (!(this.isMean ?? lines.length > MOST_LINES) || lines.length < 2) {
      return { x, lines };
    }
    const { mean, least, greatest } = band(lines.map(each => each.values));
    const label = this.trans('mean');
    return {
      x,
      lines: [{ label, rank: null, values: mean }],
      band: { least, greatest }
    };
  }

  /** One button per rank that hides it; for many ranks the band does. */
  private showRanks(): void {
    const ranks = [...this.known].sort((a, b) => a - b);
    if (
      ranks.length < 2 ||
      ranks.length > 64 ||
      this.ranks.childElementCount === ranks.length
    ) {
      return;
    }
    this.ranks.replaceChildren(
      ...ranks.map(rank => {
        const made = button(
          String(rank),
          this.trans('show or hide rank %1', String(rank)),
          () => {
            const hide = !this.hidden.delete(rank);
            if (hide) {
              this.hidden.add(rank);
            }
            made.setAttribute('aria-pressed', String(!hide));
            this.change();
          }
        );
        made.classList.add('jdt-rank-button');
        made.style.setProperty('--jdt-colour', colourOfRank(rank));
        made.setAttribute('aria-pressed', 'true');
        return made;
      })
    );
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
