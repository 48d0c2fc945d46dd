import { describe, expect, it } from 'vitest';

import { makeMetrics } from '../../__tests__/data';
import { ClusterStore } from '../clusterStore';

describe('ClusterStore', () => {
  it('notifies subscribers after each change until they unsubscribe', () => {
    const store = new ClusterStore();
    const seen: [number, number][] = [];
    const unsubscribe = store.subscribe(() => {
      seen.push([store.metrics.byName.size, store.devices.byRank.size]);
    });
    store.addMetrics(makeMetrics([{ name: 'loss', value: 1, step: 0 }]));
    store.addDevices({ 0: [[1, 50]] });
    unsubscribe();
    store.addDevices({ 1: [[1, 50]] });
    expect(seen).toEqual([
      [1, 0],
      [1, 1]
    ]);
  });
});
