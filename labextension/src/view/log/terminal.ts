/**
 * Convert the output of a rank to the lines that a terminal would show.
 *
 * Covers: carriage returns, backspaces, cursor movement and erasing, as progress
 * bars use them; colours are removed. stdout and stderr have a cursor each, as
 * they need not have been written to one terminal.
 * Does not cover: requesting the log (rankLog).
 */

import type { ILogPart } from '../../protocol/types';

export interface ILine {
  text: string;
  isError: boolean;
}

const CONTROL_SEQUENCE = String.raw`\u001b\[([\d;?]*)([A-Za-z])`;
const OTHER_ESCAPE = String.raw`\u001b(?:\][^\u0007\u001b]*(?:\u0007|\u001b\\)|.)`;
const TOKEN = new RegExp(
  String.raw`${CONTROL_SEQUENCE}|${OTHER_ESCAPE}|[\r\n\b]|[^\r\n\b\u001b]+`,
  'gu'
);

/** Writes one stream into lines that it shares with the other stream. */
class Cursor {
  /** The lines of this stream. */
  private readonly own: ILine[] = [];
  private row = 0;
  private column = 0;

  constructor(
    private readonly lines: ILine[],
    private readonly isError: boolean
  ) {}

  write(text: string): void {
    for (const [token, count, command] of text.matchAll(TOKEN)) {
      if (command !== undefined) {
        this.control(command, Number(count) || 0);
      } else if (token === '\n') {
        this.currentLine();
        this.row += 1;
        this.column = 0;
      } else if (token === '\r') {
        this.column = 0;
      } else if (token === '\b') {
        this.column = Math.max(0, this.column - 1);
      } else if (!token.startsWith('\u001b')) {
        const line = this.currentLine();
        line.text =
          line.text.slice(0, this.column).padEnd(this.column) +
          token +
          line.text.slice(this.column + token.length);
        this.column += token.length;
      }
    }
  }

  private control(command: string, count: number): void {
    if (command === 'A') {
      this.row = Math.max(0, this.row - Math.max(1, count));
    } else if (command === 'B') {
      const last = Math.max(this.row, this.own.length);
      this.row = Math.min(this.row + Math.max(1, count), last);
    } else if (command === 'K') {
      const line = this.currentLine();
      line.text = count === 0 ? line.text.slice(0, this.column) : '';
    }
  }

  /** The line of the cursor; a new one is added after all lines. */
  private currentLine(): ILine {
    let line = this.own[this.row];
    while (line === undefined) {
      const made = { text: '', isError: this.isError };
      this.own.push(made);
      this.lines.push(made);
      line = this.own[this.row];
    }
    return line;
  }
}

export function renderLines(parts: ILogPart[]): ILine[] {
  const lines: ILine[] = [];
  const cursors = {
    stdout: new Cursor(lines, false),
    stderr: new Cursor(lines, true)
  };
  for (const { stream, text } of parts) {
    cursors[stream].write(text);
  }
  for (const line of lines) {
    line.text = line.text.trimEnd();
  }
  return lines;
}
