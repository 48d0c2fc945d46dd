/**
 * Connect to this package's server extension.
 *
 * Covers: the websocket with reconnection, the login and the base URL of Jupyter
 * Server.
 * Does not cover: the contents of messages (protocol/messages), the paths of
 * requests (protocol/serverActions).
 */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import { readReply, readServerMessage } from '../protocol/messages';
import { API, serverActions } from '../protocol/serverActions';
import type {
  IActions,
  IDevicesUpdate,
  IMetricsUpdate,
  IServerState
} from '../protocol/types';

/** Delays before a reconnection: each is twice the previous one. */
const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 8000;

export class ServerClient {
  readonly stateChanged = new Signal<this, IServerState>(this);
  readonly devicesReceived = new Signal<this, IDevicesUpdate>(this);
  readonly metricsReceived = new Signal<this, IMetricsUpdate>(this);
  /** Emits whether the server is connected. */
  readonly connectionChanged = new Signal<this, boolean>(this);

  state: IServerState = { clusters: [], starting: [], unreadable: [] };
  readonly actions: IActions;
  isConnected = false;
  private socket: WebSocket | null = null;
  private delayMs = FIRST_DELAY_MS;
  private watched: string[] = [];

  constructor(private readonly settings: ServerConnection.ISettings) {
    this.actions = serverActions(
      path => URLExt.join(settings.baseUrl, API, path),
      async (url, method) =>
        readReply(await ServerConnection.makeRequest(url, { method }, settings))
    );
  }

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
      setTimeout(() => {
        this.connect();
      }, this.delayMs);
      this.delayMs = Math.min(2 * this.delayMs, MAX_DELAY_MS);
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
}
