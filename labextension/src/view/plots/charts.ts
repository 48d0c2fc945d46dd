/**
 * The plots of metrics and of processes, with their controls.
 *
 * Covers: which plots there are, smoothing, logarithmic axes, mean and range,
 * hidden ranks.
 * Does not cover: the lines of a plot (plotData), drawing one (plot).
 */

import type { Plots, Translate } from '../../protocol/types';
import type { ClusterStore } from '../../stores/clusterStore';
import { download, element } from '../dom';
import { Plot } from './plot';
import {
  DEVICE_PLOTS,
  deviceData,
  type IPlotData,
  type IRankSelection,
  metricData,
  plotCsv,
  reduceLines,
  titleWithUnit
} from './plotData';
import type { Quantity } from './scales';

/** More ranks than this are drawn as mean and range by default. */
const MAX_LINES = 8;
const MAX_METRICS = 24;
const SMOOTHING_WEIGHTS = ['0', '0.6', '0.9', '0.97'];

/** One plot, before it is drawn. */
interface IPlotSpec {
  title: string;
  quantity: Quantity;
  isTime: boolean;
  /** Its place among the plots of devices. */
  order: number;
  /** Its lines, with a weight for smoothing; null without data. */
  data: (weight: number) => IPlotData | null;
}

/** All plots of one cluster. */
export class Charts {
  readonly node: HTMLElement;
  private readonly metrics = makeSection('jdt-metrics');
  private readonly devices = makeSection('jdt-devices');
  private readonly meanBox = element('input', {
    type: 'checkbox',
    class: 'jdt-mean'
  });
  private readonly meanLabel: HTMLElement;
  private readonly note = element('p', { class: 'jdt-muted' });
  private readonly hidden = new Set<number>();
  private selection: IRankSelection = {
    hidden: this.hidden,
    filter: null,
    silent: new Set()
  };
  private shownPlots: Plots = 'all';
  private isLogarithmic = false;
  /** null: not set by the user. */
  private isMean: boolean | null = null;
  private weight = 0;
  private isDirty = false;

  constructor(
    private readonly store: ClusterStore,
    private readonly trans: Translate
  ) {
    this.meanLabel = element(
      'label',
      {},
      this.meanBox,
      trans('mean and range over ranks')
    );
    this.meanBox.addEventListener('change', () => {
      this.isMean = this.meanBox.checked;
      this.redraw();
    });
    this.metrics.head.append(
      element('h4', {}, trans('metrics')),
      ...this.makeMetricControls()
    );
    this.devices.head.append(element('h4', {}, trans('processes')));
    this.metrics.node.append(this.note);
    this.node = element(
      'div',
      { class: 'jdt-charts' },
      element('div', { class: 'jdt-controls' }, this.meanLabel),
      this.metrics.node,
      this.devices.node
    );
  }

  private makeMetricControls(): HTMLElement[] {
    const logBox = element('input', { type: 'checkbox' });
    logBox.addEventListener('change', () => {
      this.isLogarithmic = logBox.checked;
      this.redraw();
    });
    const smoothing = element('select', {
      'aria-label': this.trans('smoothing')
    });
    for (const value of SMOOTHING_WEIGHTS) {
      const text =
        value === '0'
          ? this.trans('no smoothing')
          : this.trans('smoothing %1', value);
      smoothing.append(element('option', { value }, text));
    }
    smoothing.addEventListener('change', () => {
      this.weight = Number(smoothing.value);
      this.redraw();
    });
    return [
      element('label', { title: this.trans('log scale') }, logBox, 'log'),
      element('label', {}, smoothing)
    ];
  }

  private redraw(): void {
    this.isDirty = true;
    this.draw();
  }

  /** Show plots of metrics, of devices, both or neither. */
  setPlots(plots: Plots): void {
    this.shownPlots = plots;
    this.node.hidden = plots === 'none';
    this.redraw();
  }

  /** Set the ranks that match the filter, and those that report no values. */
  setRanks(ranks: Omit<IRankSelection, 'hidden'>): void {
    const keyOf = ({ filter, silent }: typeof ranks): string =>
      JSON.stringify([filter && [...filter], [...silent]]);
    this.isDirty ||= keyOf(ranks) !== keyOf(this.selection);
    this.selection = { hidden: this.hidden, ...ranks };
  }

