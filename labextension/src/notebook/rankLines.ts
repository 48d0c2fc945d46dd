/**
 * Select the lines of one rank in output that several ranks printed.
 *
 * Covers: reading the data beside the text, of version 1 in saved notebooks too.
 */

import { isRecord } from '../protocol/messages';

const COLOUR = String.raw`\u001b\[\d*m`;

/** Consecutive lines: how many, by which group, with a label of which width. */
type Run = [count: number, group: number, labelWidth: number];

/** Which ranks printed which lines. */
export interface IRankOutput {
  version: 1 | 2;
  ranks: number[];
  /** Version 1: the width of the column of labels. */
  width?: number;
  /** Version 2: sets of ranks; empty for a label above a figure. */
  groups?: number[][];
  /** Version 2; lines after the last run belong to all ranks. */
  lines?: Run[];
}

export function isRankOutput(data: unknown): data is IRankOutput {
  if (!isRecord(data) || !Array.isArray(data.ranks)) {
    return false;
  }
  if (data.version === 1) {
    return typeof data.width === 'number';
  }
  return (
    data.version === 2 &&
    Array.isArray(data.groups) &&
    Array.isArray(data.lines)
  );
}

/** All lines of a text, or those of one rank without their labels. */
export function selectLines(
  text: string,
  output: IRankOutput | null,
  rank: number | null
): string[] {
  const lines = text === '' ? [] : text.split('\n');
  if (rank === null || output === null) {
    return lines;
  }
  if (output.version === 1) {
    return selectLabelled(lines, rank, output.width ?? 0);
  }
  const selected: string[] = [];
  let at = 0;
  for (const [count, group, labelWidth] of output.lines ?? []) {
    if (output.groups?.[group]?.includes(rank) === true) {
      for (const line of lines.slice(at, at + count)) {
        selected.push(line.slice(labelWidth));
      }
    }
    at += count;
  }
  return [...selected, ...lines.slice(at)];
}

/**
 * The width of the label of a figure, if the text ends with one; otherwise 0.
 */
export function trailingLabelWidth(
  text: string,
  output: IRankOutput | null
): number {
  const runs = output?.lines ?? [];
  const [, group = -1] = runs.at(-1) ?? [];
  if (output?.groups?.[group]?.length !== 0) {
    return 0;
  }
  const lines = text.split('\n');
  const count = runs.reduce((sum, run) => sum + run[0], 0);
  const [last = ''] = count === lines.length ? lines.slice(-1) : [];
  return last.replace(new RegExp(COLOUR, 'g'), '').length;
}

/** The ranks in a label: "rank 1", "ranks 0,2-3". */
function parseLabel(label: string): number[] {
  const list = label.replace(/^ranks? /, '').trim();
  return list.split(',').flatMap(part => {
    const [first = 0, last = first] = part.split('-').map(Number);
    return Array.from({ length: last - first + 1 }, (_, at) => first + at);
  });
}

/**
 * The lines of one rank by their labels, as version 1 requires.
 *
 * A line with an empty label belongs to the ranks of the line above; a line
 * without a label, such as a note at the end, belongs to all ranks.
 */
function selectLabelled(
  lines: string[],
  rank: number,
  width: number
): string[] {
  const column = new RegExp(
    // Colour, label, then a bar, which is red and thick for stderr.
    `^(?:${COLOUR})?(ranks? [\\d,-]+ *| {${String(width)}}) ((?:${COLOUR})*[│┃](?:${COLOUR})*) ?`
  );
  let isSelected = true;
  const selected: string[] = [];
  for (const line of lines) {
    const found = column.exec(line);
    if (found === null) {
      selected.push(line);
      continue;
    }
    const [prefix, label = '', bar = ''] = found;
    if (label.trim() !== '') {
      isSelected = parseLabel(label).includes(rank);
    }
    if (isSelected) {
      const mark = bar.includes('┃') ? `${bar} ` : '';
      selected.push(mark + line.slice(prefix.length));
    }
  }
  return selected;
}
