import { Signal } from '@lumino/signaling';
import { describe, expect, it } from 'vitest';

import { makeCluster, makeMetrics } from '../../__tests__/data';
import type {
  ICluster,
  IDevicesUpdate,
  IMetricsUpdate
} from '../../protocol/types';
import { ClusterStores, type IClusterSource } from '../clusterStores';

class FakeSource implements IClusterSource {
  readonly stateChanged = new Signal<this, { clusters: ICluster[] }>(this);
  readonly metricsReceived = new Signal<this, IMetricsUpdate>(this);
  readonly devicesReceived = new Signal<this, IDevicesUpdate>(this);
  readonly watched: string[][] = [];

  watch(ids: string[]): void {
    this.watched.push(ids);
  }

  setClusters(...ids: string[]): void {
    const clusters = ids.map(id => makeCluster([], { id }));
    this.stateChanged.emit({ clusters });
  }
}

const LOSS = makeMetrics([{ name: 'loss', value: 1, step: 0 }]);

describe('ClusterStores', () => {
  it('watches the clusters that have a store', () => {
    const source = new FakeSource();
    const stores = new ClusterStores(source);
    expect(stores.get('a')).toBe(stores.get('a'));
    stores.get('b');
    expect(source.watched).toEqual([['a'], ['a', 'b']]);
  });

  it('fills the store of the cluster that a message is about', () => {
    const source = new FakeSource();
    const stores = new ClusterStores(source);
    const [a, b] = [stores.get('a'), stores.get('b')];
    source.metricsReceived.emit({ id: 'a', metrics: LOSS });
    source.devicesReceived.emit({ id: 'b', devices: { 0: [[1, 50]] } });
    source.metricsReceived.emit({ id: 'other', metrics: LOSS });
    expect([a.metrics.byName.size, a.devices.byRank.size]).toEqual([1, 0]);
    expect([b.metrics.byName.size, b.devices.byRank.size]).toEqual([0, 1]);
  });

  it('removes the store of a cluster that ended, and watches it no more', () => {
    const source = new FakeSource();
    const stores = new ClusterStores(source);
    stores.get('a');
    const ended = stores.get('b');
    source.setClusters('a');
    source.setClusters('a');
    expect(source.watched).toEqual([['a'], ['a', 'b'], ['a']]);
    // If it comes back, the server sends its history to a new store.
    expect(stores.get('b')).not.toBe(ended);
    expect(source.watched.at(-1)).toEqual(['a', 'b']);
  });
});
