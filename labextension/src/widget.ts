/**
 * The widget of a notebook's output, for anywidget.
 *
 * Covers: the model's state and messages to the view; what is asked goes to
 * the server where there is one, for a busy kernel does not hear the page.
 */

import {
  isCluster,
  isDeviceHistory,
  isRecord,
  readPacket,
  readReply
} from './view/packets';
import { MetricStore } from './view/series';
import type { Action, IActions, IMetricsPacket } from './view/types';
import { ClusterView } from './view/view';

interface IModel {
  get(name: string): unknown;
  on(event: string, callback: (...args: unknown[]) => void): void;
  off(event: string, callback: (...args: unknown[]) => void): void;
  send(content: unknown): void;
}

interface IRenderContext {
  model: IModel;
  el: HTMLElement;
}

interface IServer {
  base: string;
  token: string;
}

/** What JupyterLab and Notebook write into their page; null elsewhere. */
function findServer(): IServer | null {
  const text = document.getElementById('jupyter-config-data')?.textContent;
  if (!text) {
    return null;
  }
  const config: unknown = JSON.parse(text);
  return isRecord(config) && typeof config.baseUrl === 'string'
    ? {
        base: config.baseUrl,
        token: typeof config.token === 'string' ? config.token : ''
      }
    : null;
}

async function request(
  server: IServer,
  path: string,
  method: string
): Promise<unknown> {
  const cookie = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie);
  const headers: Record<string, string> = {};
  if (cookie?.[1]) {
    headers['X-XSRFToken'] = cookie[1];
  }
  if (server.token) {
    headers.Authorization = `token ${server.token}`;
  }
  const url = `${server.base}disttrain/api/${path}`;
  const response = await fetch(url, {
    method,
    headers,
    credentials: 'same-origin'
  });
  return readReply(response);
}

function actionsFor(model: IModel): IActions {
  const server = findServer();
  return {
    ask: async (id: string, action: Action): Promise<void> => {
      if (server === null) {
        model.send({ ask: action });
      } else {
        await request(server, `clusters/${id}/${action}`, 'POST');
      }
    },
    log: async (id: string, rank: number): Promise<string> => {
      if (server === null) {
        return 'The logs are in the folder that cluster.log_folder names.';
      }
      const told = await request(
        server,
        `clusters/${id}/log?rank=${String(rank)}`,
        'GET'
      );
      return isRecord(told) ? String(told.text) : '';
    },
    confirm: (title: string, body: string): Promise<boolean> =>
      Promise.resolve(window.confirm(`${title}\n\n${body}`))
  };
}

/** No front end translates what a widget says. */
function fill(text: string, ...args: string[]): string {
  return text.replace(
    /%(\d)/g,
    (_, digit: string) => args[Number(digit) - 1] ?? ''
  );
}

/** What came for one model, for the views that show it now or later. */
class Feed {
  readonly store = new MetricStore();
  readonly views = new Set<ClusterView>();
  private readonly devices = new Map<string, (number | null)[][]>();

  take(content: unknown, buffers: unknown): void {
    if (!isRecord(content)) {
      return;
    }
    const { devices } = content;
    if (isDeviceHistory(devices)) {
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
    const packet = packetOf(content.metrics, buffers);
    if (packet !== null) {
      this.store.take(packet);
      this.views.forEach(view => {
        view.showMetrics();
      });
    }
  }

  add(view: ClusterView): void {
    this.views.add(view);
    view.takeDevices(Object.fromEntries(this.devices));
    view.showMetrics();
  }
}

const KEPT_POINTS = 600;
/** By the model's key: each context of one model gets an object of its own. */
const feeds = new Map<string, Feed>();

function packetOf(header: unknown, buffers: unknown): IMetricsPacket | null {
  const first: unknown = Array.isArray(buffers) ? buffers[0] : undefined;
  if (!(first instanceof DataView)) {
    return null;
  }
  // The columns have to begin at a multiple of their width.
  const bytes = first.buffer.slice(
    first.byteOffset,
    first.byteOffset + first.byteLength
  );
  return bytes instanceof ArrayBuffer ? readPacket(header, bytes, 0) : null;
}

/** Listen from the beginning, for a busy kernel sends nothing twice. */
function initialize({ model }: { model: IModel }): () => void {
  const feed = new Feed();
  const key = String(model.get('key'));
  feeds.set(key, feed);
  const onMessage = (...args: unknown[]): void => {
    feed.take(args[0], args[1]);
  };
  model.on('msg:custom', onMessage);
  // After a reload of the page the kernel has sent all before.
  model.send({ ask: 'history' });
  return () => {
    feeds.delete(key);
    model.off('msg:custom', onMessage);
  };
}

function render({ model, el }: IRenderContext): () => void {
  const feed = feeds.get(String(model.get('key'))) ?? new Feed();
  const view = new ClusterView(actionsFor(model), fill, feed.store);
  el.append(view.node);
  const showState = (): void => {
    const cluster = model.get('state');
    if (isCluster(cluster)) {
      view.show(cluster);
    }
    const ended = model.get('ended');
    view.setStale(typeof ended === 'string' ? ended : '');
  };
  model.on('change:state', showState);
  model.on('change:ended', showState);
  showState();
  feed.add(view);
  const themes = new MutationObserver(() => {
    view.restyle();
  });
  themes.observe(document.body, {
    attributeFilter: ['data-jp-theme-name', 'class']
  });
  return () => {
    themes.disconnect();
    feed.views.delete(view);
    model.off('change:state', showState);
    model.off('change:ended', showState);
    view.destroy();
  };
}

export default { initialize, render };
