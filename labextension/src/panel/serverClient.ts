/**
 * Connect to this package's server extension.
 *
 * Covers: the websocket with reconnection, requests by REST, the login and the
 * base_url of Jupyter Server.
 * Does not cover: the contents of messages (protocol/messages).
 */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import { readLogs, readReply, readServerMessage } from '../protocol/messages';
import type {
  Action,
  DeviceHistory,
  ILog,
  IMetricsMessage,
  IServerState,
  LogSelection
} from '../protocol/types';

const API = 'disttrain/api';
/** Delays before a reconnection: each is twice the previous one. */
const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 8000;

export class ServerClient {
  readonly stateChanged = new Signal<this, IServerState>(this);
  readonly devicesReceived = new Signal<
    this,
    { id: string; devices: DeviceHistory }
  >(this);
  readonly metricsReceived = new Signal<
    this,
    { id: string; metrics: IMetricsMessage }
  >(this);
  /** Emits whether the server is connected. */
  readonly connectionChanged = new Signal<this, boolean>(this);

  state: IServerState = { clusters: [], starting: [], unreadable: [] };
  isConnected = false;
  private socket: WebSocket | null = null;
  private delayMs = FIRST_DELAY_MS;
  private timer = 0;
  private watched: string[] = [];
  private isClosed = false;

  constructor(private readonly settings = ServerConnection.makeSettings()) {}

  connect(): void {
    const { wsUrl, token, appendToken, WebSocket: Socket } = this.settings;
    let url = URLExt.join(wsUrl, API, 'live');
    if (appendToken && token) {
      url += `?token=${encodeURIComponent(token)}`;
    }
    const socket = new Socket(url);
    socket.binaryType = 'arraybuffer';
    this.socket = socket;
    socket.onopen = (): void => {
      this.delayMs = FIRST_DELAY_MS;
      this.setConnected(true);
      this.sendWatched();
    };
    socket.onmessage = (event: MessageEvent<unknown>): void => {
      this.onMessage(event.data);
    };
    socket.onclose = (): void => {
      this.setConnected(false);
      if (!this.isClosed) {
        this.timer = window.setTimeout(() => {
          this.connect();
        }, this.delayMs);
        this.delayMs = Math.min(2 * this.delayMs, MAX_DELAY_MS);
      }
    };
  }

  private setConnected(isConnected: boolean): void {
    if (isConnected !== this.isConnected) {
      this.isConnected = isConnected;
      this.connectionChanged.emit(isConnected);
    }
  }

  private onMessage(data: unknown): void {
    const message = readServerMessage(data);
    if (message?.kind === 'metrics') {
      this.metricsReceived.emit(message);
    } else if (message?.kind === 'devices') {
      this.devicesReceived.emit(message);
    } else if (message?.kind === 'state') {
      this.state = message.state;
      this.stateChanged.emit(message.state);
    }
  }

  /** Receive the metrics and device histories of these clusters alone. */
  watch(ids: string[]): void {
    this.watched = ids;
    this.sendWatched();
  }

  private sendWatched(): void {
    if (this.socket?.readyState === WebSocket.OPEN) {
      this.socket.send(JSON.stringify({ watch: this.watched }));
    }
  }

  /** Request an action; resolves once it has begun. */
  async requestAction(clusterId: string, action: Action): Promise<void> {
    await this.fetch(`clusters/${clusterId}/${action}`, { method: 'POST' });
  }

  async log(clusterId: string, selection: LogSelection): Promise<ILog[]> {
    const path = `clusters/${clusterId}/log?rank=${String(selection)}`;
    return readLogs(await this.fetch(path, {}));
  }

  /** The URL of a rank's whole log. */
  logUrl(clusterId: string, rank: number): string {
    const path = `clusters/${clusterId}/log/file?rank=${String(rank)}`;
    return URLExt.join(this.settings.baseUrl, API, path);
  }

  private async fetch(path: string, init: RequestInit): Promise<unknown> {
    const url = URLExt.join(this.settings.baseUrl, API, path);
    const response = await ServerConnection.makeRequest(
      url,
      init,
      this.settings
    );
    return readReply(response);
  }

  dispose(): void {
    this.isClosed = true;
    window.clearTimeout(this.timer);
    this.socket?.close();
    Signal.clearData(this);
  }
}
