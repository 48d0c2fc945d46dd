/**
 * What is known of one cluster, for the views that show it now or later.
 *
 * Covers: its metrics and the figures of its ranks, given to each view.
 * Does not cover: where they come from (feeds, widget), drawing (view).
 */

import { MetricStore } from './series';
import type { DeviceHistory, IMetricsPacket } from './types';
import type { ClusterView } from './view';

const KEPT_POINTS = 600;

export class Feed {
  readonly store = new MetricStore();
  private readonly views = new Set<ClusterView>();
  private readonly devices = new Map<string, (number | null)[][]>();

  takeDevices(devices: DeviceHistory): void {
    for (const [rank, points] of Object.entries(devices)) {
      const known = this.devices.get(rank) ?? [];
      const last = known.at(-1)?.[0] ?? 0;
      const kept = [
        ...known,
        ...points.filter(point => (point[0] ?? 0) > last)
      ];
      this.devices.set(rank, kept.slice(-KEPT_POINTS));
    }
    this.views.forEach(view => {
      view.takeDevices(devices);
    });
  }

  takeMetrics(packet: IMetricsPacket): void {
    this.store.take(packet);
    this.views.forEach(view => {
      view.showMetrics();
    });
  }

  add(view: ClusterView): void {
    this.views.add(view);
    view.takeDevices(Object.fromEntries(this.devices));
    view.showMetrics();
  }

  delete(view: ClusterView): void {
    this.views.delete(view);
  }
}
