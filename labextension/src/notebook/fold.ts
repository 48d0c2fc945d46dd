/**
 * Fold the long output of a cell to its first and last lines.
 */

/** Longer output is folded. */
export const MAX_LINES = 600;
export const FIRST_LINES = 300;
export const LAST_LINES = 100;

/** What one of the cell's outputs shows. */
export interface IFoldedPart {
  /** Lines from its beginning. */
  head: number;
  /** Lines from its end. */
  tail: number;
  /** Hidden lines of the whole cell, where the button for them is; else 0. */
  hidden: number;
}

/**
 * Divide the lines that are shown among the outputs of a cell.
 *
 * @param counts - the number of lines of each output, in order
 */
export function foldParts(counts: number[], isOpen: boolean): IFoldedPart[] {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (isOpen || total <= MAX_LINES) {
    return counts.map(count => ({ head: count, tail: 0, hidden: 0 }));
  }
  let start = 0;
  return counts.map(count => {
    const end = start + count;
    const head = clamp(FIRST_LINES - start, count);
    const tail = clamp(end - (total - LAST_LINES), count - head);
    const hasButton = start <= FIRST_LINES && end > FIRST_LINES;
    const hidden = hasButton ? total - FIRST_LINES - LAST_LINES : 0;
    start = end;
    return { head, tail, hidden };
  });
}

function clamp(value: number, max: number): number {
  return Math.max(0, Math.min(value, max));
}
