import { describe, expect, it } from 'vitest';

import { RUN_ON_ALL_RANKS, selectsRanks } from '../magics';

describe('selectsRanks', () => {
  it.each([
    [`${RUN_ON_ALL_RANKS}\nx = 1`, true],
    ['%%distributed -r 0\nx = 1', true],
    ['\n  %%rank [0]\nx = 1', true],
    ['%%rank', true],
    ['%%ranking\nx = 1', false],
    ['x = 1\n%%distributed', false],
    ['%distributed', false],
    ['', false]
  ])('of %j is %s', (source, expected) => {
    expect(selectsRanks(source)).toBe(expected);
  });
});
