/**
 * Choose the lines of a plot.
 *
 * Covers: metrics with smoothing, device histories on a common time, ranks that
 * are hidden, one line in place of many, constant values, values as CSV.
 * Does not cover: drawing (plot), the legend (legendEntries).
 */

import type { DeviceSample, Translate } from '../../protocol/types';
import { type DeviceStore, SampleColumn } from '../../stores/deviceStore';
import type { Curve, Series } from '../../stores/metricStore';
import { byteUnit, formatCsv } from '../format';
import { commonCurve, type IBand, meanAndRange, smooth } from './curves';
import type { Quantity } from './scales';

export interface ILine {
  label: string;
  /** null for a line of several ranks. */
  rank: number | null;
  values: Curve;
}

export interface IPlotData {
  x: number[];
  lines: ILine[];
  band?: IBand;
  /** Ranks that the user has hidden. */
  hidden: number[];
  /** The last x that all ranks have reported; silent ones count if all are. */
  lastCommonX: number;
  /** The unit of the values; undefined where the title has it. */
  unit?: string | undefined;
}

/** A relative difference that comes from smoothing and averaging. */
const ROUNDING = 1e-9;

/** Which ranks have a line. */
export interface IRankSelection {
  /** Ranks that the user has hidden in all plots. */
  hidden: ReadonlySet<number>;
  /** Ranks that match the filter; null without a filter. */
  filter: ReadonlySet<number> | null;
  /** Ranks from which no further values are expected. */
  silent: ReadonlySet<number>;
}

/** A column of the device history, and how it is plotted. */
export interface IDevicePlot {
  column: number;
  title: string;
  quantity: Quantity;
}

export const DEVICE_PLOTS: readonly IDevicePlot[] = [
  { column: SampleColumn.stepRate, title: 'steps/s', quantity: 'rate' },
  { column: SampleColumn.gpu, title: 'GPU use (%)', quantity: 'percent' },
  { column: SampleColumn.gpuMemory, title: 'GPU memory', quantity: 'bytes' },
  { column: SampleColumn.cpu, title: 'CPU (% of a core)', quantity: 'percent' },
  { column: SampleColumn.memory, title: 'memory', quantity: 'bytes' }
];

/** Return the lines of a metric, by step. */
export function metricData(
  series: Series,
  weight: number,
  selection: IRankSelection,
  trans: Translate
): IPlotData {
  const curves = {
    x: series.steps,
    ranks: series.curves.keys(),
    curveOf: (rank: number): Curve =>
      smooth(series.curves.get(rank) ?? [], weight),
    lastXOf: (rank: number): number => series.lastSteps.get(rank) ?? 0
  };
  return selectLines(curves, selection, trans);
}

/** Return the lines of a device plot, by time; null if no rank reports it. */
export function deviceData(
  store: DeviceStore,
  { column, quantity }: IDevicePlot,
  selection: IRankSelection,
  trans: Translate
): IPlotData | null {
  const unit =
    quantity === 'bytes' ? byteUnit(largest(store, column)) : undefined;
  const times = new Set<number>();
  const byRank = new Map<number, Map<number, number>>();
  for (const [rank, samples] of store.byRank) {
    const values = valuesByTime(samples, column, unit?.size ?? 1);
    if (values.size > 0) {
      byRank.set(rank, values);
      values.forEach((_, time) => times.add(time));
    }
  }
  if (byRank.size === 0) {
    return null;
  }
  const x = sortedNumbers(times);
  const curves = {
    x,
    ranks: byRank.keys(),
    curveOf: (rank: number): Curve =>
      x.map(time => byRank.get(rank)?.get(time) ?? null),
    lastXOf: (rank: number): number => secondOf(store.byRank.get(rank)?.at(-1))
  };
  return { ...selectLines(curves, selection, trans), unit: unit?.name };
}

/** The time of a sample; ranks report at different moments of a second. */
function secondOf(sample: DeviceSample | undefined): number {
  return Math.round(sample?.[SampleColumn.time] ?? 0);
}

