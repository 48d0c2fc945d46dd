import { describe, expect, it } from 'vitest';

import {
  byteUnit,
  formatAge,
  formatBytes,
  formatCount,
  formatCsv,
  formatDuration,
  formatMessage,
  formatNumber,
  formatPercent,
  formatRate,
  formatSize,
  formatTicks
} from '../format';

const MIB = 2 ** 20;
const GIB = 2 ** 30;

describe('byteUnit', () => {
  it('is GiB from 1 GiB on, and MiB at least', () => {
    const sizes = [0, 1, 46 * MIB, GIB - 1, GIB, 80 * GIB];
    expect(sizes.map(size => byteUnit(size).name)).toEqual([
      'MiB',
      'MiB',
      'MiB',
      'MiB',
      'GiB',
      'GiB'
    ]);
    expect(byteUnit(GIB).size).toBe(GIB);
    expect(byteUnit(1).size).toBe(MIB);
  });
});

describe('formatBytes', () => {
  it.each([
    [0, '0 MiB'],
    [0.4 * MIB, '0 MiB'],
    [46.6 * MIB, '47 MiB'],
    [GIB, '1.0 GiB'],
    [79.96 * GIB, '80.0 GiB']
  ])('of %d is %s', (size, text) => {
    expect(formatBytes(size)).toBe(text);
  });
});

describe('formatSize', () => {
  it.each([
    [0, '0 B'],
    [999, '999 B'],
    [36_392, '36.4 kB'],
    [2.5e6, '2.5 MB'],
    [1.25e10, '12.5 GB']
  ])('of %d is %s', (size, text) => {
    expect(formatSize(size)).toBe(text);
  });
});

describe('formatRate', () => {
  it.each([
    [0, '0 B/s'],
    [999, '999 B/s'],
    [1000, '1 kB/s'],
    [2.5e6, '2.5 MB/s'],
    [1.25e10, '12.5 GB/s']
  ])('of %d is %s', (rate, text) => {
    expect(formatRate(rate)).toBe(text);
  });
});

describe('formatDuration', () => {
  it.each([
    [0.4, '0 s'],
    [119, '119 s'],
    [120, '2 min'],
    [7199, '120 min'],
    [7200, '2.0 h'],
    [36_000, '10.0 h']
  ])('of %d s is %s', (seconds, text) => {
    expect(formatDuration(seconds)).toBe(text);
  });
});

describe('formatAge', () => {
  it.each([
    [0.4, 'now'],
    [30, '-30 s'],
    [60, '-1 min'],
    [90, '-90 s'],
    [300, '-5 min'],
    [3600, '-1 h'],
    [5400, '-90 min'],
    [5410, '-90 min'],
    [7200, '-2 h']
  ])('of %d s is %s', (seconds, text) => {
    expect(formatAge(seconds)).toBe(text);
  });
});

describe('formatNumber', () => {
  it.each([
    [0, '0'],
    [0.123456, '0.1235'],
    [-12.3456, '-12.35'],
    [99_999, '100,000'],
    [100_000, '1.00e+5'],
    [0.001, '0.001'],
    [0.000999, '9.99e-4']
  ])('of %d is %s', (value, text) => {
    expect(formatNumber(value)).toBe(text);
  });

  it('has as many significant digits as given', () => {
    expect(formatNumber(38.2468, 3)).toBe('38.2');
  });
});

describe('formatTicks', () => {
  it.each([
    [
      [0.00099, 0.000995, 0.001, 0.001005],
      ['0.000990', '0.000995', '0.001000', '0.001005']
    ],
    [
      [0, 0.25, 0.5],
      ['0.00', '0.25', '0.50']
    ],
    [
      [-0.1 * 3, 0, 0.1 * 3],
      ['-0.3', '0.0', '0.3']
    ],
    [
      [2000, 12_000],
      ['2,000', '12,000']
    ],
    [
      [0, 5e4, 1e5],
      ['0', '5e+4', '1e+5']
    ],
    [
      [9.8e-4, 9.9e-4],
      ['9.8e-4', '9.9e-4']
    ],
    [
      [1e-4, null, 1e-2, 1],
      ['1e-4', '', '1e-2', '1e+0']
    ],
    [[], []]
  ])('of %j are %j', (ticks, texts) => {
    expect(formatTicks(ticks)).toEqual(texts);
  });

  it.each([
    [Math.fround(0.001), '0.001'],
    [2.30258, '2.303'],
    [1, '1'],
    [0, '0'],
    [0.00012345, '1.234e-4']
  ])('of %d alone has four digits at most: %s', (value, text) => {
    expect(formatTicks([value])).toEqual([text]);
  });
});

describe('formatPercent and formatCount', () => {
  it('round and group digits', () => {
    expect(formatPercent(0.256)).toBe('26 %');
    expect(formatPercent(1)).toBe('100 %');
    expect(formatCount(1_234_567)).toBe('1,234,567');
  });
});

describe('formatMessage', () => {
  it('replaces arguments by their number', () => {
    expect(formatMessage('%2 of %1, %2', '4', '3')).toBe('3 of 4, 3');
    expect(formatMessage('rank %1: %2', '1')).toBe('rank 1: ');
    expect(formatMessage('12 % busy')).toBe('12 % busy');
  });

  it('does not replace numbers inside arguments', () => {
    expect(formatMessage('%1 %2', '%2', 'x')).toBe('%2 x');
  });
});

describe('formatCsv', () => {
  it('has a line per row, and empty fields for null', () => {
    expect(
      formatCsv(
        ['step', 'rank 0'],
        [
          [0, 0.5],
          [1, null]
        ]
      )
    ).toBe('step,rank 0\n0,0.5\n1,\n');
  });

  it('quotes fields with separators, quotes or line breaks', () => {
    expect(formatCsv(['a,b', 'say "hi"', 'two\nlines', 'plain'], [])).toBe(
      '"a,b","say ""hi""","two\nlines",plain\n'
    );
  });
});
