/**
 * Send the requests of the widget to the server, or else to the kernel.
 *
 * The server comes first: a busy kernel does not receive messages of the page.
 */

import { isRecord, readLogs, readReply } from '../protocol/messages';
import type { Action, IActions, ILog, LogSelection } from '../protocol/types';

/** The part of anywidget's model that this package uses. */
export interface IModel {
  get(name: string): unknown;
  on(event: string, callback: (...args: unknown[]) => void): void;
  off(event: string, callback: (...args: unknown[]) => void): void;
  send(content: unknown): void;
}

/** How long an idle kernel may take to reply. */
export const REPLY_TIMEOUT_MS = 5000;
const BUSY =
  "the kernel is busy and handles this when the cell has ended; the notebook's own stop button interrupts the ranks at once";

interface IServer {
  base: string;
  token: string;
}

/** Read the configuration that JupyterLab and Notebook write into their page. */
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

/** Make the actions for the page that the widget is in. */
export function makeActions(model: IModel): IActions {
  const server = findServer();
  return server === null ? kernelActions(model) : serverActions(server);
}

function serverActions(server: IServer): IActions {
  return {
    request: async (id: string, action: Action): Promise<void> => {
      await requestServer(server, `clusters/${id}/${action}`, 'POST');
    },
    log: async (id: string, selection: LogSelection): Promise<ILog[]> => {
      const path = `clusters/${id}/log?rank=${String(selection)}`;
      return readLogs(await requestServer(server, path, 'GET'));
    },
    logUrl: (id: string, rank: number): string =>
      `${server.base}disttrain/api/clusters/${id}/log/file?rank=${String(rank)}`
  };
}

async function requestServer(
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

/** Actions without a server. */
export function kernelActions(model: IModel): IActions {
  return {
    request: async (_id: string, action: Action): Promise<void> => {
      await requestKernel(model, { ask: action });
    },
    log: async (_id: string, selection: LogSelection): Promise<ILog[]> =>
      readLogs(await requestKernel(model, { ask: 'log', rank: selection })),
    logUrl: () => null
  };
}

/** Send a request to the kernel; rejects if it fails or there is no reply. */
function requestKernel(
  model: IModel,
  request: Record<string, unknown>
): Promise<unknown> {
  const token = String(Math.random());
  return new Promise((resolve, reject) => {
    const finish = (): void => {
      clearTimeout(timer);
      model.off('msg:custom', onMessage);
    };
    const onMessage = (...args: unknown[]): void => {
      const [content] = args;
      if (isRecord(content) && content.reply === token) {
        finish();
        if (typeof content.message === 'string') {
          reject(new Error(content.message));
        } else {
          resolve(content);
        }
      }
    };
    const timer = setTimeout(() => {
      finish();
      reject(new Error(BUSY));
    }, REPLY_TIMEOUT_MS);
    model.on('msg:custom', onMessage);
    model.send({ ...request, token });
  });
}
