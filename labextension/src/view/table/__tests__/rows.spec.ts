import { describe, expect, it } from 'vitest';

import { makeCluster, makeNode, makeRank } from '../../../__tests__/data';
import {
  extendRange,
  type IRowOptions,
  keyAction,
  makeRows,
  type Row,
  rowKey,
  visibleRows
} from '../rows';

const CLUSTER = makeCluster(
  [
    makeRank(0, { steps_per_s: 9 }),
    makeRank(1, { steps_per_s: 2 }),
    makeRank(2, { host: 'node2', state: 'dead' })
  ],
  { nodes: [makeNode('node1')] }
);

function rowsOf(options: Partial<IRowOptions> = {}): Row[] {
  return makeRows(CLUSTER, {
    filter: '',
    order: 'rank',
    collapsed: new Set(),
    ...options
  });
}

function keysOf(options: Partial<IRowOptions> = {}): string[] {
  return rowsOf(options).map(rowKey);
}

describe('makeRows', () => {
  it('has ranks below their nodes', () => {
    expect(keysOf()).toEqual([
      'node node1',
      'rank 0',
      'rank 1',
      'node node2',
      'rank 2'
    ]);
  });

  it('has nodes that have not reported, without figures', () => {
    const nodes = rowsOf().filter(row => row.kind === 'node');
    expect(nodes.map(row => row.node?.host)).toEqual(['node1', undefined]);
    expect(nodes.map(row => row.ranks.length)).toEqual([2, 1]);
  });

  it('leaves out the ranks of collapsed nodes', () => {
    expect(keysOf({ collapsed: new Set(['node1']) })).toEqual([
      'node node1',
      'node node2',
      'rank 2'
    ]);
  });

  it('leaves out nodes without matching ranks', () => {
    expect(keysOf({ filter: 'dead' })).toEqual(['node node2', 'rank 2']);
  });

  it('is a list of ranks in another order', () => {
    expect(keysOf({ order: 'slowest' })).toEqual([
      'rank 1',
      'rank 0',
      'rank 2'
    ]);
  });
});

describe('visibleRows', () => {
  it('has rows that are visible in part', () => {
    const box = { top: 30, height: 100 };
    expect(visibleRows(64, 24, box)).toEqual({ first: 1, last: 6 });
  });

  it('ends with the last row', () => {
    const box = { top: 1440, height: 100 };
    expect(visibleRows(64, 24, box)).toEqual({ first: 60, last: 64 });
  });
});

describe('extendRange', () => {
  it('stays within the rows', () => {
    expect(extendRange({ first: 3, last: 8 }, 6, 64)).toEqual({
      first: 0,
      last: 14
    });
    expect(extendRange({ first: 50, last: 60 }, 6, 64)).toEqual({
      first: 44,
      last: 64
    });
  });
});

describe('keyAction', () => {
  const rows = rowsOf();
  const collapsed = rowsOf({ collapsed: new Set(['node1']) });

  it.each([
    ['ArrowDown', -1, 0],
    ['ArrowDown', 2, 3],
    ['ArrowDown', 4, 4],
    ['ArrowUp', 3, 2],
    ['ArrowUp', 0, 0],
    ['ArrowUp', -1, 0],
    ['Home', 3, 0],
    ['End', -1, 4],
    ['ArrowLeft', 2, 0],
    ['ArrowLeft', 4, 3],
    ['ArrowRight', 0, 1]
  ])('%s at row %d selects row %d', (key, selected, index) => {
    expect(keyAction(key, rows, selected)).toEqual({ kind: 'select', index });
  });

  it('collapses and expands nodes', () => {
    expect(keyAction('ArrowLeft', rows, 0)).toEqual({
      kind: 'expand',
      host: 'node1',
      isExpanded: false
    });
    expect(keyAction('ArrowRight', collapsed, 0)).toEqual({
      kind: 'expand',
      host: 'node1',
      isExpanded: true
    });
    expect(keyAction('ArrowLeft', collapsed, 0)).toBeNull();
  });

  it('activates rows', () => {
    for (const key of ['Enter', ' ']) {
      expect(keyAction(key, rows, 1)).toEqual({
        kind: 'activate',
        row: rows[1]
      });
    }
  });

  it('ignores other keys, and keys without rows or selection', () => {
    expect(keyAction('a', rows, 1)).toBeNull();
    expect(keyAction('ArrowRight', rows, 1)).toBeNull();
    expect(keyAction('Enter', rows, -1)).toBeNull();
    expect(keyAction('ArrowDown', [], -1)).toBeNull();
  });
});
