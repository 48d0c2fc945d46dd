/**
 * One plot: lines over a common x.
 *
 * Covers: uPlot with this package's colours, band, zoom, pointer, keys, size,
 * what stands around it.
 * Does not cover: which lines (charts), axes (scales), values as text (legend).
 */

import uPlot from 'uplot';

import { colourOfRank, dashOfRank, palette } from './colours';
import { button, element, setText, short } from './dom';
import { Legend } from './legend';
import {
  before,
  type Quantity,
  rangeOf,
  secondsBetween,
  ticksBefore
} from './scales';
import type { Line } from './series';
import type { Translate } from './types';

const HEIGHTS = { least: 130, most: 220, large: 380 };
const TICK_PX = 64;
const LETTER_PX = 6.5;
// uPlot's enum exists only in its types.
// eslint-disable-next-line @typescript-eslint/no-unsafe-enum-assignment
const LOGARITHMIC: uPlot.Scale = { distr: 3 };
/** Presses of a key from one end of the plot to the other. */
const KEY_STEPS = 50;

export interface ILines {
  x: number[];
  lines: { label: string; rank: number | null; values: Line }[];
  band?: { least: Line; greatest: Line };
  /** Ranks that the user has hidden. */
  hidden: number[];
  /** Of the values; absent where the title says it. */
  unit?: string | undefined;
}

/** A title with the unit of what is drawn. */
export function titleOf(title: string, unit?: string): string {
  return unit === undefined ? title : `${title} (${unit})`;
}

export interface IPlotOptions {
  title: string;
  quantity: Quantity;
  /** Whether x is seconds since the epoch. */
  time: boolean;
  onRank: (rank: number) => void;
  onDownload: () => void;
}

/** A plot that is made again only when its lines are others. */
export class Plot {
  readonly node: HTMLElement;
  private readonly canvas = element('div');
  private readonly title = element('span', { class: 'jdt-plot-title' });
  private readonly announced = element('span', {
    class: 'jdt-said',
    'aria-live': 'polite'
  });
  private readonly legend: Legend;
  private readonly enlarge: HTMLButtonElement;
  private plot: uPlot | null = null;
  private data: ILines | null = null;
  private made = '';
  private width = 0;
  private isLarge = false;

  constructor(
    readonly options: IPlotOptions,
    private readonly trans: Translate
  ) {
    this.legend = new Legend(trans, options.onRank);
    this.enlarge = button('⤢', '', () => {
      this.setLarge(!this.isLarge);
    });
    const download = button('⤓', trans('download as CSV'), options.onDownload);
    this.node = element(
      'div',
      {
        class: 'jdt-plot',
        role: 'group',
        tabindex: '0',
        'data-lm-suppress-shortcuts': 'true',
        'aria-label': options.title
      },
      element('header', {}, this.title, download, this.enlarge),
      this.canvas,
      this.legend.node,
      this.announced
    );
    this.setLarge(false);
    this.node.addEventListener('keydown', event => {
      this.onKey(event);
    });
  }

  private setLarge(isLarge: boolean): void {
    this.isLarge = isLarge;
    this.node.classList.toggle('jdt-large', isLarge);
    this.enlarge.title = isLarge
      ? this.trans('make this plot small again')
      : this.trans('enlarge this plot');
    this.enlarge.setAttribute('aria-label', this.enlarge.title);
    this.enlarge.setAttribute('aria-pressed', String(isLarge));
    this.resize(this.node.clientWidth);
  }

  show(data: ILines, log: boolean): void {
    this.data = data;
    const { unit } = data;
    const labels = data.lines.map(each => each.label);
    const key = JSON.stringify([labels, log, unit]);
    const title = titleOf(this.options.title, unit);
    setText(this.title, title);
    const columns: uPlot.AlignedData = [
      data.x,
      ...(data.band ? [data.band.greatest, data.band.least] : []),
      ...data.lines.map(each => each.values)
    ];
    if (this.plot === null || key !== this.made) {
      this.make(data, columns, log);
      this.made = key;
    } else {
      const stays = this.isZoomed();
      this.plot.setData(columns, !stays);
      if (stays) {
        this.plot.redraw();
      }
    }
    this.extent = [data.x[0], data.x.at(-1)];
    this.showValues();
    this.node.setAttribute(
      'aria-label',
      `${title}. ${this.legend.words(data, null)}`
    );
  }

  /** Show the values under the pointer, or the last. */
  private showValues(): void {
    if (this.data !== null) {
      const at = this.plot?.cursor.idx ?? null;
      this.legend.show(this.data, at, at === null ? '' : this.placeOf(at));
    }
  }

