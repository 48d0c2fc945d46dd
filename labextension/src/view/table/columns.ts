/**
 * The columns of the table of ranks.
 *
 * Covers: their titles, texts and order.
 * Does not cover: which of them fit (columnFit), rows (rows).
 */

import type { IRank, Translate } from '../../protocol/types';
import { formatBytes, formatNumber, formatPercent } from '../format';

export interface IColumn {
  title: string;
  /** The title in a narrow table. */
  brief: string;
  /** The text of a cell; a column that is null in all rows is left out. */
  text: (rank: IRank) => string | null;
  /** 0: always shown; of the others, higher numbers are dropped first. */
  priority: number;
  align?: 'right';
  /** Whether a long text is truncated in a narrow table. */
  isTruncated?: true;
}

/** All columns, in their order. */
export function makeColumns(trans: Translate): IColumn[] {
  const t = trans;
  const fraction = optional(formatPercent);
  const percent = optional(value => formatPercent(value / 100));
  const size = optional(formatBytes);
  const rate = optional(value => formatNumber(value, 3));
  const column = (
    priority: number,
    title: string,
    text: IColumn['text'],
    brief = title
  ): IColumn => ({ title, brief, text, priority });
  const number = (...args: Parameters<typeof column>): IColumn => ({
    ...column(...args),
    align: 'right'
  });
  return [
    column(0, t('rank'), rank => String(rank.rank)),
    { ...column(0, t('state'), rank => rank.text), isTruncated: true },
    column(6, t('cell'), rank => (rank.cell ? `[${String(rank.cell)}]` : null)),
    number(1, t('line'), rank => (rank.line ? String(rank.line) : null)),
    number(2, t('steps/s'), rank => rate(rank.steps_per_s)),
    number(8, t('samples/s'), rank => rate(rank.samples_per_s)),
    number(3, t('waits for ranks'), rank => fraction(rank.waiting), t('waits')),
    number(
      9,
      t('waits for data'),
      rank => fraction(rank.waiting_for_data),
      t('data')
    ),
    number(7, t('CPU'), rank => percent(rank.cpu_percent)),
    number(5, t('memory'), rank => size(rank.memory_bytes)),
    column(10, t('device'), rank => rank.device),
    number(4, t('GPU'), rank => percent(rank.gpu?.percent)),
    number(11, t('GPU memory'), ({ gpu }) =>
      gpu?.memory_used_bytes === undefined
        ? null
        : `${formatBytes(gpu.memory_used_bytes)} / ${formatBytes(gpu.memory_total_bytes ?? 0)}`
    ),
    number(13, t('°C'), rank => rank.gpu?.celsius?.toFixed(0) ?? null),
    number(14, t('W'), rank => rank.gpu?.watts?.toFixed(0) ?? null),
    column(12, t('GPU notes'), rank => gpuNotes(rank, trans)),
    number(15, t('pid'), rank => String(rank.pid))
  ];
}

function optional(
  format: (value: number) => string
): (value: number | undefined) => string | null {
  return value => (value === undefined ? null : format(value));
}

function gpuNotes({ gpu }: IRank, trans: Translate): string | null {
  const notes = [
    gpu?.limited_by ? trans('slowed: %1', gpu.limited_by) : '',
    gpu?.ecc_errors ? trans('%1 ECC errors', String(gpu.ecc_errors)) : '',
    gpu?.others ? trans('%1 other processes', String(gpu.others)) : ''
  ].filter(Boolean);
  return notes.length ? notes.join(', ') : null;
}