  /** Disable the controls. */
  freeze(): void {
    for (const each of this.node.querySelectorAll('input, select')) {
      each.setAttribute('disabled', '');
    }
  }

  /** Note that the store has changed. */
  invalidate(): void {
    this.isDirty = true;
  }

  /** Draw if anything has changed; called once per frame at most. */
  draw(): void {
    if (!this.isDirty || this.node.clientWidth === 0) {
      return;
    }
    this.isDirty = false;
    const { metrics, devices } = this.store;
    const ranks = new Set([
      ...devices.byRank.keys(),
      ...[...metrics.byName.values()].flatMap(each => [...each.curves.keys()])
    ]);
    this.meanLabel.hidden = ranks.size < 2;
    this.meanBox.checked = this.isMean ?? ranks.size > MAX_LINES;
    this.drawMetrics([...metrics.byName.keys()]);
    this.devices.node.hidden =
      devices.byRank.size === 0 || this.shownPlots === 'metrics';
    if (!this.devices.node.hidden) {
      this.drawDevices();
    }
  }

  private drawMetrics(names: string[]): void {
    const latest = names.slice(-MAX_METRICS);
    for (const [name, plot] of this.metrics.plots) {
      if (!latest.includes(name)) {
        plot.destroy();
        plot.node.remove();
        this.metrics.plots.delete(name);
      }
    }
    this.metrics.node.hidden =
      latest.length === 0 || this.shownPlots === 'devices';
    const omitted = names.length - latest.length;
    this.note.textContent =
      omitted > 0
        ? this.trans(
            '%1 more metrics are not drawn; cluster.metrics has them',
            String(omitted)
          )
        : '';
    for (const name of this.metrics.node.hidden ? [] : latest) {
      this.drawPlot(this.metrics, {
        title: name,
        quantity: 'metric',
        isTime: false,
        order: 0,
        data: weight => {
          const series = this.store.metrics.byName.get(name);
          return series === undefined
            ? null
            : metricData(series, weight, this.selection, this.trans);
        }
      });
    }
  }

  private drawDevices(): void {
    DEVICE_PLOTS.forEach((plot, order) => {
      this.drawPlot(this.devices, {
        title: plot.title,
        quantity: plot.quantity,
        isTime: true,
        order,
        data: () =>
          deviceData(this.store.devices, plot, this.selection, this.trans)
      });
    });
  }

  private drawPlot({ plots, grid }: ISection, spec: IPlotSpec): void {
    const data = spec.data(this.weight);
    if (data === null) {
      return;
    }
    let plot = plots.get(spec.title);
    if (plot === undefined) {
      plot = this.makePlot(spec);
      plots.set(spec.title, plot);
      grid.append(plot.node);
    }
    plot.resize(plot.node.clientWidth);
    const reduction = {
      isMean: this.meanBox.checked,
      mayBeCommon: !spec.isTime
    };
    plot.show(
      reduceLines(data, reduction, this.trans),
      this.isLogarithmic && !spec.isTime
    );
  }

  private makePlot({ title, quantity, isTime, order, data }: IPlotSpec): Plot {
    const plot = new Plot(
      {
        title,
        quantity,
        isTime,
        onRank: rank => {
          if (!this.hidden.delete(rank)) {
            this.hidden.add(rank);
          }
          this.redraw();
        },
        onDownload: () => {
          const found = data(0);
          if (found !== null) {
            const name = titleWithUnit(title, found.unit);
            download(`${name}.csv`, plotCsv(found, isTime ? 'time_s' : 'step'));
          }
        }
      },
      this.trans
    );
    plot.node.style.order = String(order);
    return plot;
  }

  private get plots(): Plot[] {
    const sections = [this.metrics, this.devices];
    return sections.flatMap(each => [...each.plots.values()]);
  }

  restyle(): void {
    this.plots.forEach(plot => {
      plot.restyle();
    });
    this.redraw();
  }

  destroy(): void {
    this.plots.forEach(plot => {
      plot.destroy();
    });
  }
}

interface ISection {
  node: HTMLElement;
  head: HTMLElement;
  grid: HTMLElement;
  /** By title. */
  plots: Map<string, Plot>;
}

function makeSection(name: string): ISection {
  const head = element('div', { class: 'jdt-controls' });
  const grid = element('div', { class: 'jdt-plots' });
  const node = element('section', { class: name, hidden: '' }, head, grid);
  return { node, head, grid, plots: new Map() };
}
