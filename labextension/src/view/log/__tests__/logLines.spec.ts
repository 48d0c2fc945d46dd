import { describe, expect, it } from 'vitest';

import { translate } from '../../../__tests__/data';
import type { ILog } from '../../../protocol/types';
import { findLines, MAX_LINES, noteOf, splitMatches } from '../logLines';

function makeLog(rank: number, text: string, isCut = false): ILog {
  return { rank, parts: [{ stream: 'stdout', text }], is_cut: isCut };
}

const LOGS = [makeLog(0, 'Loss 1\nok\n'), makeLog(10, 'loss 2\n')];

describe('findLines', () => {
  it('labels the lines of all ranks, aligned', () => {
    expect(findLines(LOGS, 'all', '').map(line => line.text)).toEqual([
      ' 0 │ Loss 1',
      ' 0 │ ok',
      '10 │ loss 2'
    ]);
  });

  it('does not label the lines of one rank', () => {
    const found = findLines(LOGS.slice(1), 10, '');
    expect(found).toEqual([{ text: 'loss 2', isError: false }]);
  });

  it('finds lines in any case', () => {
    expect(findLines(LOGS, 'all', 'LOSS').map(line => line.text)).toEqual([
      ' 0 │ Loss 1',
      '10 │ loss 2'
    ]);
    expect(findLines(LOGS, 'all', 'absent')).toEqual([]);
  });

  it('is empty without logs', () => {
    expect(findLines([], 'all', '')).toEqual([]);
  });
});

describe('noteOf', () => {
  it('counts the lines that were found', () => {
    expect(noteOf(LOGS, 2, 'loss', translate)).toBe('2 lines');
    expect(noteOf(LOGS, 0, 'absent', translate)).toBe('0 lines');
  });

  it('states that there is no output, or that only its end is shown', () => {
    expect(noteOf([makeLog(0, '')], 0, '', translate)).toBe('no output yet');
    expect(noteOf([makeLog(0, 'a', true)], 1, '', translate)).toBe(
      'only the last lines'
    );
    expect(noteOf(LOGS, MAX_LINES + 1, '', translate)).toBe(
      'only the last lines'
    );
    expect(noteOf(LOGS, MAX_LINES, '', translate)).toBe('');
  });
});

describe('splitMatches', () => {
  it('marks every match, in any case', () => {
    expect(splitMatches('Loss: the loss', 'LOSS')).toEqual([
      { text: 'Loss', isMatch: true },
      { text: ': the ', isMatch: false },
      { text: 'loss', isMatch: true }
    ]);
  });

  it('is one part without a search or a match', () => {
    expect(splitMatches('loss', '')).toEqual([
      { text: 'loss', isMatch: false }
    ]);
    expect(splitMatches('loss', 'x')).toEqual([
      { text: 'loss', isMatch: false }
    ]);
  });

  it('takes special characters and HTML literally', () => {
    const text = String.raw`<b>a.b(c)[d]{e}^f$g|h\i*j+k?l/m-n</b>`;
    expect(splitMatches(text, text)).toEqual([{ text, isMatch: true }]);
    expect(splitMatches('axb', 'a.b')).toEqual([
      { text: 'axb', isMatch: false }
    ]);
    expect(splitMatches('<i>1</i>', '<i>')).toEqual([
      { text: '<i>', isMatch: true },
      { text: '1</i>', isMatch: false }
    ]);
  });

  it('marks the right place after a letter whose lower case is longer', () => {
    expect(splitMatches('İİ loss', 'LOSS')).toEqual([
      { text: 'İİ ', isMatch: false },
      { text: 'loss', isMatch: true }
    ]);
  });
});
