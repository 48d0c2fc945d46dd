import { describe, expect, it } from 'vitest';

import { type IValue, makeMetrics } from '../../__tests__/data';
import { MAX_STEPS, MetricStore, type Series } from '../metricStore';

function storeOf(...batches: IValue[][]): MetricStore {
  const store = new MetricStore();
  batches.forEach(batch => {
    store.add(makeMetrics(batch));
  });
  return store;
}

function seriesOf(store: MetricStore, name = 'loss'): Series {
  const series = store.byName.get(name);
  if (series === undefined) {
    throw new Error(`no metric ${name}`);
  }
  return series;
}

/** Values of one rank at consecutive steps, equal to the step. */
function steps(first: number, count: number, rank = 0): IValue[] {
  return Array.from({ length: count }, (_, at) => ({
    name: 'loss',
    value: first + at,
    step: first + at,
    rank
  }));
}

describe('MetricStore', () => {
  it('keeps one curve per rank over common steps', () => {
    const store = storeOf([
      { name: 'loss', value: 4, step: 0, rank: 0 },
      { name: 'loss', value: 5, step: 0, rank: 1 },
      { name: 'loss', value: 3, step: 2, rank: 1 }
    ]);
    const { steps, curves } = seriesOf(store);
    expect(steps).toEqual([0, 2]);
    expect([...curves]).toEqual([
      [0, [4, null]],
      [1, [5, 3]]
    ]);
  });

  it('inserts a step that was logged late', () => {
    const store = storeOf(
      [
        { name: 'loss', value: 1, step: 1 },
        { name: 'loss', value: 3, step: 3 }
      ],
      [
        { name: 'loss', value: 2, step: 2 },
        { name: 'loss', value: 9, step: 3 }
      ]
    );
    const { steps, curves } = seriesOf(store);
    expect(steps).toEqual([1, 2, 3]);
    expect(curves.get(0)).toEqual([1, 2, 9]);
  });

  it('counts the values of each rank that has no steps', () => {
    const store = storeOf([
      { name: 'loss', value: 4 },
      { name: 'loss', value: 3 },
      { name: 'loss', value: 8, rank: 1 }
    ]);
    const { steps, curves } = seriesOf(store);
    expect(steps).toEqual([0, 1]);
    expect(curves.get(1)).toEqual([8, null]);
  });

  it('leaves a gap for NaN and infinity', () => {
    const values = [Number.NaN, Number.POSITIVE_INFINITY, 1];
    const store = storeOf(
      values.map((value, step) => ({ name: 'loss', value, step }))
    );
    expect(seriesOf(store).curves.get(0)).toEqual([null, null, 1]);
  });

  it('knows the last step of each rank, also without a finite value', () => {
    const store = storeOf([
      { name: 'loss', value: Number.NaN, step: 7 },
      { name: 'loss', value: 1, step: 5 },
      { name: 'loss', value: 1, rank: 1 },
      { name: 'loss', value: 1, rank: 1 }
    ]);
    expect([...seriesOf(store).lastSteps]).toEqual([
      [0, 7],
      [1, 1]
    ]);
  });

  it('starts a metric again in a later cell, and puts it last', () => {
    const store = storeOf(
      [
        { name: 'loss', value: 1, step: 0, cell: 1 },
        { name: 'accuracy', value: 0.5, step: 0, cell: 1 }
      ],
      [{ name: 'loss', value: 2, step: 5, cell: 2 }]
    );
    expect([...store.byName.keys()]).toEqual(['accuracy', 'loss']);
    expect(seriesOf(store).steps).toEqual([5]);
  });

  it('drops late values of an earlier cell', () => {
    const store = storeOf(
      [{ name: 'loss', value: 2, step: 0, cell: 2 }],
      [{ name: 'loss', value: 1, step: 1, cell: 1 }]
    );
    expect(seriesOf(store).cell).toBe(2);
    expect(seriesOf(store).steps).toEqual([0]);
  });

  it('is replaced by a message with the whole history', () => {
    const store = storeOf([{ name: 'old', value: 1, step: 0 }]);
    store.add(makeMetrics([{ name: 'loss', value: 1, step: 0 }], true));
    expect([...store.byName.keys()]).toEqual(['loss']);
  });

  it('thins the earlier half of a long curve, for all ranks alike', () => {
    const store = storeOf(
      [{ name: 'loss', value: 7, step: 0, rank: 1 }],
      steps(0, MAX_STEPS + 1)
    );
    const { steps: kept, curves } = seriesOf(store);
    const half = MAX_STEPS / 2;
    expect(kept.slice(0, 4)).toEqual([0, 2, 4, 6]);
    expect(kept.slice(-half)).toEqual(
      Array.from({ length: half }, (_, at) => half + 1 + at)
    );
    expect(curves.get(0)).toEqual(kept);
    expect(curves.get(1)).toHaveLength(kept.length);
  });

  it('finds the step of each value after thinning', () => {
    const store = storeOf(
      steps(0, MAX_STEPS + 1),
      steps(MAX_STEPS, 3),
      steps(MAX_STEPS, 3, 1)
    );
    const { steps: kept, curves } = seriesOf(store);
    expect(curves.get(0)).toEqual(kept);
    expect(curves.get(1)?.slice(-4)).toEqual([
      null,
      MAX_STEPS,
      MAX_STEPS + 1,
      MAX_STEPS + 2
    ]);
  });
});
