/**
 * Types of the data that the kernel and the server send.
 *
 * Covers: clusters, ranks and nodes as features/telemetry/snapshot.py makes them, metrics,
 * device histories, logs, variables.
 * Does not cover: validation of messages (messages).
 */

/** A state in one word; `IRank.text` has the details. */
export type RankState =
  | 'starting'
  | 'idle'
  | 'running'
  | 'in collective'
  | 'not responding'
  /** The process exited because the user stopped or restarted it. */
  | 'ended'
  | 'dead';

export interface IGpu {
  name?: string;
  percent?: number;
  memory_used_bytes?: number;
  memory_total_bytes?: number;
  celsius?: number;
  watts?: number;
  limited_by?: string;
  ecc_errors?: number;
  others?: number;
}

export interface IRank {
  rank: number;
  host: string;
  local_rank: number;
  device: string;
  pid: number;
  state: RankState;
  /** The state with its details, for the user. */
  text: string;
  cpu_percent?: number;
  memory_bytes?: number;
  gpu?: IGpu;
  /** The prompt number of the running cell. */
  cell?: number;
  line?: number;
  call?: string;
  steps?: number;
  /** Beginnings and ends of cells and of requests that wait for cells. */
  uses?: number;
  /** Iterations of the running loop: done and total. */
  done?: number;
  total?: number;
  /** Estimated time left in the loop. */
  left_s?: number;
  steps_per_s?: number;
  samples_per_s?: number;
  /** Fractions of the time, 0 to 1. */
  waiting?: number;
  waiting_for_data?: number;
}

export interface INode {
  host: string;
  cores: number;
  cpu_percent: number;
  load: number;
  memory_used_bytes: number;
  memory_total_bytes: number;
  disk_free_bytes: number;
  received_bytes_per_s: number;
  sent_bytes_per_s: number;
  infiniband_received_bytes_per_s: number;
  infiniband_sent_bytes_per_s: number;
}

export interface ICluster {
  id: string;
  name: string;
  launcher: string;
  backend: string;
  started_s: number;
  notebook: string;
  held: boolean;
  kept: boolean;
  /** Connection file of the batch job that runs the ranks; empty without one. */
  job_file: string;
  logs: string;
  sample_s: number;
  ranks: IRank[];
  nodes: INode[];
  /** Warnings for the user. */
  remarks: string[];
  /** Which ranks wait for which, once a collective takes too long. */
  hang?: string[];
}

/** A cluster of another version of this package, which can't be shown. */
export interface IUnreadableCluster {
  id: string;
  name: string;
  /** The version that started it. */
  version: string;
  /** The version of this server. */
  own: string;
}

/** A cluster whose ranks are not all ready yet. */
export interface IStartingCluster {
  id: string;
  name: string;
  /** E.g. "starting: 3 of 4 ranks, importing torch". */
  text: string;
}

/** All clusters of a server. */
export interface IServerState {
  clusters: ICluster[];
  starting: IStartingCluster[];
  unreadable: IUnreadableCluster[];
}

/** A batch of metric values, as columns of one length. */
export interface IMetricsMessage {
  names: string[];
  /** Whether it has the whole history and replaces what is stored. */
  first: boolean;
  /** NaN for a value that was logged without a step. */
  steps: Float64Array;
  values: Float32Array;
  /** Indices into `names`. */
  nameAt: Uint16Array;
  ranks: Uint16Array;
  cells: Int32Array;
}

/**
 * One sample of a rank's process: time in seconds, CPU in percent of a core,
 * memory in bytes, GPU use in percent, GPU memory in bytes, steps per second.
 */
export type DeviceSample = (number | null)[];

/** Samples by rank, in order of time. */
export type DeviceHistory = Record<string, DeviceSample[]>;

/** New metric values of one cluster. */
export interface IMetricsUpdate {
  id: string;
  metrics: IMetricsMessage;
}

/** New samples of one cluster. */
export interface IDevicesUpdate {
  id: string;
  devices: DeviceHistory;
}

/** Which plots are shown. */
export type Plots = 'all' | 'metrics' | 'devices' | 'none';

/** A request of the user that changes a cluster. */
export type Action = 'interrupt' | 'reset' | 'stop';

/** Consecutive output of a rank on one stream. */
export interface ILogPart {
  stream: 'stdout' | 'stderr';
  text: string;
}

/** The end of a rank's log. */
export interface ILog {
  rank: number;
  parts: ILogPart[];
  /** Whether earlier output was left out. */
  is_cut: boolean;
}

/** Which log: that of one rank, or the end of each. */
export type LogSelection = number | 'all';

/** A variable as it is on some ranks. */
export interface IVariable {
  name: string;
  type: string;
  /** Shape, data type, device and placements, or the plain value. */
  value: string;
  /** Of its tensors and arrays, on one rank; null if it holds none. */
  size_bytes: number | null;
  /** E.g. "0-2,5". */
  ranks: string;
  /** Whether other ranks lack it, or have another value. */
  differs: boolean;
}

/** The variables of a cluster as features/introspection/variables.py makes them. */
export interface IVariables {
  /** One that differs between ranks is there for each group of ranks. */
  variables: IVariable[];
  /** The ranks that replied, e.g. "0-2,5". */
  ranks: string;
  /** The ranks that did not reply in time; empty if there are none. */
  silent: string;
  /** Of the tensors and arrays of the rank with the fewest bytes. */
  least_tensor_bytes: number;
  most_tensor_bytes: number;
}

/** Requests of the view to the kernel or the server. */
export interface IActions {
  /** Resolves once the action has begun; rejects with the reason. */
  request(clusterId: string, action: Action): Promise<void>;
  /** The end of one rank's log, or of all ranks' logs. */
  log(clusterId: string, selection: LogSelection): Promise<ILog[]>;
  /** The URL of a whole log; null where there is no server. */
  logUrl(clusterId: string, rank: number): string | null;
  /** The variables of the ranks; absent where there is no server. */
  variables?: (clusterId: string) => Promise<IVariables>;
  /** Opens the cluster in the main area; absent where there is none. */
  enlarge?: () => void;
}

/** Translates a text; %1 is replaced by the first argument. */
export type Translate = (text: string, ...args: string[]) => string;
