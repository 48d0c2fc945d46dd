/**
 * Validate messages of the kernel and the server and convert them to data.
 *
 * Covers: the websocket's messages, metrics as binary columns, HTTP replies.
 * Does not cover: connections (panel/serverClient, widget/actions).
 */

import type {
  DeviceHistory,
  ICluster,
  IDevicesUpdate,
  ILog,
  ILogPart,
  IMetricsMessage,
  IMetricsUpdate,
  IServerState,
  IStartingCluster,
  IUnreadableCluster,
  IVariable,
  IVariables,
  Plots
} from './types';

/** A message of the server's websocket. */
export type ServerMessage =
  | { kind: 'state'; state: IServerState }
  | ({ kind: 'devices' } & IDevicesUpdate)
  | ({ kind: 'metrics' } & IMetricsUpdate);

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

export function isPlots(value: unknown): value is Plots {
  return ['all', 'metrics', 'devices', 'none'].some(each => each === value);
}

/** Checks the fields that clusters of other versions lack. */
export function isCluster(value: unknown): value is ICluster {
  return (
    isRecord(value) &&
    typeof value.id === 'string' &&
    Array.isArray(value.ranks) &&
    Array.isArray(value.nodes)
  );
}

/** Read a message of the websocket; null if it is of no known type. */
export function readServerMessage(data: unknown): ServerMessage | null {
  if (data instanceof ArrayBuffer) {
    return readFramedMetrics(data);
  }
  const message: unknown = JSON.parse(String(data));
  if (!isRecord(message)) {
    return null;
  }
  const { type, id, ranks } = message;
  if (type === 'devices') {
    return typeof id === 'string' && isDeviceHistory(ranks)
      ? { kind: 'devices', id, devices: ranks }
      : null;
  }
  const state = readState(message);
  return state && { kind: 'state', state };
}

export function readState(value: unknown): IServerState | null {
  if (!isRecord(value) || !Array.isArray(value.clusters)) {
    return null;
  }
  return {
    clusters: itemsOf(value.clusters).filter(isCluster),
    starting: itemsOf(value.starting).filter(isStarting),
    unreadable: itemsOf(value.unreadable).filter(isUnreadable)
  };
}

function itemsOf(value: unknown): unknown[] {
  return Array.isArray(value) ? value : [];
}

function isStarting(value: unknown): value is IStartingCluster {
  return (
    isRecord(value) &&
    typeof value.id === 'string' &&
    typeof value.name === 'string' &&
    typeof value.text === 'string'
  );
}

function isUnreadable(value: unknown): value is IUnreadableCluster {
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
  return isRecord(value) ? itemsOf(value.logs).filter(isLog) : [];
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

/** The variables in a reply of the server. */
export function readVariables(value: unknown): IVariables {
  const reply = isRecord(value) ? value : {};
  return {
    variables: itemsOf(reply.variables).filter(isVariable),
    ranks: textOf(reply.ranks),
    silent: textOf(reply.silent),
    least_tensor_bytes: Number(reply.least_tensor_bytes ?? 0),
    most_tensor_bytes: Number(reply.most_tensor_bytes ?? 0)
  };
}

function isVariable(value: unknown): value is IVariable {
  return (
    isRecord(value) &&
    [value.name, value.type, value.value, value.ranks].every(
      each => typeof each === 'string'
    ) &&
    (value.size_bytes === null || typeof value.size_bytes === 'number') &&
    typeof value.differs === 'boolean'
  );
}

function textOf(value: unknown): string {
  return typeof value === 'string' ? value : '';
}

/**
 * Read a binary message of the server: the header's length as a 32-bit
 * integer, the header as JSON, the columns.
 */
function readFramedMetrics(data: ArrayBuffer): ServerMessage | null {
  const length = new DataView(data).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(data, 4, length));
  const header: unknown = JSON.parse(text);
  if (!isRecord(header) || typeof header.id !== 'string') {
    return null;
  }
  const metrics = readMetrics(header, data, 4 + length);
  return metrics && { kind: 'metrics', id: header.id, metrics };
}

/** Read metrics that the kernel sends as a header and a buffer. */
export function readBufferedMetrics(
  header: unknown,
  buffers: unknown
): IMetricsMessage | null {
  const [view] = itemsOf(buffers);
  if (!(view instanceof DataView)) {
    return null;
  }
  // A copy: each column must begin at a multiple of its width.
  const end = view.byteOffset + view.byteLength;
  const bytes = view.buffer.slice(view.byteOffset, end);
  return bytes instanceof ArrayBuffer ? readMetrics(header, bytes, 0) : null;
}

/**
 * Read columns that follow one another, the widest numbers first, so that each
 * column begins at a multiple of its width.
 */
function readMetrics(
  header: unknown,
  data: ArrayBuffer,
  start: number
): IMetricsMessage | null {
  if (!isRecord(header) || typeof header.count !== 'number') {
    return null;
  }
  const count = header.count;
  let offset = start;
  const columnOf = (width: number): number => {
    const begin = offset;
    offset += width * count;
    return begin;
  };
  return {
    names: itemsOf(header.names).map(String),
    first: header.first === true,
    steps: new Float64Array(data, columnOf(8), count),
    values: new Float32Array(data, columnOf(4), count),
    cells: new Int32Array(data, columnOf(4), count),
    nameAt: new Uint16Array(data, columnOf(2), count),
    ranks: new Uint16Array(data, columnOf(2), count)
  };
}

/** Read a reply of the server; a failure becomes an error with its message. */
export async function readReply(response: Response): Promise<unknown> {
  const reply: unknown = await response.json();
  if (!response.ok) {
    throw new Error(
      isRecord(reply) && typeof reply.message === 'string'
        ? reply.message
        : `${String(response.status)} ${response.statusText}`
    );
  }
  return reply;
}

/** The text of an error, for the user. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
