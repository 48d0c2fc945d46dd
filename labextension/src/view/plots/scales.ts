/**
 * Ranges and ticks of a plot's axes.
 *
 * Covers: a range of y that does not magnify noise, its ticks; time as seconds,
 * minutes or hours before the last value.
 * Does not cover: units as text (format), drawing (plot).
 */

/** The kind of a plot's values. */
export type Quantity = 'metric' | 'percent' | 'rate' | 'bytes';

type Range = [min: number, max: number];

/** The minimum span of y, as a fraction of the largest value. */
const MIN_SPAN = { metric: 0.02, bytes: 0.1 };
/** Empty space above and below the values, as a fraction of the span. */
const MARGIN = 0.06;
const MIN_SECONDS = 10;
const TICK_STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
  43200, 86400
];

/** The range of y for values between min and max. */
export function valueRange(
  quantity: Quantity,
  min: number,
  max: number
): Range {
  if (quantity === 'percent') {
    return [0, Math.max(100, max * (1 + MARGIN))];
  }
  if (quantity === 'rate') {
    return [0, max > 0 ? max * (1 + MARGIN) : 1];
  }
  const size = Math.max(Math.abs(min), Math.abs(max));
  if (size === 0) {
    return [0, 1];
  }
  const span = Math.max(max - min, MIN_SPAN[quantity] * size);
  const half = (span * (1 + 2 * MARGIN)) / 2;
  const middle = (min + max) / 2;
  const low = middle - half;
  return [
    quantity === 'bytes' || (min >= 0 && low < 0) ? Math.max(0, low) : low,
    middle + half
  ];
}

/**
 * Ticks of y at the multiples of a step.
 *
 * @param constant - the only value of the plot, which is then the only tick,
 * except for quantities whose range begins at 0; null if values differ
 */
export function valueTicks(
  quantity: Quantity,
  constant: number | null,
  [min, max]: Range,
  step: number
): number[] {
  if (constant !== null && quantity in MIN_SPAN) {
    return [constant];
  }
  const ticks: number[] = [];
  // Plus 0, as -0 would get a sign.
  for (let at = Math.ceil(min / step) + 0; at * step <= max; at++) {
    ticks.push(at * step);
  }
  return ticks;
}

/**
 * The range of time: at least some seconds, however short the history is.
 *
 * @param min - what uPlot proposes; around a single value, years before it
 * @param max - as well
 */
export function timeRange(
  times: ArrayLike<number>,
  min: number,
  max: number
): Range {
  const only = times.length === 1 ? times[0] : undefined;
  const end = only ?? max;
  return [Math.min(only ?? min, end - MIN_SECONDS), end];
}

/**
 * Ticks at whole seconds, minutes or hours before the last value.
 *
 * @param maxTicks - as many as have room
 */
export function timeTicks(
  last: number,
  min: number,
  max: number,
  maxTicks: number
): number[] {
  const minStep = (max - min) / Math.max(1, maxTicks);
  const step =
    TICK_STEPS_S.find(each => each >= minStep) ??
    86400 * Math.ceil(minStep / 86400);
  const first = Math.ceil((last - max) / step);
  const ticks: number[] = [];
  for (let at = first; last - at * step >= min; at++) {
    ticks.push(last - at * step);
  }
  return ticks.reverse();
}
