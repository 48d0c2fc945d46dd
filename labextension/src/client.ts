/**
 * The server's side of the panel: one websocket, REST for what is asked.
 *
 * Covers: reconnecting, the login and base_url of Jupyter Server.
 * Does not cover: what the messages mean (view/packets).
 */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import {
  isDeviceHistory,
  isRecord,
  readFramed,
  readLogs,
  readReply,
  readState,
  type IState
} from './view/packets';
import type {
  Action,
  DeviceHistory,
  ILog,
  IMetricsPacket,
  LogOf
} from './view/types';

const API = 'disttrain/api';
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;

export class Client {
  readonly stateChanged = new Signal<this, IState>(this);
  readonly devicesArrived = new Signal<
    this,
    { id: string; devices: DeviceHistory }
  >(this);
  readonly metricsArrived = new Signal<
    this,
    { id: string; packet: IMetricsPacket }
  >(this);
  /** Tells whether the server is reached. */
  readonly connectionChanged = new Signal<this, boolean>(this);

  state: IState = { clusters: [], starting: [], unreadable: [] };
  isConnected = false;
  private socket: WebSocket | null = null;
  private pause = FIRST_PAUSE;
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
      this.pause = FIRST_PAUSE;
      this.setConnected(true);
      this.sendWatched();
    };
    socket.onmessage = (event: MessageEvent<unknown>): void => {
      this.take(event.data);
    };
    socket.onclose = (): void => {
      this.setConnected(false);
      if (!this.isClosed) {
        this.timer = window.setTimeout(() => {
          this.connect();
        }, this.pause);
        this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
      }
    };
  }

  private setConnected(is: boolean): void {
    if (is !== this.isConnected) {
      this.isConnected = is;
      this.connectionChanged.emit(is);
    }
  }

  private take(data: unknown): void {
    if (data instanceof ArrayBuffer) {
      const read = readFramed(data);
      if (read !== null) {
        this.metricsArrived.emit(read);
      }
      return;
    }
    const message: unknown = JSON.parse(String(data));
    if (!isRecord(message)) {
      return;
    }
    const { id, ranks } = message;
    if (
      message.type === 'devices' &&
      typeof id === 'string' &&
      isDeviceHistory(ranks)
    ) {
      this.devicesArrived.emit({ id, devices: ranks });
      return;
    }
    const state = readState(message);
    if (state !== null) {
      this.state = state;
      this.stateChanged.emit(state);
    }
  }

  /** Have the metrics of these clusters sent, from their beginning on. */
  watch(ids: string[]): void {
    this.watched = ids;
    this.sendWatched();
  }

  private sendWatched(): void {
    if (this.socket?.readyState === WebSocket.OPEN) {
      this.socket.send(JSON.stringify({ watch: this.watched }));
    }
  }

  async ask(clusterId: string, action: Action): Promise<void> {
    await this.request(`clusters/${clusterId}/${action}`, { method: 'POST' });
  }

  async log(clusterId: string, of: LogOf): Promise<ILog[]> {
    return readLogs(
      await this.request(`clusters/${clusterId}/log?rank=${String(of)}`, {})
    );
  }

  /** Where the browser finds a rank's whole log. */
  logUrl(clusterId: string, rank: number): string {
    const path = `clusters/${clusterId}/log/file?rank=${String(rank)}`;
    return URLExt.join(this.settings.baseUrl, API, path);
  }

  private async request(path: string, init: RequestInit): Promise<unknown> {
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
