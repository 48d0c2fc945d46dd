/**
 * Keep the metrics of one cluster, by name.
 *
 * Covers: values by step and rank, of the cell that logged last; thinning.
 * Does not cover: smoothing and statistics (view/plots/curves), plots.
 */

import type { IMetricsMessage } from '../protocol/types';

/** Steps kept per metric; beyond it the earlier half is thinned. */
export const MAX_STEPS = 8000;

/** Values at the places of x; null where there is none. */
export type Curve = (number | null)[];

/** One metric of one cell: ascending steps, one curve per rank. */
export class Series {
  readonly steps: number[] = [];
  readonly curves = new Map<number, Curve>();
  /** The last step of each rank, also if its value was not finite. */
  readonly lastSteps = new Map<number, number>();
  private readonly indexOfStep = new Map<number, number>();
  private readonly counts = new Map<number, number>();

  constructor(readonly cell: number) {}

  /**
   * Add a value.
   *
   * @param step - NaN: the number of values of this rank so far
   * @param value - infinite or NaN: leaves a gap
   */
  add(rank: number, step: number, value: number): void {
    let at = step;
    if (Number.isNaN(step)) {
      at = this.counts.get(rank) ?? 0;
      this.counts.set(rank, at + 1);
    }
    this.lastSteps.set(rank, Math.max(at, this.lastSteps.get(rank) ?? at));
    let curve = this.curves.get(rank);
    if (curve === undefined) {
      curve = new Array<number | null>(this.steps.length).fill(null);
      this.curves.set(rank, curve);
    }
    curve[this.indexOf(at)] = Number.isFinite(value) ? value : null;
  }

  /** The index of a step, which is inserted if it is new. */
  private indexOf(step: number): number {
    const known = this.indexOfStep.get(step);
    if (known !== undefined) {
      return known;
    }
    const last = this.steps.at(-1);
    if (last === undefined || step > last) {
      this.steps.push(step);
      for (const curve of this.curves.values()) {
        curve.push(null);
      }
      this.indexOfStep.set(step, this.steps.length - 1);
      if (this.steps.length > MAX_STEPS) {
        this.thin();
      }
      return this.steps.length - 1;
    }
    // Steps that go back are rare, so the cost of an insertion is acceptable.
    const index = this.steps.findIndex(each => each > step);
    this.steps.splice(index, 0, step);
    for (const curve of this.curves.values()) {
      curve.splice(index, 0, null);
    }
    this.updateIndex();
    return index;
  }

  /** Remove every other step of the earlier half. */
  private thin(): void {
    const half = this.steps.length / 2;
    const isKept = (_: unknown, index: number): boolean =>
      index >= half || index % 2 === 0;
    this.steps.splice(0, this.steps.length, ...this.steps.filter(isKept));
    for (const curve of this.curves.values()) {
      curve.splice(0, curve.length, ...curve.filter(isKept));
    }
    this.updateIndex();
  }

  private updateIndex(): void {
    this.indexOfStep.clear();
    this.steps.forEach((step, index) => this.indexOfStep.set(step, index));
  }
}

/** All metrics of one cluster; those logged by the latest cell come last. */
export class MetricStore {
  readonly byName = new Map<string, Series>();

  add(message: IMetricsMessage): void {
    if (message.first) {
      this.byName.clear();
    }
    for (let at = 0; at < message.values.length; at++) {
      const name = message.names[message.nameAt[at] ?? 0] ?? '';
      const cell = message.cells[at] ?? -1;
      let series = this.byName.get(name);
      if ((series?.cell ?? cell) > cell) {
        continue; // a late value of an earlier cell
      }
      if (series?.cell !== cell) {
        series = new Series(cell);
        this.byName.delete(name); // so that it is inserted at the end
        this.byName.set(name, series);
      }
      series.add(
        message.ranks[at] ?? 0,
        message.steps[at] ?? Number.NaN,
        message.values[at] ?? Number.NaN
      );
    }
  }
}
