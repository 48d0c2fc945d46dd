/**
 * Metrics by name, ready to be plotted.
 *
 * Covers: values by step and rank of the cell that logged last; smoothing,
 * mean and band over ranks.
 * Does not cover: drawing (plot).
 */

import type { IMetricsPacket } from './types';

/** Steps of one metric that are kept; the earlier half is thinned beyond. */
const MOST_STEPS = 8000;

export type Line = (number | null)[];

/** One metric: x ascending, one line per rank. */
export class Series {
  readonly x: number[] = [];
  readonly lines = new Map<number, Line>();
  private readonly rowAt = new Map<number, number>();
  private readonly counts = new Map<number, number>();

  constructor(readonly cell: number) {}

  add(rank: number, step: number, value: number): void {
    let at = step;
    if (Number.isNaN(step)) {
      at = this.counts.get(rank) ?? 0;
      this.counts.set(rank, at + 1);
    }
    let line = this.lines.get(rank);
    if (line === undefined) {
      line = new Array<number | null>(this.x.length).fill(null);
      this.lines.set(rank, line);
    }
    line[this.row(at)] = Number.isFinite(value) ? value : null;
  }

  private row(step: number): number {
    const known = this.rowAt.get(step);
    if (known !== undefined) {
      return known;
    }
    const last = this.x.at(-1);
    if (last === undefined || step > last) {
      this.x.push(step);
      for (const line of this.lines.values()) {
        line.push(null);
      }
      this.rowAt.set(step, this.x.length - 1);
      if (this.x.length > MOST_STEPS) {
        this.thin();
        return this.x.length - 1;
      }
      return this.x.length - 1;
    }
    // A step that goes back: rare, so that moving the rest is no matter.
    const at = this.x.findIndex(each => each > step);
    this.x.splice(at, 0, step);
    for (const line of this.lines.values()) {
      line.splice(at, 0, null);
    }
    this.index();
    return at;
  }

  /** Leave out every other step of the earlier half. */
  private thin(): void {
    const half = this.x.length / 2;
    const keep = (_: unknown, at: number): boolean =>
      at >= half || at % 2 === 0;
    this.x.splice(0, this.x.length, ...this.x.filter(keep));
    for (const line of this.lines.values()) {
      line.splice(0, line.length, ...line.filter(keep));
    }
    this.index();
  }

  private index(): void {
    this.rowAt.clear();
    this.x.forEach((step, at) => this.rowAt.set(step, at));
  }
}

/** All metrics of one cluster. */
export class MetricStore {
  readonly byName = new Map<string, Series>();
  /** Grows with every change. */
  version = 0;

  take(packet: IMetricsPacket): void {
    if (packet.first) {
      this.byName.clear();
    }
    for (let at = 0; at < packet.values.length; at++) {
      const name = packet.names[packet.nameAt[at] ?? 0] ?? '';
      const cell = packet.cells[at] ?? -1;
      let series = this.byName.get(name);
      if ((series?.cell ?? cell) > cell) {
        continue; // a late value of an earlier cell
      }
      if (series?.cell !== cell) {
        series = new Series(cell);
        this.byName.delete(name); // what is logged now comes last
        this.byName.set(name, series);
      }
      series.add(
        packet.ranks[at] ?? 0,
        packet.steps[at] ?? Number.NaN,
        packet.values[at] ?? Number.NaN
      );
    }
    this.version++;
  }
}

/**
 * Smooth a line by an exponential moving average that is corrected for its
 * start (Kingma and Ba 2015, section 3).
 *
 * @param weight - of what came before, 0 to less than 1
 */
export function smooth(line: Line, weight: number): Line {
  if (weight === 0) {
    return line;
  }
  let average = 0;
  let power = 1;
  return line.map(value => {
    if (value === null) {
      return null;
    }
    average = weight * average + (1 - weight) * value;
    power *= weight;
    return average / (1 - power);
  });
}

/**
 * The line that all share, as those of an all-reduced value do; null where
 * there is none. The last steps may have come from some ranks only, but a rank
 * that logged less than half of them logs something else.
 */
export function commonOf(lines: Line[]): Line | null {
  const common = [...(lines[0] ?? [])];
  const known = lines.map(() => 0);
  for (const [index, line] of lines.entries()) {
    for (const [at, value] of line.entries()) {
      if (value === null) {
        continue;
      }
      known[index] = (known[index] ?? 0) + 1;
      if (value !== (common[at] ??= value)) {
        return null;
      }
    }
  }
  const [least, most] = [Math.min(...known), Math.max(...known)];
  return least > 0 && 2 * least >= most ? common : null;
}

/** Mean, least and greatest over lines, at each step. */
export function band(lines: Line[]): {
  mean: Line;
  least: Line;
  greatest: Line;
} {
  const count = lines[0]?.length ?? 0;
  const mean: Line = [];
  const least: Line = [];
  const greatest: Line = [];
  for (let at = 0; at < count; at++) {
    let sum = 0;
    let known = 0;
    let low = Number.POSITIVE_INFINITY;
    let high = Number.NEGATIVE_INFINITY;
    for (const line of lines) {
      const value = line[at] ?? null;
      if (value !== null) {
        sum += value;
        known++;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    mean.push(known ? sum / known : null);
    least.push(known ? low : null);
    greatest.push(known ? high : null);
  }
  return { mean, least, greatest };
}
