import { describe, expect, it } from 'vitest';

import { DeviceStore, MAX_SAMPLES } from '../deviceStore';

describe('DeviceStore', () => {
  it('appends samples by rank', () => {
    const store = new DeviceStore();
    store.add({ 0: [[1, 50]], 10: [[1, 20]] });
    store.add({ 0: [[2, 60]] });
    expect([...store.byRank]).toEqual([
      [
        0,
        [
          [1, 50],
          [2, 60]
        ]
      ],
      [10, [[1, 20]]]
    ]);
  });

  it('drops samples that it has', () => {
    const store = new DeviceStore();
    store.add({ 0: [[1], [2]] });
    store.add({ 0: [[1], [2], [3]] });
    expect(store.byRank.get(0)).toEqual([[1], [2], [3]]);
  });

  it('keeps the latest samples', () => {
    const store = new DeviceStore();
    const samples = Array.from({ length: MAX_SAMPLES + 5 }, (_, at) => [
      at + 1
    ]);
    store.add({ 0: samples.slice(0, 10) });
    store.add({ 0: samples });
    expect(store.byRank.get(0)).toEqual(samples.slice(5));
  });
});
