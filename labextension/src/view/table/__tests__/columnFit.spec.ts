import { describe, expect, it } from 'vitest';

import { makeRank } from '../../../__tests__/data';
import { ColumnFit, type ITableSize } from '../columnFit';
import type { IColumn } from '../columns';

/** Each character is 10 px wide. */
function measure(text: string): number {
  return 10 * text.length;
}

const STATE: IColumn = {
  title: 'state',
  brief: 'state',
  text: rank => rank.text,
  priority: 0,
  isTruncated: true
};
const WAITS: IColumn = {
  title: 'waits for ranks',
  brief: 'waits',
  text: () => '26 %',
  priority: 1
};
const HOST: IColumn = {
  title: 'host',
  brief: 'host',
  text: rank => rank.host,
  priority: 2
};
/** Not in the order of priorities. */
const COLUMNS = [HOST, STATE, WAITS];
const RANKS = [makeRank(0, { text: 'idle' })];
const WIDE: Omit<ITableSize, 'width'> = {
  padding: 5,
  font: '12px sans-serif',
  maxStateLength: Number.POSITIVE_INFINITY
};
const NARROW = { ...WIDE, maxStateLength: 9 };

// With padding: state 65 (its mark is as wide as 2 characters), host 55.
const WAITS_WIDE = 155;
const WAITS_NARROW = 55;

describe('ColumnFit', () => {
  function titles(size: ITableSize, ranks = RANKS): string[] {
    const fitting = new ColumnFit(measure).fit(COLUMNS, ranks, size);
    return fitting.map(column => column.title);
  }

  it('has all columns in their order if they fit exactly', () => {
    const width = 65 + WAITS_WIDE + 55;
    expect(titles({ ...WIDE, width })).toEqual([
      'host',
      'state',
      'waits for ranks'
    ]);
    expect(titles({ ...WIDE, width: width - 1 })).toEqual([
      'state',
      'waits for ranks'
    ]);
  });

  it('drops columns with lower priority after one that does not fit', () => {
    // The host would fit, but it is less important.
    expect(titles({ ...WIDE, width: 65 + 55 })).toEqual(['state']);
  });

  it('keeps columns that are always shown', () => {
    expect(titles({ ...WIDE, width: 10 })).toEqual(['state']);
  });

  it('uses brief titles and truncated states in a narrow table', () => {
    const ranks = [makeRank(0, { text: 'in all_reduce for 3 s' })];
    const width = 10 * (9 + 2) + 5 + WAITS_NARROW;
    expect(titles({ ...NARROW, width }, ranks)).toEqual([
      'state',
      'waits for ranks'
    ]);
    expect(titles({ ...NARROW, width: width - 1 }, ranks)).toEqual(['state']);
  });

  it('remembers the longest text until the width changes', () => {
    const fit = new ColumnFit(measure);
    const size = { ...WIDE, width: 65 + WAITS_WIDE };
    const long = [makeRank(0, { text: 'not responding' })];
    expect(fit.fit(COLUMNS, RANKS, size)).toEqual([STATE, WAITS]);
    expect(fit.fit(COLUMNS, long, size)).toEqual([STATE]);
    expect(fit.fit(COLUMNS, RANKS, size)).toEqual([STATE]);
    const wider = { ...size, width: size.width + 1 };
    expect(fit.fit(COLUMNS, RANKS, wider)).toEqual([STATE, WAITS]);
  });

  it('has all columns before the table is laid out', () => {
    expect(titles({ ...WIDE, width: 0 })).toHaveLength(3);
  });
});