function valuesByTime(
  samples: DeviceSample[],
  column: number,
  unit: number
): Map<number, number> {
  const values = new Map<number, number>();
  for (const sample of samples) {
    const value = sample[column] ?? null;
    if (value !== null) {
      values.set(secondOf(sample), value / unit);
    }
  }
  return values;
}

/** The largest value in a column of all ranks. */
function largest(store: DeviceStore, column: number): number {
  let found = 0;
  for (const samples of store.byRank.values()) {
    for (const sample of samples) {
      found = Math.max(found, sample[column] ?? 0);
    }
  }
  return found;
}

interface ICurves {
  x: number[];
  ranks: Iterable<number>;
  curveOf: (rank: number) => Curve;
  /** The last x that a rank has reported, with or without a value. */
  lastXOf: (rank: number) => number;
}

function selectLines(
  { x, ranks, curveOf, lastXOf }: ICurves,
  { hidden, filter, silent }: IRankSelection,
  trans: Translate
): IPlotData {
  const sorted = sortedNumbers(ranks);
  const shown = sorted.filter(
    rank => !hidden.has(rank) && (filter?.has(rank) ?? true)
  );
  const expected = shown.filter(rank => !silent.has(rank));
  return {
    x,
    lines: shown.map(rank => ({
      label: trans('rank %1', String(rank)),
      rank,
      values: curveOf(rank)
    })),
    hidden: sorted.filter(rank => hidden.has(rank)),
    lastCommonX: Math.min(
      ...(expected.length > 0 ? expected : shown).map(lastXOf)
    )
  };
}

function sortedNumbers(values: Iterable<number>): number[] {
  return [...values].sort((a, b) => a - b);
}

export interface IReduction {
  /** Draw the mean with the range in place of a line per rank. */
  isMean: boolean;
  /** Draw one line if all ranks have the same values. */
  mayBeCommon: boolean;
}

/**
 * Replace the lines of ranks by one if they are equal, or by their mean, which
 * ends where values of some ranks are still to come.
 */
export function reduceLines(
  data: IPlotData,
  { isMean, mayBeCommon }: IReduction,
  trans: Translate
): IPlotData {
  const { x, lines, hidden, lastCommonX } = data;
  if (lines.length < 2) {
    return data;
  }
  const curves = lines.map(each => each.values);
  const common = mayBeCommon ? commonCurve(curves) : null;
  if (common !== null) {
    const label = hidden.length ? trans('all others') : trans('all ranks');
    return { ...data, lines: [{ label, rank: null, values: common }] };
  }
  if (!isMean) {
    return data;
  }
  const length = x.findLastIndex(each => each <= lastCommonX) + 1;
  const { mean, min, max } = meanAndRange(curves, length);
  return {
    ...data,
    x: x.slice(0, length),
    lines: [{ label: trans('mean'), rank: null, values: mean }],
    band: { min, max },
    hidden: []
  };
}

/** The value of a plot whose values are all equal; null for other plots. */
export function constantValue({ lines, band }: IPlotData): number | null {
  const curves = band ? [band.min, band.max] : lines.map(each => each.values);
  let first: number | null = null;
  for (const curve of curves) {
    for (const value of curve) {
      if (value === null) {
        continue;
      }
      first ??= value;
      if (Math.abs(value - first) > ROUNDING * Math.abs(value)) {
        return null;
      }
    }
  }
  return first;
}

/** A title with the unit of the values. */
export function titleWithUnit(title: string, unit?: string): string {
  return unit === undefined ? title : `${title} (${unit})`;
}

/** All values of a plot as CSV, a row per place of x. */
export function plotCsv({ x, lines }: IPlotData, xTitle: string): string {
  return formatCsv(
    [xTitle, ...lines.map(line => line.label)],
    x.map((each, at) => [each, ...lines.map(line => line.values[at] ?? null)])
  );
}
