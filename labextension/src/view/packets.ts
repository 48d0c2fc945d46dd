/**
 * Messages to data: checks what arrives from outside.
 */

import type {
  DeviceHistory,
  ICluster,
  ILog,
  ILogPart,
  IMetricsPacket
} from './types';

export interface IUnreadable {
  id: string;
  name: string;
  version: string;
  own: string;
}

/** A cluster whose ranks have not all come up yet. */
export interface IStarting {
  id: string;
  name: string;
  /** E.g. "starting: 3 of 4 ranks, importing torch". */
  text: string;
}

export interface IState {
  clusters: ICluster[];
  starting: IStarting[];
  unreadable: IUnreadable[];
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** The kernel and the server are this package's own; a wrong version lacks these. */
export function isCluster(value: unknown): value is ICluster {
  return (
    isRecord(value) &&
    typeof value.id === 'string' &&
    Array.isArray(value.ranks) &&
    Array.isArray(value.nodes)
  );
}

export function readState(value: unknown): IState | null {
  if (!isRecord(value) || !Array.isArray(value.clusters)) {
    return null;
  }
  const found: unknown[] = value.clusters;
  const starting: unknown[] = Array.isArray(value.starting)
    ? value.starting
    : [];
  const others: unknown[] = Array.isArray(value.unreadable)
    ? value.unreadable
    : [];
  return {
    clusters: found.filter(isCluster),
    starting: starting.filter(isStarting),
    unreadable: others.filter(isUnreadable)
  };
}

function isStarting(value: unknown): value is IStarting {
  return (
    isRecord(value) &&
    typeof value.id === 'string' &&
    typeof value.name === 'string' &&
    typeof value.text === 'string'
  );
}

function isUnreadable(value: unknown): value is IUnreadable {
  return (
    isRecord(value) &&
    typeof value.name === 'string' &&
    typeof value.version === 'string'
  );
}

export function isDeviceHistory(value: unknown): value is DeviceHistory {
  return (
    isRecord(value) && Object.values(value).every(each => Array.isArray(each))
  );
}

/** The logs in a reply of the server or the kernel. */
export function readLogs(value: unknown): ILog[] {
  const logs: unknown[] =
    isRecord(value) && Array.isArray(value.logs) ? value.logs : [];
  return logs.filter(isLog);
}

function isLog(value: unknown): value is ILog {
  return (
    isRecord(value) &&
    typeof value.rank === 'number' &&
    Array.isArray(value.parts) &&
    value.parts.every(isLogPart)
  );
}

function isLogPart(value: unknown): value is ILogPart {
  return (
    isRecord(value) &&
    (value.stream === 'stdout' || value.stream === 'stderr') &&
    typeof value.text === 'string'
  );
}

/**
 * Take a binary message of the server apart: the length of the header, the
 * header, the columns.
 */
export function readFramed(
  data: ArrayBuffer
): { id: string; packet: IMetricsPacket } | null {
  const length = new DataView(data).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(data, 4, length));
  const header: unknown = JSON.parse(text);
  if (!isRecord(header) || typeof header.id !== 'string') {
    return null;
  }
  const packet = readPacket(header, data, 4 + length);
  return packet === null ? null : { id: header.id, packet };
}

/**
 * Read the columns behind each other, the widest numbers first, so that each
 * begins at a multiple of its width.
 */
export function readPacket(
  header: unknown,
  data: ArrayBuffer,
  start: number
): IMetricsPacket | null {
  if (!isRecord(header) || typeof header.count !== 'number') {
    return null;
  }
  const count = header.count;
  const names: unknown[] = Array.isArray(header.names) ? header.names : [];
  let at = start;
  const take = (width: number): number => {
    const begin = at;
    at += width * count;
    return begin;
  };
  return {
    names: names.map(String),
    first: header.first === true,
    steps: new Float64Array(data, take(8), count),
    values: new Float32Array(data, take(4), count),
    cells: new Int32Array(data, take(4), count),
    nameAt: new Uint16Array(data, take(2), count),
    ranks: new Uint16Array(data, take(2), count)
  };
}

/**
 * Read a reply of the server; one that refuses becomes an error that says what
 * the server said.
 */
export async function readReply(response: Response): Promise<unknown> {
  const told: unknown = await response.json();
  if (!response.ok) {
    throw new Error(
      isRecord(told) && typeof told.message === 'string'
        ? told.message
        : `${String(response.status)} ${response.statusText}`
    );
  }
  return told;
}
