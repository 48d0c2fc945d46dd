/**
 * Filter and sort ranks, for the table and the plots.
 *
 * Does not cover: the controls (rankFilter), drawing (table, plots).
 */

import type { IRank, Translate } from '../protocol/types';

export type RankOrder = 'rank' | 'slowest' | 'waits' | 'memory' | 'cpu' | 'gpu';

/** The figure of each order; ranks with the greatest come first. */
const FIGURES: Record<
  Exclude<RankOrder, 'rank'>,
  (rank: IRank) => number | undefined
> = {
  slowest: rank => negative(rank.steps_per_s),
  waits: rank => rank.waiting,
  memory: rank => rank.gpu?.memory_used_bytes ?? rank.memory_bytes,
  cpu: rank => rank.cpu_percent,
  gpu: rank => negative(rank.gpu?.percent)
};

function negative(value: number | undefined): number | undefined {
  return value === undefined ? undefined : -value;
}

export function isRankOrder(value: string): value is RankOrder {
  return value === 'rank' || Object.hasOwn(FIGURES, value);
}

/** All orders with their labels. */
export function rankOrders(trans: Translate): [RankOrder, string][] {
  return [
    ['rank', trans('by rank')],
    ['slowest', trans('slowest first')],
    ['waits', trans('most waiting first')],
    ['memory', trans('most memory first')],
    ['cpu', trans('most CPU first')],
    ['gpu', trans('least GPU use first')]
  ];
}

/** Sort ranks; those without the figure come last. */
export function sortRanks(ranks: IRank[], order: RankOrder): IRank[] {
  if (order === 'rank') {
    return ranks;
  }
  const figureOf = FIGURES[order];
  const keyOf = (rank: IRank): number =>
    figureOf(rank) ?? Number.NEGATIVE_INFINITY;
  return ranks.toSorted((a, b) => {
    const [first, second] = [keyOf(a), keyOf(b)];
    return first === second ? a.rank - b.rank : second > first ? 1 : -1;
  });
}

/**
 * Whether a rank matches all terms of a filter. A term is a list of ranks
 * ("0-3,8") or a part of the state, the host or the device.
 */
export function matchesFilter(rank: IRank, filter: string): boolean {
  return filter
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .every(term =>
      /^\d[\d,-]*$/.test(term)
        ? isInList(rank.rank, term)
        : [rank.state, rank.text, rank.host, rank.device].some(text =>
            text.toLowerCase().includes(term)
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

/** The ranks that match a filter; null without a filter. */
export function filterRanks(
  ranks: IRank[],
  filter: string
): ReadonlySet<number> | null {
  return filter.trim()
    ? new Set(
        ranks.filter(rank => matchesFilter(rank, filter)).map(each => each.rank)
      )
    : null;
}
