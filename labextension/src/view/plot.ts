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

  constructor(readonly options: IPlotOptions) {
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
      const stays = this.isZoomed();
      this.plot.setData(columns, !stays);
      if (stays) {
        this.plot.redraw();
      }
    }
    this.extent = [data.x[0], data.x.at(-1)];
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

  /** Whether a person has zoomed in: x then ends elsewhere than the data. */
  private isZoomed(): boolean {
    const { min, max } = this.plot?.scales.x ?? {};
    const [first, last] = this.extent;
    return (
      first !== undefined &&
      last !== undefined &&
      first < last &&
      typeof min === 'number' &&
      typeof max === 'number' &&
      (min > first || max < last)
    );
  }

  /** Of x, when it was drawn last. */
  private extent: [number | undefined, number | undefined] = [
    undefined,
    undefined
  ];

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
      ...(data.band ? { bands: [{ series: [1, 2], fill: colours.band }] } : {})
    };
    this.plot = new uPlot(options, columns, this.node);
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
