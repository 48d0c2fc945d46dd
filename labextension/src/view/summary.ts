/**
 * Summarize clusters as text: states of ranks, progress, GPU use.
 *
 * Does not cover: single ranks and nodes (table).
 */

import type {
  ICluster,
  IRank,
  IServerState,
  RankState,
  Translate
} from '../protocol/types';
import { formatCount, formatDuration } from './format';

const STATES: RankState[] = [
  'running',
  'in collective',
  'not responding',
  'dead',
  'starting',
  'idle',
  'ended'
];

export interface IStateCount {
  state: RankState;
  count: number;
}

/** The number of ranks in each state that occurs. */
export function countStates(ranks: IRank[]): IStateCount[] {
  return STATES.map(state => ({
    state,
    count: ranks.filter(rank => rank.state === state).length
  })).filter(each => each.count > 0);
}

export function formatRankCount(count: number, trans: Translate): string {
  return count === 1 ? trans('1 rank') : trans('%1 ranks', String(count));
}

/** E.g. "4 ranks idle" or "3 running · 1 dead". */
export function summarizeStates(cluster: ICluster, trans: Translate): string {
  const counts = countStates(cluster.ranks);
  const [only] = counts;
  if (counts.length === 1 && only !== undefined) {
    return `${formatRankCount(only.count, trans)} ${trans(only.state)}`;
  }
  return counts
    .map(each => `${String(each.count)} ${trans(each.state)}`)
    .join(' · ');
}

/** Whether a cell runs on any of the ranks. */
export function runsCell(ranks: IRank[]): boolean {
  return ranks.some(
    rank => rank.state === 'running' || rank.state === 'in collective'
  );
}

/**
 * Whether a cell runs, and which ranks are lost, for screen readers: without
 * the frequent changes between computing and waiting.
 */
export function summarizeActivity(cluster: ICluster, trans: Translate): string {
  const lost = cluster.ranks.filter(
    rank => rank.state === 'dead' || rank.state === 'not responding'
  );
  return [
    runsCell(cluster.ranks)
      ? trans('the ranks run a cell')
      : trans('no cell runs'),
    ...lost.map(each =>
      trans('rank %1: %2', String(each.rank), trans(each.state))
    )
  ].join(', ');
}

/** The ranks that report no values: they have exited or do not respond. */
export function silentRanks(cluster: ICluster): ReadonlySet<number> {
  const silent: RankState[] = ['dead', 'ended', 'not responding'];
  return new Set(
    cluster.ranks
      .filter(rank => silent.includes(rank.state))
      .map(each => each.rank)
  );
}

/** The text of the status bar: all clusters, and the mean use of their GPUs. */
export function summarizeServer(
  { clusters, starting }: IServerState,
  trans: Translate
): string {
  const percents = clusters
    .flatMap(cluster => cluster.ranks)
    .flatMap(rank => rank.gpu?.percent ?? []);
  const sum = percents.reduce((total, each) => total + each, 0);
  const gpus = percents.length
    ? ` · GPU ${(sum / percents.length).toFixed(0)} %`
    : '';
  const texts = [
    ...clusters.map(cluster => summarizeStates(cluster, trans)),
    ...starting.map(each => each.text)
  ];
  return texts.join(' | ') + gpus;
}

/**
 * The rank whose loop takes longest to complete, of the ranks in the same loop
 * as the first; null if no loop has a known length. Remarks.of_progress in
 * Python does the same.
 */
export function slowestLoop(cluster: ICluster): IRank | null {
  const known = cluster.ranks.filter(rank => rank.total !== undefined);
  const loops = known.filter(rank => rank.total === known[0]?.total);
  loops.sort((a, b) => (b.left_s ?? 0) - (a.left_s ?? 0));
  return loops[0] ?? null;
}

/** E.g. "16 of 60 · 5 s left in this loop". */
export function formatProgress(rank: IRank, trans: Translate): string {
  const { done = 0, total = 0, left_s: left } = rank;
  return left === undefined
    ? trans('%1 of %2', formatCount(done), formatCount(total))
    : trans(
        '%1 of %2 · %3 left in this loop',
        formatCount(done),
        formatCount(total),
        formatDuration(left)
      );
}

/** Whether the cluster started its ranks, rather than a batch job. */
export function ownsRanks(cluster: ICluster): boolean {
  return !cluster.job_file;
}
