/**
 * What the table says of a rank, column by column.
 */

import { bytes, short } from './dom';
import type { IRank, Translate } from './types';

export interface IColumn {
  title: string;
  /** What stands in it; null in all rows leaves the column out. */
  text: (rank: IRank) => string | null;
  align?: 'right';
}

/** All columns, in their order. */
export function columnsOf(trans: Translate): IColumn[] {
  const t = trans;
  const part = (value: number | undefined): string | null =>
    value === undefined ? null : `${(100 * value).toFixed(0)} %`;
  const size = (value: number | undefined): string | null =>
    value === undefined ? null : bytes(value);
  return [
    { title: t('rank'), text: rank => String(rank.rank) },
    { title: t('state'), text: rank => rank.text },
    {
      title: t('cell'),
      text: rank => (rank.cell ? `[${String(rank.cell)}]` : null)
    },
    {
      title: t('line'),
      text: rank => (rank.line ? String(rank.line) : null),
      align: 'right'
    },
    {
      title: t('steps/s'),
      text: rank =>
        rank.steps_per_s === undefined ? null : short(rank.steps_per_s),
      align: 'right'
    },
    {
      title: t('samples/s'),
      text: rank =>
        rank.samples_per_s === undefined ? null : short(rank.samples_per_s),
      align: 'right'
    },
    {
      title: t('waits for ranks'),
      text: rank => part(rank.waiting),
      align: 'right'
    },
    {
      title: t('waits for data'),
      text: rank => part(rank.waiting_for_data),
      align: 'right'
    },
    {
      title: t('CPU'),
      text: rank =>
        rank.cpu_percent === undefined
          ? null
          : `${rank.cpu_percent.toFixed(0)} %`,
      align: 'right'
    },
    {
      title: t('memory'),
      text: rank => size(rank.memory_bytes),
      align: 'right'
    },
    { title: t('device'), text: rank => rank.device },
    {
      title: t('GPU'),
      text: rank =>
        rank.gpu?.percent === undefined
          ? null
          : `${String(rank.gpu.percent)} %`,
      align: 'right'
    },
    {
      title: t('GPU memory'),
      text: ({ gpu }) =>
        gpu?.memory_used_bytes === undefined
          ? null
          : `${bytes(gpu.memory_used_bytes)} / ${bytes(gpu.memory_total_bytes ?? 0)}`,
      align: 'right'
    },
    {
      title: t('°C'),
      text: rank =>
        rank.gpu?.celsius === undefined ? null : String(rank.gpu.celsius),
      align: 'right'
    },
    {
      title: t('W'),
      text: rank =>
        rank.gpu?.watts === undefined ? null : rank.gpu.watts.toFixed(0),
      align: 'right'
    },
    { title: t('GPU notes'), text: rank => gpuNotes(rank, trans) },
    { title: t('pid'), text: rank => String(rank.pid), align: 'right' }
  ];
}

function gpuNotes({ gpu }: IRank, trans: Translate): string | null {
  const notes = [
    gpu?.limited_by ? trans('slowed: %1', gpu.limited_by) : '',
    gpu?.ecc_errors ? trans('%1 ECC errors', String(gpu.ecc_errors)) : '',
    gpu?.others ? trans('%1 other processes', String(gpu.others)) : ''
  ].filter(Boolean);
  return notes.length ? notes.join(', ') : null;
}
