import { describe, expect, it } from 'vitest';

import { makeRank, translate } from '../../__tests__/data';
import {
  filterRanks,
  isRankOrder,
  matchesFilter,
  type RankOrder,
  rankOrders,
  sortRanks
} from '../rankOrder';

const RANKS = [
  makeRank(0, {
    device: 'cuda:0',
    steps_per_s: 9,
    waiting: 0.1,
    memory_bytes: 5,
    cpu_percent: 30,
    gpu: { percent: 80, memory_used_bytes: 3 }
  }),
  makeRank(1, {
    state: 'in collective',
    text: 'in all_reduce for 3 s',
    device: 'cuda:1',
    memory_bytes: 4
  }),
  makeRank(12, {
    state: 'dead',
    host: 'node2',
    device: 'cuda:0',
    steps_per_s: 2,
    waiting: 0.5,
    cpu_percent: 90,
    gpu: { percent: 20, memory_used_bytes: 7 }
  })
];

describe('matchesFilter', () => {
  it.each([
    ['', [0, 1, 12]],
    ['  ', [0, 1, 12]],
    ['0-1,7', [0, 1]],
    ['12', [12]],
    ['2-', []],
    ['1,', [1]],
    ['10-12', [12]],
    ['DEAD', [12]],
    ['node2 cuda:0', [12]],
    ['in collective', [1]],
    ['all_reduce', [1]],
    ['node1 dead', []],
    ['0-1 cuda:1', [1]]
  ])('%j finds ranks %j', (filter, expected) => {
    const found = RANKS.filter(rank => matchesFilter(rank, filter));
    expect(found.map(each => each.rank)).toEqual(expected);
  });
});

describe('filterRanks', () => {
  it('is null without a filter, and a set with one', () => {
    expect(filterRanks(RANKS, ' ')).toBeNull();
    expect(filterRanks(RANKS, 'cuda:0')).toEqual(new Set([0, 12]));
    expect(filterRanks(RANKS, 'nothing')).toEqual(new Set());
  });
});

describe('sortRanks', () => {
  it.each<[RankOrder, number[]]>([
    ['rank', [0, 1, 12]],
    ['slowest', [12, 0, 1]],
    ['waits', [12, 0, 1]],
    ['memory', [12, 1, 0]],
    ['cpu', [12, 0, 1]],
    ['gpu', [12, 0, 1]]
  ])('by %s is %j', (order, expected) => {
    expect(sortRanks(RANKS, order).map(each => each.rank)).toEqual(expected);
  });

  it('puts a stopped rank first, and keeps equal ranks in order', () => {
    const ranks = [
      makeRank(0, { steps_per_s: 4 }),
      makeRank(2, { steps_per_s: 0 }),
      makeRank(1, { steps_per_s: 0 })
    ];
    const sorted = sortRanks(ranks, 'slowest').map(each => each.rank);
    expect(sorted).toEqual([1, 2, 0]);
    expect(ranks.map(each => each.rank)).toEqual([0, 2, 1]);
  });
});

describe('isRankOrder', () => {
  it('accepts what the control offers, and nothing else', () => {
    const offered = rankOrders(translate).map(([order]) => order);
    expect(offered).toHaveLength(6);
    expect(offered.every(isRankOrder)).toBe(true);
    expect(isRankOrder('name')).toBe(false);
    expect(isRankOrder('toString')).toBe(false);
  });
});