  private placeOf(at: number): string {
    const x = this.data?.x[at] ?? 0;
    return this.options.time
      ? before((this.extent[1] ?? x) - x)
      : this.trans('step %1', short(x));
  }

  /** Whether the user has zoomed in: x then ends elsewhere than the data. */
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
    const { quantity, time } = this.options;
    const colours = palette(this.node);
    const axis = {
      stroke: colours.text,
      grid: { stroke: colours.grid, width: 1 },
      ticks: { stroke: colours.grid, width: 1 },
      font: '11px system-ui, sans-serif'
    };
    const hidden = { stroke: 'transparent', points: { show: false } };
    const own = ({ rank }: { rank: number | null }): Partial<uPlot.Series> =>
      rank === null
        ? { stroke: data.band ? colours.mean : colours.common, width: 2 }
        : { stroke: colourOfRank(rank), dash: dashOfRank(rank), width: 1.75 };
    const options: uPlot.Options = {
      width: Math.max(this.width, 120),
      height: this.height,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, focus: { prox: 16 } },
      focus: { alpha: 0.3 },
      scales: {
        x: {
          time: false,
          ...(time
            ? { range: (_: uPlot, min, max) => secondsBetween(min, max) }
            : {})
        },
        y: log
          ? LOGARITHMIC
          : {
              range: (_: uPlot, min: number | null, max: number | null) =>
                min === null || max === null
                  ? [0, 1]
                  : rangeOf(quantity, min, max)
            }
      },
      axes: [
        { ...axis, size: 28, ...(time ? this.timeTicks() : {}) },
        {
          ...axis,
          size: (_: uPlot, texts: string[] | null): number =>
            Math.max(
              34,
              14 +
                LETTER_PX * Math.max(...(texts ?? []).map(each => each.length))
            ),
          values: (_: uPlot, splits: (number | null)[]) =>
            splits.map(value => (value === null ? '' : short(value)))
        }
      ],
      series: [
        {},
        ...(data.band ? [hidden, hidden] : []),
        ...data.lines.map(each => ({
          label: each.label,
          spanGaps: true,
          points: { show: (self: uPlot) => self.data[0].length < 3 },
          ...own(each)
        }))
      ],
      hooks: {
        setCursor: [
          (): void => {
            this.showValues();
          }
        ]
      },
      ...(data.band ? { bands: [{ series: [1, 2], fill: colours.band }] } : {})
    };
    this.plot = new uPlot(options, columns, this.canvas);
  }

  private timeTicks(): Partial<uPlot.Axis> {
    const last = (max: number): number => this.extent[1] ?? max;
    return {
      splits: (_, __, min, max) =>
        ticksBefore(last(max), min, max, this.width / TICK_PX),
      values: (self, splits) =>
        splits.map(value => before(last(self.scales.x?.max ?? value) - value))
    };
  }

  private get height(): number {
    const { least, most, large } = HEIGHTS;
    return this.isLarge
      ? large
      : Math.round(Math.min(most, Math.max(least, 0.5 * this.width)));
  }

  resize(width: number): void {
    if (width > 0) {
      this.width = width;
      const { height } = this;
      if (this.plot?.width !== width || this.plot.height !== height) {
        this.plot?.setSize({ width, height });
      }
    }
  }

  /** Left and right go along the lines, Enter enlarges. */
  private onKey(event: KeyboardEvent): void {
    const { plot, data } = this;
    if (plot === null || data === null || event.target !== this.node) {
      return;
    }
    const last = data.x.length - 1;
    const stride = event.shiftKey ? 1 : Math.ceil(data.x.length / KEY_STEPS);
    const at = plot.cursor.idx ?? last + 1;
    const to = {
      ArrowLeft: Math.max(0, at - stride),
      ArrowRight: Math.min(last, at + stride),
      Home: 0,
      End: last
    }[event.key];
    if (to !== undefined) {
      const left = plot.valToPos(data.x[to] ?? 0, 'x');
      plot.setCursor({ left, top: plot.over.clientHeight / 2 });
      const words = this.legend.words(data, to);
      setText(this.announced, `${this.placeOf(to)}: ${words}`);
    } else if (event.key === 'Enter') {
      this.setLarge(!this.isLarge);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** Take the colours again: the theme has changed. */
  restyle(): void {
    this.made = '';
  }

  destroy(): void {
    this.plot?.destroy();
    this.plot = null;
  }
}
