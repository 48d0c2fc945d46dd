/**
 * Choose the columns that fit into the width of the table.
 *
 * Does not cover: their texts (columns).
 */

import type { IRank } from '../../protocol/types';
import type { MeasureText } from '../dom';
import type { IColumn } from './columns';

export interface ITableSize {
  /** Width of the table in px. */
  width: number;
  /** Left and right padding of a cell in px. */
  padding: number;
  font: string;
  /** Characters to which a long state is truncated; infinite: it is not. */
  maxStateLength: number;
}

/** Remembers the longest texts, so that columns do not come and go. */
export class ColumnFit {
  private readonly longest = new Map<IColumn, string>();
  private width = 0;

  constructor(private readonly measure: MeasureText) {}

  /**
   * Return the columns that fit, in their order.
   *
   * @param columns - those that are not empty
   */
  fit(
    columns: IColumn[],
    ranks: IRank[],
    { width, padding, font, maxStateLength }: ITableSize
  ): IColumn[] {
    if (width !== this.width) {
      this.width = width;
      this.longest.clear();
    }
    if (width === 0) {
      return columns;
    }
    const isNarrow = Number.isFinite(maxStateLength);
    let left = width;
    const fitting = new Set<IColumn>();
    for (const column of columns.toSorted((a, b) => a.priority - b.priority)) {
      const longest = ranks
        .map(rank => column.text(rank) ?? '')
        .reduce(longer, this.longest.get(column) ?? '');
      this.longest.set(column, longest);
      // The mark before a state is as wide as two characters.
      const text = column.isTruncated
        ? `${longest.slice(0, maxStateLength)}00`
        : longest;
      const title = isNarrow ? column.brief : column.title;
      left -=
        padding +
        Math.max(this.measure(title, `600 ${font}`), this.measure(text, font));
      if (left < 0 && column.priority > 0) {
        break;
      }
      fitting.add(column);
    }
    return columns.filter(column => fitting.has(column));
  }
}

function longer(one: string, other: string): string {
  return other.length > one.length ? other : one;
}
