/**
 * One plot: lines over a common x.
 *
 * Covers: uPlot with this package's colours, band, zoom, pointer, keyboard, size;
 * the header and the legend.
 * Does not cover: which lines (plotData), axes (scales), values as text
 * (legendEntries).
 */

import uPlot from 'uplot';

import type { Translate } from '../../protocol/types';
import { button, element, makeMeasure, setText } from '../dom';
import { formatAge, formatNumber, formatTicks } from '../format';
import { colourOfRank, dashOfRank, palette } from './colours';
import { Legend } from './legend';
import { describeValues } from './legendEntries';
import {
  constantValue,
  type ILine,
  type IPlotData,
  titleWithUnit
} from './plotData';
import {
  type Quantity,
  timeRange,
  timeTicks,
  valueRange,
  valueTicks
} from './scales';

const HEIGHTS_PX = { min: 130, max: 220, large: 380 };
const MIN_WIDTH_PX = 120;
const TICK_PX = 64;
const MIN_AXIS_PX = 34;
/** Beside the labels of y: a tick, a gap and a margin. */
const LABEL_MARGIN_PX = 17;
/** The least distance of labels of y. */
const LABEL_DISTANCE_PX = 20;
const FONT = '11px system-ui, sans-serif';
// uPlot's enum exists only in its types.
// eslint-disable-next-line @typescript-eslint/no-unsafe-enum-assignment
const LOGARITHMIC: uPlot.Scale = { distr: 3 };
/** Key presses from one end of the plot to the other. */
const KEY_STEPS = 50;

export interface IPlotOptions {
  title: string;
  quantity: Quantity;
  /** Whether x is seconds since the epoch. */
  isTime: boolean;
  onRank: (rank: number) => void;
  onDownload: () => void;
}

