/**
 * The lines of one rank in a text that several ranks printed.
 *
 * Covers: reading what stands beside the text, and the labels in texts that
 * were saved before anything more did.
 */

const COLOUR = String.raw`\u001b\[\d*m`;

/** Runs of lines: how many, by which group, after how long a label. */
type Run = [count: number, group: number, cut: number];

export interface IRanks {
  version: 1 | 2;
  ranks: number[];
  /** Version 1: how wide the column of labels is. */
  width?: number;
  /** Version 2: sets of ranks; that of a label above a figure is empty. */
  groups?: number[][];
  /** Version 2; what no run tells of is for all ranks. */
  lines?: Run[];
}

export function isRanks(data: unknown): data is IRanks {
  if (typeof data !== 'object' || data === null || !('version' in data)) {
    return false;
  }
  if (!('ranks' in data) || !Array.isArray(data.ranks)) {
    return false;
  }
  if (data.version === 1) {
    return 'width' in data && typeof data.width === 'number';
  }
  return (
    data.version === 2 &&
    'groups' in data &&
    Array.isArray(data.groups) &&
    'lines' in data &&
    Array.isArray(data.lines)
  );
}

/** All lines of a text, or those of one rank without their labels. */
export function linesOf(
  text: string,
  whose: IRanks | null,
  rank: number | null
): string[] {
  const lines = text === '' ? [] : text.split('\n');
  if (rank === null || whose === null) {
    return lines;
  }
  if (whose.version === 1) {
    return labelledLines(lines, rank, whose.width ?? 0);
  }
  const own: string[] = [];
  let at = 0;
  for (const [count, group, cut] of whose.lines ?? []) {
    if (whose.groups?.[group]?.includes(rank) === true) {
      for (const line of lines.slice(at, at + count)) {
        own.push(line.slice(cut));
      }
    }
    at += count;
  }
  return [...own, ...lines.slice(at)];
}

/**
 * How wide the label is with which a text ends, above a figure; 0 where it
 * ends with something else.
 */
export function lastLabel(text: string, whose: IRanks | null): number {
  const runs = whose?.lines ?? [];
  const [, group = -1] = runs.at(-1) ?? [];
  if (whose?.groups?.[group]?.length !== 0) {
    return 0;
  }
  const lines = text.split('\n');
  const count = runs.reduce((sum, run) => sum + run[0], 0);
  const [last = ''] = count === lines.length ? lines.slice(-1) : [];
  return last.replace(new RegExp(COLOUR, 'g'), '').length;
}

/** The ranks that a label names: "rank 1", "ranks 0,2-3". */
function ranksOf(label: string): number[] {
  const list = label.replace(/^ranks? /, '').trim();
  return list.split(',').flatMap(part => {
    const [first = 0, last = first] = part.split('-').map(Number);
    return Array.from({ length: last - first + 1 }, (_, at) => first + at);
  });
}

/**
 * The lines of one rank by their labels, as version 1 has them.
 *
 * A line with an empty label belongs to the line above it; one that no label
 * stands before, as a note below everything, belongs to all.
 */
function labelledLines(lines: string[], rank: number, width: number): string[] {
  const column = new RegExp(
    // Colour, label, then a bar: red and thick for stderr.
    `^(?:${COLOUR})?(ranks? [\\d,-]+ *| {${String(width)}}) ((?:${COLOUR})*[│┃](?:${COLOUR})*) ?`
  );
  let isShown = true;
  const own: string[] = [];
  for (const line of lines) {
    const found = column.exec(line);
    if (found === null) {
      own.push(line);
      continue;
    }
    const [head, label = '', bar = ''] = found;
    if (label.trim() !== '') {
      isShown = ranksOf(label).includes(rank);
    }
    if (isShown) {
      own.push((bar.includes('┃') ? `${bar} ` : '') + line.slice(head.length));
    }
  }
  return own;
}
