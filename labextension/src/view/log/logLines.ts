/**
 * Choose and mark the lines of logs.
 *
 * Covers: one rank or all ranks, searching, the note above the lines.
 * Does not cover: control characters (terminal), DOM (rankLog).
 */

import type { ILog, LogSelection, Translate } from '../../protocol/types';
import { type ILine, renderLines } from './terminal';

/** Lines that are drawn. */
export const MAX_LINES = 2000;

/** The lines that contain a text; those of all ranks begin with their rank. */
export function findLines(
  logs: ILog[],
  selection: LogSelection | null,
  search: string
): ILine[] {
  const lower = search.toLowerCase();
  const width = Math.max(...logs.map(log => String(log.rank).length));
  return logs
    .flatMap(log => {
      const lines = renderLines(log.parts);
      return selection === 'all'
        ? lines.map(({ text, isError }) => ({
            text: `${String(log.rank).padStart(width)} │ ${text}`,
            isError
          }))
        : lines;
    })
    .filter(line => line.text.toLowerCase().includes(lower));
}

/** State the number of matches, that there is no output, or that some is cut. */
export function noteOf(
  logs: ILog[],
  count: number,
  search: string,
  trans: Translate
): string {
  if (search) {
    return trans('%1 lines', String(count));
  }
  if (count === 0) {
    return trans('no output yet');
  }
  return logs.some(log => log.is_cut) || count > MAX_LINES
    ? trans('only the last lines')
    : '';
}

export interface ITextPart {
  text: string;
  isMatch: boolean;
}

/** Split a text at the matches of a search, which ignores case. */
export function splitMatches(text: string, search: string): ITextPart[] {
  if (!search) {
    return [{ text, isMatch: false }];
  }
  // Not by toLowerCase, which changes the length of some texts.
  const literal = search.replace(/[$()*+./?[\\\]^{|}]/g, '\\$&');
  // A group: matches are then at the odd places.
  return text
    .split(new RegExp(`(${literal})`, 'giu'))
    .map((part, index) => ({ text: part, isMatch: index % 2 === 1 }))
    .filter(part => part.text !== '');
}
