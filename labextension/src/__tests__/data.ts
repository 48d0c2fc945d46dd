/**
 * Make clusters, ranks, variables and metrics for tests.
 */

import type {
  ICluster,
  IMetricsMessage,
  INode,
  IRank,
  IVariable,
  IVariables,
  Translate
} from '../protocol/types';
import { formatMessage } from '../view/format';

export const translate: Translate = formatMessage;

export function makeRank(rank: number, rest: Partial<IRank> = {}): IRank {
  const state = rest.state ?? 'running';
  return {
    rank,
    host: 'node1',
    local_rank: rank,
    device: `cuda:${String(rank)}`,
    pid: 1000 + rank,
    state,
    text: state,
    ...rest
  };
}

export function makeNode(host: string, rest: Partial<INode> = {}): INode {
  return {
    host,
    cores: 64,
    cpu_percent: 12.4,
    load: 3.14159,
    memory_used_bytes: 8.25 * 2 ** 30,
    memory_total_bytes: 256 * 2 ** 30,
    disk_free_bytes: 100 * 2 ** 30,
    received_bytes_per_s: 1500,
    sent_bytes_per_s: 2.5e6,
    infiniband_received_bytes_per_s: 0,
    infiniband_sent_bytes_per_s: 0,
    ...rest
  };
}

export function makeCluster(
  ranks: IRank[],
  rest: Partial<ICluster> = {}
): ICluster {
  return {
    id: 'c1',
    name: 'default',
    launcher: 'local',
    backend: 'gloo',
    started_s: 0,
    notebook: '',
    held: true,
    kept: false,
    job_file: '',
    logs: '',
    sample_s: 1,
    ranks,
    nodes: [],
    remarks: [],
    ...rest
  };
}

export function makeVariable(
  name: string,
  rest: Partial<IVariable> = {}
): IVariable {
  return {
    name,
    type: 'int',
    value: '1',
    size_bytes: null,
    ranks: '0-3',
    differs: false,
    ...rest
  };
}

export function makeVariables(
  variables: IVariable[],
  rest: Partial<IVariables> = {}
): IVariables {
  return {
    variables,
    ranks: '0-3',
    silent: '',
    least_tensor_bytes: 0,
    most_tensor_bytes: 0,
    ...rest
  };
}

export interface IValue {
  name: string;
  value: number;
  step?: number;
  rank?: number;
  cell?: number;
}

export function makeMetrics(values: IValue[], first = false): IMetricsMessage {
  const names = [...new Set(values.map(each => each.name))];
  return {
    names,
    first,
    steps: Float64Array.from(values, each => each.step ?? Number.NaN),
    values: Float32Array.from(values, each => each.value),
    nameAt: Uint16Array.from(values, each => names.indexOf(each.name)),
    ranks: Uint16Array.from(values, each => each.rank ?? 0),
    cells: Int32Array.from(values, each => each.cell ?? 1)
  };
}

/** The message as the server sends it: lengths, header and columns. */
export function frame(
  header: Record<string, unknown>,
  { steps, values, cells, nameAt, ranks }: IMetricsMessage
): ArrayBuffer {
  let text = JSON.stringify(header);
  text = text.padEnd(text.length + ((8 - ((text.length + 4) % 8)) % 8));
  const head = new TextEncoder().encode(text);
  const columns = [steps, values, cells, nameAt, ranks].map(
    each => new Uint8Array(each.buffer)
  );
  const size = columns.reduce((sum, each) => sum + each.length, 0);
  const bytes = new Uint8Array(4 + head.length + size);
  new DataView(bytes.buffer).setUint32(0, head.length, true);
  let offset = 4;
  for (const part of [head, ...columns]) {
    bytes.set(part, offset);
    offset += part.length;
  }
  return bytes.buffer;
}
