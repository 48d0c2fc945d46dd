/**
 * The widget of a notebook's output, for anywidget.
 *
 * Covers: the model's state and messages to the view; what is asked goes to
 * the server where there is one, for a busy kernel does not hear the page.
 */

import { Feed } from './view/feed';
import {
  isCluster,
  isDeviceHistory,
  isRecord,
  readLogs,
  readPacket,
  readReply
} from './view/packets';
import type {
  Action,
  IActions,
  ILog,
  IMetricsPacket,
  LogOf
} from './view/types';
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

/** How long an idle kernel may take. */
const ANSWER_MS = 5000;
const BUSY =
  "the kernel is busy and does it when the cell has ended; the notebook's own stop button interrupts the ranks at once";

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
      await (server === null
        ? askKernel(model, { ask: action })
        : request(server, `clusters/${id}/${action}`, 'POST'));
    },
    log: async (id: string, of: LogOf): Promise<ILog[]> =>
      readLogs(
        await (server === null
          ? askKernel(model, { ask: 'log', rank: of })
          : request(server, `clusters/${id}/log?rank=${String(of)}`, 'GET'))
      ),
    logUrl: (id: string, rank: number): string | null =>
      server &&
      `${server.base}disttrain/api/clusters/${id}/log/file?rank=${String(rank)}`
  };
}

/** Ask the kernel, which answers once it is idle; rejects if it is busy. */
function askKernel(
  model: IModel,
  question: Record<string, unknown>
): Promise<unknown> {
  const token = String(Math.random());
  return new Promise((resolve, reject) => {
    const end = (): void => {
      window.clearTimeout(timer);
      model.off('msg:custom', onMessage);
    };
    const onMessage = (...args: unknown[]): void => {
      const [content] = args;
      if (isRecord(content) && content.reply === token) {
        end();
        if (typeof content.message === 'string') {
          reject(new Error(content.message));
        } else {
          resolve(content);
        }
      }
    };
    const timer = window.setTimeout(() => {
      end();
      reject(new Error(BUSY));
    }, ANSWER_MS);
    model.on('msg:custom', onMessage);
    model.send({ ...question, token });
  });
}

/** No front end translates what a widget says. */
function fill(text: string, ...args: string[]): string {
  return text.replace(
    /%(\d)/g,
    (_, digit: string) => args[Number(digit) - 1] ?? ''
  );
}

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

function take(feed: Feed, content: unknown, buffers: unknown): void {
  if (!isRecord(content)) {
    return;
  }
  if (isDeviceHistory(content.devices)) {
    feed.takeDevices(content.devices);
  }
  const packet = packetOf(content.metrics, buffers);
  if (packet !== null) {
    feed.takeMetrics(packet);
  }
}

/** Listen from the beginning, for a busy kernel sends nothing twice. */
function initialize({ model }: { model: IModel }): () => void {
  const feed = new Feed();
  const key = String(model.get('key'));
  feeds.set(key, feed);
  const onMessage = (...args: unknown[]): void => {
    take(feed, args[0], args[1]);
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
    if (typeof ended === 'string' && ended) {
      view.end(ended);
    }
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
    feed.delete(view);
    model.off('change:state', showState);
    model.off('change:ended', showState);
    view.destroy();
  };
}

export default { initialize, render };
