/**
 * Choose the lines of a plot.
 *
 * Covers: metrics with smoothing, device histories on a common time, ranks that
 * are hidden, one line in place of many, values as CSV.
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
  /** The unit of the values; undefined where the title has it. */
  unit?: string | undefined;
}

/** Which ranks have a line. */
export interface IRankSelection {
  /** Ranks that the user has hidden in all plots. */
  hidden: ReadonlySet<number>;
  /** Ranks that match the filter; null without a filter. */
  filter: ReadonlySet<number> | null;
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
  const ranks = sortedNumbers(series.curves.keys());
  const lines = shownRanks(ranks, selection).map(rank => ({
    label: trans('rank %1', String(rank)),
    rank,
    values: smooth(series.curves.get(rank) ?? [], weight)
  }));
  const hidden = ranks.filter(rank => selection.hidden.has(rank));
  return { x: series.steps, lines, hidden };
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
  const ranks = sortedNumbers(byRank.keys());
  const x = sortedNumbers(times);
  const lines = shownRanks(ranks, selection).map(rank => ({
    label: trans('rank %1', String(rank)),
    rank,
    values: x.map(time => byRank.get(rank)?.get(time) ?? null)
  }));
  const hidden = ranks.filter(rank => selection.hidden.has(rank));
  return { x, lines, hidden, unit: unit?.name };
}

/** Ranks report at different moments, so times are rounded to seconds. */
function valuesByTime(
  samples: DeviceSample[],
  column: number,
  unit: number
): Map<number, number> {
  const values = new Map<number, number>();
  for (const sample of samples) {
    const value = sample[column] ?? null;
    if (value !== null) {
      values.set(Math.round(sample[SampleColumn.time] ?? 0), value / unit);
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

function shownRanks(
  ranks: number[],
  { hidden, filter }: IRankSelection
): number[] {
  return ranks.filter(rank => !hidden.has(rank) && (filter?.has(rank) ?? true));
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

/** Replace the lines of ranks by one if they are equal, or by their mean. */
export function reduceLines(
  data: IPlotData,
  { isMean, mayBeCommon }: IReduction,
  trans: Translate
): IPlotData {
  const { x, lines, hidden, unit } = data;
  if (lines.length < 2) {
    return data;
  }
  const curves = lines.map(each => each.values);
  const common = mayBeCommon ? commonCurve(curves) : null;
  if (common !== null) {
    const label = hidden.length ? trans('all others') : trans('all ranks');
    return { x, lines: [{ label, rank: null, values: common }], hidden };
  }
  if (!isMean) {
    return data;
  }
  const { mean, min, max } = meanAndRange(curves);
  return {
    x,
    lines: [{ label: trans('mean'), rank: null, values: mean }],
    band: { min, max },
    hidden: [],
    unit
  };
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
