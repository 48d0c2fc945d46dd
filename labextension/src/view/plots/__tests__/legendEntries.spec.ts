import { describe, expect, it } from 'vitest';

import { translate } from '../../../__tests__/data';
import { describeValues, legendEntries, MAX_ENTRIES } from '../legendEntries';
import type { IPlotData } from '../plotData';

const DATA: IPlotData = {
  x: [0, 1, 2],
  lines: [
    { label: 'rank 0', rank: 0, values: [3, 1, null] },
    { label: 'rank 2', rank: 2, values: [null, null, null] }
  ],
  hidden: [1],
  lastCommonX: 2
};

describe('legendEntries', () => {
  it('has the last values, with hidden ranks in their order', () => {
    expect(legendEntries(DATA, null, translate)).toEqual([
      { label: 'rank 0', value: '1', rank: 0, isHidden: false },
      { label: 'rank 1', value: '', rank: 1, isHidden: true },
      { label: 'rank 2', value: '–', rank: 2, isHidden: false }
    ]);
  });

  it('has the values at a place of x', () => {
    const values = legendEntries(DATA, 0, translate).map(each => each.value);
    expect(values).toEqual(['3', '', '–']);
  });

  it('has the range of a band', () => {
    const data: IPlotData = {
      x: [0],
      lines: [{ label: 'mean', rank: null, values: [2] }],
      band: { min: [1], max: [3.14159] },
      hidden: [],
      lastCommonX: 0
    };
    expect(
      legendEntries(data, null, translate).map(each => [each.label, each.value])
    ).toEqual([
      ['mean', '2'],
      ['range', '1 to 3.142']
    ]);
  });

  it('summarizes many lines by the lowest and the highest', () => {
    const lines = Array.from({ length: MAX_ENTRIES + 1 }, (_, rank) => ({
      label: `rank ${String(rank)}`,
      rank,
      values: [(rank * 5) % 9, rank === 3 ? null : rank]
    }));
    const data: IPlotData = {
      x: [0, 1],
      lines,
      hidden: [],
      lastCommonX: 1
    };
    expect(legendEntries(data, 0, translate)).toEqual([
      { label: 'lowest rank 0', value: '0', rank: null, isHidden: false },
      { label: 'highest rank 7', value: '8', rank: null, isHidden: false }
    ]);
    const none = lines.map(line => ({ ...line, values: [null] }));
    expect(legendEntries({ ...data, lines: none }, 0, translate)).toEqual([]);
    const few = { ...data, lines: lines.slice(1) };
    expect(legendEntries(few, 0, translate)).toHaveLength(MAX_ENTRIES);
  });
});

describe('describeValues', () => {
  it('lists the values that exist', () => {
    expect(describeValues(DATA, null, translate)).toBe('rank 0: 1');
    expect(describeValues(DATA, 2, translate)).toBe('');
  });
});
