import { describe, expect, it } from 'vitest';

import { makeCluster, makeRank, translate } from '../../__tests__/data';
import {
  countStates,
  formatProgress,
  formatRankCount,
  ownsRanks,
  silentRanks,
  slowestLoop,
  summarizeActivity,
  summarizeServer,
  summarizeStates
} from '../summary';

const IDLE = makeCluster([
  makeRank(0, { state: 'idle' }),
  makeRank(1, { state: 'idle' })
]);
const MIXED = makeCluster([
  makeRank(0, { state: 'dead' }),
  makeRank(1, { state: 'in collective' }),
  makeRank(2, { state: 'running' }),
  makeRank(3, { state: 'in collective' })
]);

describe('countStates', () => {
  it('counts the states that occur, in a fixed order', () => {
    expect(countStates(MIXED.ranks)).toEqual([
      { state: 'running', count: 1 },
      { state: 'in collective', count: 2 },
      { state: 'dead', count: 1 }
    ]);
    expect(countStates([])).toEqual([]);
  });
});

describe('summarizeStates', () => {
  it('names the only state with the number of ranks', () => {
    expect(summarizeStates(IDLE, translate)).toBe('2 ranks idle');
    const one = makeCluster([makeRank(0, { state: 'idle' })]);
    expect(summarizeStates(one, translate)).toBe('1 rank idle');
  });

  it('lists several states', () => {
    expect(summarizeStates(MIXED, translate)).toBe(
      '1 running · 2 in collective · 1 dead'
    );
  });
});

describe('silentRanks', () => {
  it('are those from which no values are expected', () => {
    expect([...silentRanks(MIXED)]).toEqual([0]);
    const states = ['idle', 'ended', 'not responding'] as const;
    const ranks = states.map((state, rank) => makeRank(rank, { state }));
    expect([...silentRanks(makeCluster(ranks))]).toEqual([1, 2]);
  });
});

describe('formatRankCount', () => {
  it('has a singular', () => {
    const texts = [0, 1, 2].map(count => formatRankCount(count, translate));
    expect(texts).toEqual(['0 ranks', '1 rank', '2 ranks']);
  });
});

describe('summarizeActivity', () => {
  it('does not distinguish computing and waiting', () => {
    const texts = (['running', 'in collective'] as const).map(state =>
      summarizeActivity(makeCluster([makeRank(0, { state })]), translate)
    );
    expect(texts).toEqual(['the ranks run a cell', 'the ranks run a cell']);
    expect(summarizeActivity(IDLE, translate)).toBe('no cell runs');
  });

  it('lists ranks that are dead or do not respond', () => {
    const cluster = makeCluster([
      makeRank(0, { state: 'idle' }),
      makeRank(1, { state: 'dead' }),
      makeRank(2, { state: 'not responding' }),
      makeRank(3, { state: 'ended' })
    ]);
    expect(summarizeActivity(cluster, translate)).toBe(
      'no cell runs, rank 1: dead, rank 2: not responding'
    );
  });
});

describe('summarizeServer', () => {
  const starting = [{ id: 's', name: 'new', text: 'starting: 0 of 2 ranks' }];

  it('has clusters that run and that start', () => {
    const state = { clusters: [IDLE, MIXED], starting, unreadable: [] };
    expect(summarizeServer(state, translate)).toBe(
      '2 ranks idle | 1 running · 2 in collective · 1 dead | starting: 0 of 2 ranks'
    );
    expect(
      summarizeServer({ clusters: [], starting: [], unreadable: [] }, translate)
    ).toBe('');
  });

  it('has the mean use of GPUs over ranks that report it', () => {
    const cluster = makeCluster([
      makeRank(0, { gpu: { percent: 90 } }),
      makeRank(1, { gpu: { percent: 0 } }),
      makeRank(2, { gpu: {} }),
      makeRank(3)
    ]);
    const state = { clusters: [cluster], starting: [], unreadable: [] };
    expect(summarizeServer(state, translate)).toBe(
      '4 ranks running · GPU 45 %'
    );
  });
});

describe('slowestLoop', () => {
  it('is the rank with most time left, in the loop of the first', () => {
    const cluster = makeCluster([
      makeRank(0),
      makeRank(1, { done: 5, total: 60, left_s: 10 }),
      makeRank(2, { done: 4, total: 60, left_s: 12 }),
      makeRank(3, { done: 1, total: 900, left_s: 500 })
    ]);
    expect(slowestLoop(cluster)?.rank).toBe(2);
  });

  it('prefers a rank with an estimate', () => {
    const cluster = makeCluster([
      makeRank(0, { done: 0, total: 60 }),
      makeRank(1, { done: 59, total: 60, left_s: 0.5 })
    ]);
    expect(slowestLoop(cluster)?.rank).toBe(1);
  });

  it('is null without a loop of known length', () => {
    expect(slowestLoop(IDLE)).toBeNull();
  });
});

describe('formatProgress', () => {
  it('has the time left once it is estimated', () => {
    const rank = makeRank(0, { done: 1600, total: 60_000 });
    expect(formatProgress(rank, translate)).toBe('1,600 of 60,000');
    expect(formatProgress({ ...rank, left_s: 300 }, translate)).toBe(
      '1,600 of 60,000 · 5 min left in this loop'
    );
  });
});

describe('ownsRanks', () => {
  it('is false for ranks of a batch job', () => {
    expect(ownsRanks(IDLE)).toBe(true);
    expect(ownsRanks({ ...IDLE, job_file: '/tmp/job.json' })).toBe(false);
  });
});
