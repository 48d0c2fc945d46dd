/**
 * One plot: lines over a common x.
 *
 * Covers: uPlot with this package's colours, band, zoom, hover, size.
 * Does not cover: which lines (charts).
 */

import uPlot from 'uplot';

import { colourOfRank, palette } from './colours';
import { element, short } from './dom';
import type { Line } from './series';

const HEIGHT = 150;

export interface ILines {
  x: number[];
  lines: { label: string; rank: number | null; values: Line }[];
  band?: { least: Line; greatest: Line };
}

export interface IPlotOptions {
  title: string;
  log: boolean;
  /** Whether x is seconds since the epoch. */
  time: boolean;
}

/** A plot that is made anew only when its lines are others. */
export class Plot {
  readonly node: HTMLElement;
  private plot: uPlot | null = null;
  private made = '';
  private width = 0;

  constructor(private readonly options: IPlotOptions) {
    this.node = element('div', {
      class: 'jdt-plot',
      role: 'img',
      'aria-label': options.title
    });
  }

  show(data: ILines, log: boolean): void {
    const key = JSON.stringify([data.lines.map(each => each.label), log]);
    const columns: uPlot.AlignedData = [
      data.x,
      ...(data.band ? [data.band.greatest, data.band.least] : []),
      ...data.lines.map(each => each.values)
    ];
    if (this.plot === null || key !== this.made) {
      this.make(data, columns, log);
      this.made = key;
    } else {
      // A person who has zoomed in stays there.
      this.plot.setData(columns, !this.isZoomed());
    }
    this.describe(data);
  }

  /** Say the last values to who can't see the plot. */
  private describe(data: ILines): void {
    const said = data.lines.slice(0, 8).map(line => {
      const known = line.values.filter(value => value !== null);
      const last = known.at(-1);
      return last === undefined ? '' : `${line.label}: ${short(last)}`;
    });
    this.node.setAttribute(
      'aria-label',
      `${this.options.title}. ${said.filter(Boolean).join(', ')}`
    );
  }

  private isZoomed(): boolean {
    const plot = this.plot;
    const x = plot?.data[0];
    if (!plot || !x || x.length < 2) {
      return false;
    }
    const { min, max } = plot.scales.x ?? {};
    return (
      min !== undefined &&
      max !== undefined &&
      (min > (x[0] ?? min) || max < (this.lastX ?? max))
    );
  }

  private lastX: number | undefined;

  private make(data: ILines, columns: uPlot.AlignedData, log: boolean): void {
    this.plot?.destroy();
    const colours = palette(this.node);
    const axis = {
      stroke: colours.text,
      grid: { stroke: colours.grid, width: 1 },
      ticks: { stroke: colours.grid, width: 1 },
      font: '11px system-ui, sans-serif'
    };
    const label = (_: uPlot, value: number | null): string =>
      value === null ? '–' : short(value);
    const hidden = { stroke: 'transparent', points: { show: false } };
    const options: uPlot.Options = {
      width: Math.max(this.width, 200),
      height: HEIGHT,
      title: this.options.title,
      legend: { live: true },
      cursor: { drag: { x: true, y: false }, focus: { prox: 16 } },
      focus: { alpha: 0.3 },
      scales: {
        x: { time: this.options.time },
        // uPlot's enum exists only in its types.
        // eslint-disable-next-line @typescript-eslint/no-unsafe-enum-assignment
        y: log ? { distr: 3 } : {}
      },
      axes: [
        { ...axis, size: 28 },
        {
          ...axis,
          size: 56,
          values: (_: uPlot, splits: (number | null)[]) =>
            splits.map(value => (value === null ? '' : short(value)))
        }
      ],
      series: [
        this.options.time ? {} : { label: 'step' },
        ...(data.band
          ? [
              { label: 'max', value: label, ...hidden },
              { label: 'min', value: label, ...hidden }
            ]
          : []),
        ...data.lines.map(each => ({
          label: each.label,
          value: label,
          stroke: each.rank === null ? colours.mean : colourOfRank(each.rank),
          width: 1.5,
          spanGaps: true,
          points: { show: data.x.length < 3 }
        }))
      ],
      ...(data.band ? { bands: [{ series: [1, 2], fill: colours.band }] } : {}),
      hooks: {
        setData: [
          (plot: uPlot): void => {
            this.lastX = plot.data[0].at(-1);
          }
        ]
      }
    };
    this.plot = new uPlot(options, columns, this.node);
    this.lastX = data.x.at(-1);
  }

  resize(width: number): void {
    if (width > 0 && width !== this.width) {
      this.width = width;
      this.plot?.setSize({ width, height: HEIGHT });
    }
  }

  /** Forget the colours: the theme has changed. */
  restyle(): void {
    this.made = '';
  }

  destroy(): void {
    this.plot?.destroy();
    this.plot = null;
  }
}
