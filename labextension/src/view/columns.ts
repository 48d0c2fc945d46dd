/**
 * The columns of the table of ranks.
 *
 * Covers: their texts, their order, which of them fit into a width.
 * Does not cover: rows (table), their order (order).
 */

import { bytes, short } from './dom';
import type { IRank, Translate } from './types';

export interface IColumn {
  title: string;
  /** The title where there is little room. */
  brief: string;
  /** What stands in it; null in all rows leaves the column out. */
  text: (rank: IRank) => string | null;
  /** Where the columns do not fit, the greatest goes first; 0 always stays. */
  place: number;
  align?: 'right';
  /** A long text is cut where there is little room. */
  isCut?: true;
}

/** All columns, in their order. */
export function columnsOf(trans: Translate): IColumn[] {
  const t = trans;
  const part = (value: number | undefined): string | null =>
    value === undefined ? null : `${(100 * value).toFixed(0)} %`;
  const size = (value: number | undefined): string | null =>
    value === undefined ? null : bytes(value);
  const rate = (value: number | undefined): string | null =>
    value === undefined ? null : short(value, 3);
  const right = 'right';
  const column = (
    place: number,
    title: string,
    text: IColumn['text'],
    brief = title
  ): IColumn => ({ title, brief, text, place });
  const number = (...given: Parameters<typeof column>): IColumn => ({
    ...column(...given),
    align: right
  });
  return [
    column(0, t('rank'), rank => String(rank.rank)),
    { ...column(0, t('state'), rank => rank.text), isCut: true },
    column(6, t('cell'), rank => (rank.cell ? `[${String(rank.cell)}]` : null)),
    number(1, t('line'), rank => (rank.line ? String(rank.line) : null)),
    number(2, t('steps/s'), rank => rate(rank.steps_per_s)),
    number(8, t('samples/s'), rank => rate(rank.samples_per_s)),
    number(3, t('waits for ranks'), rank => part(rank.waiting), t('waits')),
    number(
      9,
      t('waits for data'),
      rank => part(rank.waiting_for_data),
      t('data')
    ),
    number(7, t('CPU'), rank => part(hundredth(rank.cpu_percent))),
    number(5, t('memory'), rank => size(rank.memory_bytes)),
    column(10, t('device'), rank => rank.device),
    number(4, t('GPU'), rank => part(hundredth(rank.gpu?.percent))),
    number(11, t('GPU memory'), ({ gpu }) =>
      gpu?.memory_used_bytes === undefined
        ? null
        : `${bytes(gpu.memory_used_bytes)} / ${bytes(gpu.memory_total_bytes ?? 0)}`
    ),
    number(13, t('°C'), rank => rank.gpu?.celsius?.toFixed(0) ?? null),
    number(14, t('W'), rank => rank.gpu?.watts?.toFixed(0) ?? null),
    column(12, t('GPU notes'), rank => gpuNotes(rank, trans)),
    number(15, t('pid'), rank => String(rank.pid))
  ];
}

function hundredth(percent: number | undefined): number | undefined {
  return percent === undefined ? undefined : percent / 100;
}

function gpuNotes({ gpu }: IRank, trans: Translate): string | null {
  const notes = [
    gpu?.limited_by ? trans('slowed: %1', gpu.limited_by) : '',
    gpu?.ecc_errors ? trans('%1 ECC errors', String(gpu.ecc_errors)) : '',
    gpu?.others ? trans('%1 other processes', String(gpu.others)) : ''
  ].filter(Boolean);
  return notes.length ? notes.join(', ') : null;
}

/** Keeps how wide columns have been, so that they do not come and go. */
export class Fitting {
  private readonly longest = new Map<IColumn, string>();
  private readonly measure = document.createElement('canvas').getContext('2d');
  private width = 0;

  /** The columns that fit, in their order; given those that are not empty. */
  fit(
    columns: IColumn[],
    ranks: IRank[],
    { width, padding, font, mostState }: IRoom
  ): IColumn[] {
    if (width !== this.width) {
      this.width = width;
      this.longest.clear();
    }
    if (this.measure === null || width === 0) {
      return columns;
    }
    this.measure.font = font;
    const isBrief = Number.isFinite(mostState);
    let left = width;
    const kept = new Set<IColumn>();
    for (const column of columns.toSorted((a, b) => a.place - b.place)) {
      const longest = ranks
        .map(rank => column.text(rank) ?? '')
        .reduce(longer, this.longest.get(column) ?? '');
      this.longest.set(column, longest);
      this.measure.font = font;
      const text = this.measure.measureText(
        // The mark before a state is as wide as two characters.
        column.isCut ? `${longest.slice(0, mostState)}00` : longest
      ).width;
      this.measure.font = `600 ${font}`;
      const { width: title } = this.measure.measureText(
        isBrief ? column.brief : column.title
      );
      left -= Math.max(title, text) + padding;
      if (left < 0 && column.place > 0) {
        break;
      }
      kept.add(column);
    }
    return columns.filter(column => kept.has(column));
  }
}

function longer(one: string, other: string): string {
  return other.length > one.length ? other : one;
}

export interface IRoom {
  /** Of the table, in px. */
  width: number;
  /** Of a cell, both sides, in px. */
  padding: number;
  font: string;
  /** Characters of a text that may be cut; infinite where there is room. */
  mostState: number;
}
