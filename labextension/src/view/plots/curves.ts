/**
 * Smooth curves and combine those of several ranks.
 */

import type { Curve } from '../../stores/metricStore';

/**
 * Smooth a curve by an exponential moving average with bias correction (Kingma
 * and Ba 2015, section 3).
 *
 * @param weight - of the previous average, 0 to less than 1
 */
export function smooth(curve: Curve, weight: number): Curve {
  if (weight === 0) {
    return curve;
  }
  let average = 0;
  let power = 1;
  return curve.map(value => {
    if (value === null) {
      return null;
    }
    average = weight * average + (1 - weight) * value;
    power *= weight;
    return average / (1 - power);
  });
}

/**
 * The curve that all ranks share, as for a value that was reduced over them;
 * null if they differ.
 *
 * The last steps may have arrived from some ranks only, but a rank with less
 * than half the values of another logs something else.
 */
export function commonCurve(curves: Curve[]): Curve | null {
  const common = [...(curves[0] ?? [])];
  const counts = curves.map(() => 0);
  for (const [index, curve] of curves.entries()) {
    for (const [at, value] of curve.entries()) {
      if (value === null) {
        continue;
      }
      counts[index] = (counts[index] ?? 0) + 1;
      if (value !== (common[at] ??= value)) {
        return null;
      }
    }
  }
  const [fewest, most] = [Math.min(...counts), Math.max(...counts)];
  return fewest > 0 && 2 * fewest >= most ? common : null;
}

export interface IBand {
  min: Curve;
  max: Curve;
}

/** Mean, minimum and maximum over curves, at the first places of x. */
export function meanAndRange(
  curves: Curve[],
  length: number
): IBand & { mean: Curve } {
  const mean: Curve = [];
  const min: Curve = [];
  const max: Curve = [];
  for (let at = 0; at < length; at++) {
    let sum = 0;
    let count = 0;
    let low = Number.POSITIVE_INFINITY;
    let high = Number.NEGATIVE_INFINITY;
    for (const curve of curves) {
      const value = curve[at] ?? null;
      if (value !== null) {
        sum += value;
        count++;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    mean.push(count ? sum / count : null);
    min.push(count ? low : null);
    max.push(count ? high : null);
  }
  return { mean, min, max };
}
