/**
 * Keep what was received about one cluster, for all views that show it.
 *
 * Covers: metrics, device histories, notifying subscribers.
 * Does not cover: receiving (panel/clusterStores, widget), drawing (view).
 */

import type { DeviceHistory, IMetricsMessage } from '../protocol/types';
import { DeviceStore } from './deviceStore';
import { MetricStore } from './metricStore';

export class ClusterStore {
  readonly metrics = new MetricStore();
  readonly devices = new DeviceStore();
  private readonly listeners = new Set<() => void>();

  addMetrics(message: IMetricsMessage): void {
    this.metrics.add(message);
    this.notify();
  }

  addDevices(devices: DeviceHistory): void {
    this.devices.add(devices);
    this.notify();
  }

  /** Call a function after each change; returns how to stop that. */
  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => {
      this.listeners.delete(listener);
    };
  }

  private notify(): void {
    this.listeners.forEach(listener => {
      listener();
    });
  }
}
