/**
 * Choose the entries of a plot's legend, and describe the plot by them.
 *
 * Does not cover: drawing (legend).
 */

import type { Translate } from '../../protocol/types';
import type { Curve } from '../../stores/metricStore';
import { formatNumber } from '../format';
import type { IPlotData } from './plotData';

/** More lines than this are summarized by the lowest and the highest. */
export const MAX_ENTRIES = 8;
const NO_VALUE = '–';

export interface ILegendEntry {
  label: string;
  value: string;
  /** null for an entry of several ranks. */
  rank: number | null;
  isHidden: boolean;
}

/**
 * Return the entries with the values at a place of x.
 *
 * @param index - null: the last values
 */
export function legendEntries(
  data: IPlotData,
  index: number | null,
  trans: Translate
): ILegendEntry[] {
  const valueOf = (curve: Curve): number | null =>
    index === null ? lastValue(curve) : (curve[index] ?? null);
  if (data.lines.length > MAX_ENTRIES) {
    return extremes(data, valueOf, trans);
  }
  const entries: ILegendEntry[] = data.lines.map(line => ({
    label: line.label,
    value: formatValue(valueOf(line.values)),
    rank: line.rank,
    isHidden: false
  }));
  const { band } = data;
  if (band !== undefined) {
    const min = formatValue(valueOf(band.min));
    const max = formatValue(valueOf(band.max));
    entries.push({
      label: trans('range'),
      value: trans('%1 to %2', min, max),
      rank: null,
      isHidden: false
    });
  }
  for (const rank of data.hidden) {
    const label = trans('rank %1', String(rank));
    entries.push({ label, value: '', rank, isHidden: true });
  }
  return entries.sort((a, b) => (a.rank ?? -1) - (b.rank ?? -1));
}

function extremes(
  { lines }: IPlotData,
  valueOf: (curve: Curve) => number | null,
  trans: Translate
): ILegendEntry[] {
  const known = lines.flatMap(({ label, values }) => {
    const value = valueOf(values);
    return value === null ? [] : [{ label, value }];
  });
  known.sort((a, b) => a.value - b.value);
  const [lowest, highest] = [known[0], known.at(-1)];
  if (lowest === undefined || highest === undefined) {
    return [];
  }
  return [
    { prefix: trans('lowest'), ...lowest },
    { prefix: trans('highest'), ...highest }
  ].map(({ prefix, label, value }) => ({
    label: `${prefix} ${label}`,
    value: formatValue(value),
    rank: null,
    isHidden: false
  }));
}

/** The values as text, for the plot's description. */
export function describeValues(
  data: IPlotData,
  index: number | null,
  trans: Translate
): string {
  return legendEntries(data, index, trans)
    .filter(each => !each.isHidden && each.value !== NO_VALUE)
    .map(each => `${each.label}: ${each.value}`)
    .join(', ');
}

function formatValue(value: number | null): string {
  return value === null ? NO_VALUE : formatNumber(value);
}

function lastValue(curve: Curve): number | null {
  return curve.findLast(value => value !== null) ?? null;
}
