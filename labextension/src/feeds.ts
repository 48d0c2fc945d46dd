/**
 * The feeds of all clusters, shared by the side panel and the main area.
 */

import type { Client } from './client';
import { Feed } from './view/feed';
import type { ClusterView } from './view/view';

export class Feeds {
  private readonly byId = new Map<string, Feed>();

  constructor(private readonly client: Client) {
    client.stateChanged.connect((_, { clusters }) => {
      const ids = new Set(clusters.map(cluster => cluster.id));
      for (const id of this.byId.keys()) {
        if (!ids.has(id)) {
          this.byId.delete(id);
        }
      }
    });
    client.metricsArrived.connect((_, { id, packet }) => {
      this.byId.get(id)?.takeMetrics(packet);
    });
    client.devicesArrived.connect((_, { id, devices }) => {
      this.byId.get(id)?.takeDevices(devices);
    });
  }

  /** The feed of a cluster, which the server fills from now on. */
  of(id: string): Feed {
    let feed = this.byId.get(id);
    if (feed === undefined) {
      feed = new Feed();
      this.byId.set(id, feed);
      this.client.watch([...this.byId.keys()]);
    }
    return feed;
  }

  /** A view shows the cluster no longer, which may have ended. */
  leave(id: string, view: ClusterView): void {
    this.byId.get(id)?.delete(view);
  }
}
