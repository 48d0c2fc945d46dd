/**
 * Keep the device history of each rank of one cluster.
 */

import type { DeviceHistory, DeviceSample } from '../protocol/types';

/** Samples kept per rank. */
export const MAX_SAMPLES = 600;

/** Indices into a sample. */
export const SampleColumn = {
  time: 0,
  cpu: 1,
  memory: 2,
  gpu: 3,
  gpuMemory: 4,
  stepRate: 5
} as const;

export class DeviceStore {
  readonly byRank = new Map<number, DeviceSample[]>();

  /** Add samples; those that are not newer than the last are repetitions. */
  add(devices: DeviceHistory): void {
    for (const [key, samples] of Object.entries(devices)) {
      const rank = Number(key);
      const known = this.byRank.get(rank) ?? [];
      const last = timeOf(known.at(-1));
      const added = samples.filter(sample => timeOf(sample) > last);
      this.byRank.set(rank, [...known, ...added].slice(-MAX_SAMPLES));
    }
  }
}

function timeOf(sample: DeviceSample | undefined): number {
  return sample?.[SampleColumn.time] ?? 0;
}
