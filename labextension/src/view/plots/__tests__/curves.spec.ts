import { describe, expect, it } from 'vitest';

import { commonCurve, meanAndRange, smooth } from '../curves';

describe('smooth', () => {
  it('leaves the curve unchanged with weight 0', () => {
    const curve = [1, null, 3];
    expect(smooth(curve, 0)).toBe(curve);
  });

  it('leaves a constant unchanged, from the first value on', () => {
    const smoothed = smooth([5, 5, 5, 5], 0.97);
    smoothed.forEach(value => {
      expect(value).toBeCloseTo(5, 10);
    });
  });

  it('is the average corrected for its start', () => {
    const [first, second, third] = smooth([1, 2, 4], 0.5);
    expect(first).toBeCloseTo(1, 10);
    // (0.5 * 0.5 * 1 + 0.5 * 2) / (1 - 0.25)
    expect(second).toBeCloseTo(1.25 / 0.75, 10);
    expect(third).toBeCloseTo(2.625 / 0.875, 10);
  });

  it('skips gaps', () => {
    const [before, gap, after] = smooth([1, null, 2], 0.5);
    expect(before).toBeCloseTo(1, 10);
    expect(gap).toBeNull();
    expect(after).toBeCloseTo(1.25 / 0.75, 10);
  });

  it('follows more slowly with a larger weight', () => {
    const jump = [0, 0, 0, 0, 1];
    const lasts = [0.6, 0.9, 0.97].map(weight => smooth(jump, weight).at(-1));
    expect(lasts).toEqual(lasts.toSorted().reverse());
    expect(new Set(lasts).size).toBe(3);
  });
});

describe('commonCurve', () => {
  it('is the curve of all ranks, with values that came from some only', () => {
    const curves = [
      [1, 2, 3, null],
      [1, 2, 3, 4]
    ];
    expect(commonCurve(curves)).toEqual([1, 2, 3, 4]);
    expect(curves[0]).toEqual([1, 2, 3, null]);
  });

  it.each([
    [
      'a value differs',
      [
        [1, 2, 3],
        [1, 2, 4]
      ]
    ],
    [
      'a rank has less than half',
      [
        [1, null, null, null],
        [1, 2, 3, 4]
      ]
    ],
    [
      'a rank has none',
      [
        [null, null],
        [1, 2]
      ]
    ]
  ])('is null if %s', (_, curves) => {
    expect(commonCurve(curves)).toBeNull();
  });
});

describe('meanAndRange', () => {
  it('covers the ranks that have a value', () => {
    expect(
      meanAndRange(
        [
          [1, 2, null, null, 8],
          [3, 6, 5, null, 8]
        ],
        4
      )
    ).toEqual({
      mean: [2, 4, 5, null],
      min: [1, 2, 5, null],
      max: [3, 6, 5, null]
    });
  });

  it('is empty without curves', () => {
    expect(meanAndRange([], 0)).toEqual({ mean: [], min: [], max: [] });
  });
});
