import { describe, expect, it } from 'vitest';

import { FIRST_LINES, foldParts, LAST_LINES, MAX_LINES } from '../fold';

function shown(counts: number[], isOpen = false): number {
  return foldParts(counts, isOpen).reduce(
    (sum, { head, tail }) => sum + head + tail,
    0
  );
}

describe('foldParts', () => {
  it('shows all of short output', () => {
    expect(foldParts([MAX_LINES - 1, 1], false)).toEqual([
      { head: MAX_LINES - 1, tail: 0, hidden: 0 },
      { head: 1, tail: 0, hidden: 0 }
    ]);
  });

  it('shows the first and last lines of long output', () => {
    expect(foldParts([1000], false)).toEqual([
      { head: FIRST_LINES, tail: LAST_LINES, hidden: 600 }
    ]);
  });

  it('shows all of it once it is unfolded', () => {
    expect(foldParts([1000, 5], true)).toEqual([
      { head: 1000, tail: 0, hidden: 0 },
      { head: 5, tail: 0, hidden: 0 }
    ]);
  });

  it('folds once over all outputs of a cell', () => {
    expect(foldParts([200, 400, 400, 50], false)).toEqual([
      { head: 200, tail: 0, hidden: 0 },
      { head: 100, tail: 0, hidden: 650 },
      { head: 0, tail: 50, hidden: 0 },
      { head: 0, tail: 50, hidden: 0 }
    ]);
  });

  it('has the button in the output after, if one ends with the first lines', () => {
    expect(foldParts([FIRST_LINES, 400], false)).toEqual([
      { head: FIRST_LINES, tail: 0, hidden: 0 },
      { head: 0, tail: LAST_LINES, hidden: 300 }
    ]);
  });

  it.each([
    [[601]],
    [[299, 1, 301]],
    [[300, 201, 100]],
    [[0, 301, 0, 300, 0]],
    [[1, 2, 3000, 2, 1]]
  ])('shows as many lines of %j as the button does not count', counts => {
    const parts = foldParts(counts, false);
    const hidden = parts.map(each => each.hidden).filter(each => each > 0);
    const total = counts.reduce((sum, count) => sum + count, 0);
    expect(hidden).toEqual([total - FIRST_LINES - LAST_LINES]);
    expect(shown(counts)).toBe(FIRST_LINES + LAST_LINES);
    expect(shown(counts, true)).toBe(total);
  });
});