/** A plot; uPlot is made again only if the set of lines changes. */
export class Plot {
  readonly node: HTMLElement;
  private readonly canvas = element('div');
  private readonly title = element('span', { class: 'jdt-plot-title' });
  private readonly liveRegion = element('span', {
    class: 'jdt-live-region',
    'aria-live': 'polite'
  });
  private readonly legend: Legend;
  private readonly enlarge: HTMLButtonElement;
  private plot: uPlot | null = null;
  private data: IPlotData | null = null;
  /** Its only value; null if values differ. */
  private constant: number | null = null;
  private readonly measure = makeMeasure();
  private madeFor = '';
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
      this.liveRegion
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
      ? this.trans('restore the size of this plot')
      : this.trans('enlarge this plot');
    this.enlarge.setAttribute('aria-label', this.enlarge.title);
    this.enlarge.setAttribute('aria-pressed', String(isLarge));
    this.resize(this.node.clientWidth);
  }

  show(data: IPlotData, isLogarithmic: boolean): void {
    this.data = data;
    this.constant = constantValue(data);
    const { unit } = data;
    const labels = data.lines.map(each => each.label);
    // A constant has no decades to show.
    const isLog = isLogarithmic && this.constant === null;
    const key = JSON.stringify([labels, isLog, unit]);
    const title = titleWithUnit(this.options.title, unit);
    setText(this.title, title);
    const columns: uPlot.AlignedData = [
      data.x,
      ...(data.band ? [data.band.max, data.band.min] : []),
      ...data.lines.map(each => each.values)
    ];
    if (this.plot === null || key !== this.madeFor) {
      this.make(data, columns, isLog);
      this.madeFor = key;
    } else {
      const isZoomed = this.isZoomed();
      this.plot.setData(columns, !isZoomed);
      if (isZoomed) {
        this.plot.redraw();
      }
    }
    this.extent = [data.x[0], data.x.at(-1)];
    this.showValues();
    this.node.setAttribute(
      'aria-label',
      `${title}. ${describeValues(data, null, this.trans)}`
    );
  }

  /** Show the values under the pointer, or the last values. */
  private showValues(): void {
    if (this.data !== null) {
      const at = this.plot?.cursor.idx ?? null;
      this.legend.show(this.data, at, at === null ? '' : this.positionOf(at));
    }
  }

  private positionOf(at: number): string {
    const x = this.data?.x[at] ?? 0;
    return this.options.isTime
      ? formatAge((this.extent[1] ?? x) - x)
      : this.trans('step %1', formatNumber(x));
  }

  /** Whether the user has zoomed in: the range of x is not that of the data. */
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

  /** The range of x when it was drawn last. */
  private extent: [number | undefined, number | undefined] = [
    undefined,
    undefined
  ];

  private make(
    data: IPlotData,
    columns: uPlot.AlignedData,
    isLogarithmic: boolean
  ): void {
    this.plot?.destroy();
    const { quantity, isTime } = this.options;
    const colours = palette(this.node);
    const axis = {
      stroke: colours.text,
      grid: { stroke: colours.grid, width: 1 },
      ticks: { stroke: colours.grid, width: 1 },
      font: FONT
    };
    const hidden = { stroke: 'transparent', points: { show: false } };
    const strokeOf = ({ rank }: ILine): Partial<uPlot.Series> =>
      rank === null
        ? { stroke: data.band ? colours.mean : colours.common, width: 2 }
        : { stroke: colourOfRank(rank), dash: dashOfRank(rank), width: 1.75 };
    const options: uPlot.Options = {
      width: Math.max(this.width, MIN_WIDTH_PX),
      height: this.height,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, focus: { prox: 16 } },
      focus: { alpha: 0.3 },
      scales: {
        x: {
          time: false,
          ...(isTime
            ? { range: (self, min, max) => timeRange(self.data[0], min, max) }
            : {})
        },
        y: isLogarithmic
          ? LOGARITHMIC
          : {
              range: (_: uPlot, min: number | null, max: number | null) =>
                min === null || max === null
                  ? [0, 1]
                  : valueRange(quantity, min, max)
            }
      },
      axes: [
        { ...axis, size: 28, ...(isTime ? this.timeAxis() : {}) },
        {
          ...axis,
          space: LABEL_DISTANCE_PX,
          size: (_: uPlot, texts: string[] | null): number =>
            Math.max(
              MIN_AXIS_PX,
              ...(texts ?? []).map(
                text => LABEL_MARGIN_PX + this.measure(text, FONT)
              )
            ),
          values: (_: uPlot, splits: (number | null)[]) => formatTicks(splits),
          ...(isLogarithmic ? {} : this.valueAxis())
        }
      ],
      series: [
        {},
        ...(data.band ? [hidden, hidden] : []),
        ...data.lines.map(each => ({
          label: each.label,
          spanGaps: true,
          points: { show: (self: uPlot) => self.data[0].length < 3 },
          ...strokeOf(each)
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

  private valueAxis(): Partial<uPlot.Axis> {
    return {
      splits: (_, __, min, max, step) =>
        valueTicks(this.options.quantity, this.constant, [min, max], step)
    };
  }

  private timeAxis(): Partial<uPlot.Axis> {
    const last = (max: number): number => this.extent[1] ?? max;
    return {
      splits: (_, __, min, max) =>
        timeTicks(last(max), min, max, this.width / TICK_PX),
      values: (self, splits) =>
        splits.map(value =>
          formatAge(last(self.scales.x?.max ?? value) - value)
        )
    };
  }

  private get height(): number {
    const { min, max, large } = HEIGHTS_PX;
    return this.isLarge
      ? large
      : Math.round(Math.min(max, Math.max(min, 0.5 * this.width)));
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

  /** Left and right move along the lines, Enter enlarges. */
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
      const values = describeValues(data, to, this.trans);
      setText(this.liveRegion, `${this.positionOf(to)}: ${values}`);
    } else if (event.key === 'Enter') {
      this.setLarge(!this.isLarge);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** Use the colours of the current theme when it is drawn next. */
  restyle(): void {
    this.madeFor = '';
  }

  destroy(): void {
    this.plot?.destroy();
    this.plot = null;
  }
}
