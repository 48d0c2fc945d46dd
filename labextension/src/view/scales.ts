/**
 * What the axes of a plot show.
 *
 * Covers: the range of y, which never magnifies noise, its unit; the range and
 * the ticks of time, as seconds, minutes or hours before the last value.
 * Does not cover: drawing (plot).
 */

/** What a plot's values are. */
export type Quantity = 'metric' | 'percent' | 'rate' | 'bytes';

type Range = [number, number];

/** The least span of y, as part of the greatest value. */
const LEAST_SPAN: Record<Quantity, number> = {
  metric: 0.02,
  percent: 0,
  rate: 0,
  bytes: 0.1
};
const ROOM = 0.06;
const LEAST_SECONDS = 10;
const INCREMENTS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
  43200, 86400
];

/** The range of y for values between min and max. */
export function rangeOf(quantity: Quantity, min: number, max: number): Range {
  if (quantity === 'percent') {
    return [0, Math.max(100, max * (1 + ROOM))];
  }
  if (quantity === 'rate') {
    return [0, max > 0 ? max * (1 + ROOM) : 1];
  }
  const size = Math.max(Math.abs(min), Math.abs(max));
  if (size === 0) {
    return [0, 1];
  }
  const span = Math.max(max - min, LEAST_SPAN[quantity] * size);
  const half = (span * (1 + 2 * ROOM)) / 2;
  const middle = (min + max) / 2;
  const low = middle - half;
  return [
    quantity === 'bytes' || (min >= 0 && low < 0) ? Math.max(0, low) : low,
    middle + half
  ];
}

/** The range of seconds: some, however short the history is. */
export function secondsBetween(min: number, max: number): Range {
  return [Math.min(min, max - LEAST_SECONDS), max];
}

/** Ticks at whole seconds, minutes or hours before the last value. */
export function ticksBefore(
  last: number,
  min: number,
  max: number,
  most: number
): number[] {
  const least = (max - min) / Math.max(1, most);
  const step =
    INCREMENTS_S.find(each => each >= least) ??
    86400 * Math.ceil(least / 86400);
  const first = Math.ceil((last - max) / step);
  const ticks: number[] = [];
  for (let at = first; last - at * step >= min; at++) {
    ticks.push(last - at * step);
  }
  return ticks.reverse();
}

const MIB = 2 ** 20;
const GIB = 2 ** 30;

/** The unit in which the largest of some numbers of bytes is read best. */
export function unitOf(most: number): { name: string; size: number } {
  return most < GIB ? { name: 'MiB', size: MIB } : { name: 'GiB', size: GIB };
}

/** Seconds before the last value, as "-30 s", "-5 min" or "-2 h". */
export function before(seconds: number): string {
  const ago = Math.round(seconds);
  if (ago === 0) {
    return 'now';
  }
  if (ago % 3600 === 0) {
    return `-${String(ago / 3600)} h`;
  }
  if (ago % 60 === 0 || ago > 3600) {
    return `-${String(Math.round(ago / 60))} min`;
  }
  return `-${String(ago)} s`;
}
