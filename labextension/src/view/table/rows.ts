/**
 * The rows of the table: nodes with their ranks, or ranks alone.
 *
 * Covers: collapsed nodes, filter and order, which rows are drawn, which row an
 * arrow key leads to.
 * Does not cover: texts (columns, nodeText), DOM (rankTable).
 */

import type { ICluster, INode, IRank } from '../../protocol/types';
import { matchesFilter, type RankOrder, sortRanks } from '../rankOrder';

export interface INodeRow {
  kind: 'node';
  host: string;
  /** Undefined as long as the node has not reported. */
  node: INode | undefined;
  /** Its ranks that match the filter. */
  ranks: IRank[];
  isExpanded: boolean;
}

export interface IRankRow {
  kind: 'rank';
  rank: IRank;
}

export type Row = INodeRow | IRankRow;

export interface IRowOptions {
  filter: string;
  order: RankOrder;
  /** Hosts whose ranks are not shown. */
  collapsed: ReadonlySet<string>;
}

/** The rows of a cluster: a tree in the order of ranks, else a list of ranks. */
export function makeRows(
  cluster: ICluster,
  { filter, order, collapsed }: IRowOptions
): Row[] {
  const matching = cluster.ranks.filter(rank => matchesFilter(rank, filter));
  if (order !== 'rank') {
    return sortRanks(matching, order).map(rankRow);
  }
  const hosts = [...new Set(matching.map(rank => rank.host))];
  return hosts.flatMap(host => {
    const ranks = matching.filter(rank => rank.host === host);
    const node = cluster.nodes.find(each => each.host === host);
    const isExpanded = !collapsed.has(host);
    const row: Row = { kind: 'node', host, node, ranks, isExpanded };
    return isExpanded ? [row, ...ranks.map(rankRow)] : [row];
  });
}

function rankRow(rank: IRank): Row {
  return { kind: 'rank', rank };
}

/** Identifies a row over updates. */
export function rowKey(row: Row): string {
  return row.kind === 'node'
    ? `node ${row.host}`
    : `rank ${String(row.rank.rank)}`;
}

/** Rows from `first` up to but not including `last`. */
export interface IRowRange {
  first: number;
  last: number;
}

/** The rows that are visible in a scrolled box; rows have one height. */
export function visibleRows(
  count: number,
  rowHeight: number,
  { top, height }: { top: number; height: number }
): IRowRange {
  const first = Math.floor(top / rowHeight);
  const visible = Math.ceil(height / rowHeight);
  return { first, last: Math.min(count, first + visible) };
}

/** A range with some more rows on both sides. */
export function extendRange(
  { first, last }: IRowRange,
  extra: number,
  count: number
): IRowRange {
  return {
    first: Math.max(0, first - extra),
    last: Math.min(count, last + extra)
  };
}

/** What a key does in the table. */
export type KeyAction =
  | { kind: 'select'; index: number }
  | { kind: 'expand'; host: string; isExpanded: boolean }
  | { kind: 'activate'; row: Row };

/**
 * The action of a key, as the ARIA treegrid pattern defines it; null for others.
 *
 * @param selected - the index of the selected row; -1 for none
 */
export function keyAction(
  key: string,
  rows: Row[],
  selected: number
): KeyAction | null {
  const last = rows.length - 1;
  if (last < 0) {
    return null;
  }
  const index = {
    ArrowDown: Math.min(last, selected + 1),
    ArrowUp: Math.max(0, selected - 1),
    Home: 0,
    End: last
  }[key];
  if (index !== undefined) {
    return { kind: 'select', index };
  }
  const row = rows[selected];
  if (row === undefined) {
    return null;
  }
  if (key === 'Enter' || key === ' ') {
    return { kind: 'activate', row };
  }
  if (row.kind === 'rank') {
    const above = rows.slice(0, selected).map(each => each.kind);
    return key === 'ArrowLeft'
      ? { kind: 'select', index: above.lastIndexOf('node') }
      : null;
  }
  if (key === 'ArrowRight' && row.isExpanded) {
    return { kind: 'select', index: selected + 1 };
  }
  return key === 'ArrowRight' || (key === 'ArrowLeft' && row.isExpanded)
    ? { kind: 'expand', host: row.host, isExpanded: !row.isExpanded }
    : null;
}
