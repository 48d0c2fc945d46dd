/**
 * The stores of all clusters, shared by the side panel and the main area.
 *
 * Covers: creating a store when a view needs it, filling it, removing it when
 * the cluster ends.
 * Does not cover: the connection (serverClient).
 */

import type { ISignal } from '@lumino/signaling';

import type {
  ICluster,
  IDevicesUpdate,
  IMetricsUpdate
} from '../protocol/types';
import { ClusterStore } from '../stores/clusterStore';

/** The part of the server client that fills stores. */
export interface IClusterSource {
  readonly stateChanged: ISignal<unknown, { clusters: ICluster[] }>;
  readonly metricsReceived: ISignal<unknown, IMetricsUpdate>;
  readonly devicesReceived: ISignal<unknown, IDevicesUpdate>;
  watch(ids: string[]): void;
}

export class ClusterStores {
  private readonly byId = new Map<string, ClusterStore>();

  constructor(private readonly source: IClusterSource) {
    source.stateChanged.connect((_, { clusters }) => {
      this.removeOthers(new Set(clusters.map(cluster => cluster.id)));
    });
    source.metricsReceived.connect((_, { id, metrics }) => {
      this.byId.get(id)?.addMetrics(metrics);
    });
    source.devicesReceived.connect((_, { id, devices }) => {
      this.byId.get(id)?.addDevices(devices);
    });
  }

  /** The store of a cluster, which is filled from now on. */
  get(id: string): ClusterStore {
    let store = this.byId.get(id);
    if (store === undefined) {
      store = new ClusterStore();
      this.byId.set(id, store);
      this.updateWatched();
    }
    return store;
  }

  private removeOthers(ids: ReadonlySet<string>): void {
    const ended = [...this.byId.keys()].filter(id => !ids.has(id));
    if (ended.length > 0) {
      ended.forEach(id => this.byId.delete(id));
      // A cluster that comes back is sent from its beginning.
      this.updateWatched();
    }
  }

  private updateWatched(): void {
    this.source.watch([...this.byId.keys()]);
  }
}
