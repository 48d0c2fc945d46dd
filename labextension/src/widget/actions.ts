/**
 * Send the requests of the widget to the server, or else to the kernel.
 *
 * The server comes first: a busy kernel does not receive messages of the page.
 */

import { isRecord, readLogs, readReply } from '../protocol/messages';
import { API, serverActions } from '../protocol/serverActions';
import type { IActions } from '../protocol/types';

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
  return server === null
    ? kernelActions(model)
    : serverActions(
        path => `${server.base}${API}/${path}`,
        (url, method) => requestServer(server.token, url, method)
      );
}

async function requestServer(
  token: string,
  url: string,
  method: string
): Promise<unknown> {
  const cookie = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie);
  const headers = {
    ...(cookie?.[1] && { 'X-XSRFToken': cookie[1] }),
    ...(token && { Authorization: `token ${token}` })
  };
  return readReply(
    await fetch(url, { method, headers, credentials: 'same-origin' })
  );
}

/** Actions without a server. */
export function kernelActions(model: IModel): IActions {
  return {
    request: async (_, action) => {
      await requestKernel(model, { ask: action });
    },
    log: async (_, selection) =>
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
