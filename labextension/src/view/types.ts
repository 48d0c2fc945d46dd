/**
 * What the kernel and the server send, as cluster/snapshot.py makes it.
 */

/** One word; the text beside it says more. */
export type RankState =
  | 'starting'
  | 'idle'
  | 'running'
  | 'in collective'
  | 'not responding'
  /** Its process ended because it was asked to. */
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
  /** The state as a person reads it. */
  text: string;
  cpu_percent?: number;
  memory_bytes?: number;
  gpu?: IGpu;
  /** The prompt number of the cell that runs. */
  cell?: number;
  line?: number;
  call?: string;
  steps?: number;
  /** Rounds of the loop that runs, how many there will be, seconds left. */
  done?: number;
  total?: number;
  left_s?: number;
  steps_per_s?: number;
  samples_per_s?: number;
  /** Parts of the time, 0 to 1. */
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
  disk_total_bytes: number;
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
  /** Of the batch job whose processes the ranks are; empty: they are the cluster's own. */
  job_file: string;
  logs: string;
  sample_s: number;
  ranks: IRank[];
  nodes: INode[];
  remarks: string[];
  /** Who waits for whom, once that takes longer than it should. */
  hang?: string[];
}

/** Metrics that are new: columns of one length. */
export interface IMetricsPacket {
  names: string[];
  /** Whether it holds everything there is, so that what was known is to be forgotten. */
  first: boolean;
  steps: Float64Array;
  values: Float32Array;
  nameAt: Uint16Array;
  ranks: Uint16Array;
  cells: Int32Array;
}

/** By rank: time in seconds, CPU %, memory, GPU %, GPU memory, steps/s. */
export type DeviceHistory = Record<string, (number | null)[][]>;

/** Which plots are drawn. */
export type Plots = 'all' | 'metrics' | 'devices' | 'none';

export function isPlots(value: unknown): value is Plots {
  return ['all', 'metrics', 'devices', 'none'].some(each => each === value);
}

/** What a person can ask of a cluster. */
export type Action = 'interrupt' | 'reset' | 'stop';

/** What a rank wrote, in pieces of one stream. */
export interface ILogPart {
  stream: 'stdout' | 'stderr';
  text: string;
}

/** The end of a rank's log. */
export interface ILog {
  rank: number;
  parts: ILogPart[];
  /** Whether there is more before it. */
  is_cut: boolean;
}

/** Whose log: a rank's, or the end of each. */
export type LogOf = number | 'all';

/** Where the view gets what it does not draw from the data that it is given. */
export interface IActions {
  /** Resolves once it has begun; rejects with the reason. */
  ask(clusterId: string, action: Action): Promise<void>;
  /** The end of a rank's log, or of all ranks' logs. */
  log(clusterId: string, of: LogOf): Promise<ILog[]>;
  /** Where the browser finds a whole log; null where no server gives it. */
  logUrl(clusterId: string, rank: number): string | null;
  /** Shows the same with more room, where there is such a place. */
  enlarge?: () => void;
}

/** Translates a text; %1 stands for the first argument. */
export type Translate = (text: string, ...args: string[]) => string;
