/**
 * Which ranks the table and the plots show, and in which order.
 *
 * Covers: the text of the filter, sorting by a figure.
 * Does not cover: drawing (table, charts).
 */

import type { IRank, Translate } from './types';

export type Order = 'rank' | 'slowest' | 'waits' | 'memory' | 'cpu' | 'gpu';

const BY: Record<
  Exclude<Order, 'rank'>,
  (rank: IRank) => number | undefined
> = {
  slowest: rank => rank.steps_per_s && -rank.steps_per_s,
  waits: rank => rank.waiting,
  memory: rank => rank.gpu?.memory_used_bytes ?? rank.memory_bytes,
  cpu: rank => rank.cpu_percent,
  gpu: rank => rank.gpu?.percent && -rank.gpu.percent
};

export function isOrder(value: string): value is Order {
  return value === 'rank' || value in BY;
}

/** The orders, with what a user reads. */
export function ordersOf(trans: Translate): [Order, string][] {
  return [
    ['rank', trans('by rank')],
    ['slowest', trans('slowest first')],
    ['waits', trans('most waiting first')],
    ['memory', trans('most memory first')],
    ['cpu', trans('most CPU first')],
    ['gpu', trans('least GPU use first')]
  ];
}

/** Sort by a figure, the greatest first; ranks without one come last. */
export function sorted(ranks: IRank[], order: Order): IRank[] {
  if (order === 'rank') {
    return ranks;
  }
  const by = BY[order];
  const key = (rank: IRank): number => by(rank) ?? Number.NEGATIVE_INFINITY;
  return ranks.toSorted((a, b) => {
    const [first, second] = [key(a), key(b)];
    return first === second ? a.rank - b.rank : second > first ? 1 : -1;
  });
}

/**
 * Whether a rank passes a filter: words that all have to hold, each a list of
 * ranks ("0-3,8") or a part of the state, the host or the device.
 */
export function passes(rank: IRank, filter: string): boolean {
  return filter
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .every(word =>
      /^\d[\d,-]*$/.test(word)
        ? isInList(rank.rank, word)
        : [rank.state, rank.text, rank.host, rank.device].some(text =>
            text.toLowerCase().includes(word)
          )
    );
}

function isInList(rank: number, list: string): boolean {
  return list
    .split(',')
    .filter(Boolean)
    .some(part => {
      const [first = Number.NaN, last = first] = part
        .split('-')
        .filter(Boolean)
        .map(Number);
      return rank >= first && rank <= last;
    });
}
