import { describe, expect, it } from 'vitest';

import {
  type IRankOutput,
  isRankOutput,
  selectLines,
  trailingLabelWidth
} from '../rankLines';

const BAR = '│';
const RED_BAR = '\u001b[31m┃\u001b[0m';

/** Even and odd ranks, a line of rank 1, the label of a figure. */
const TEXT = [
  `ranks 0,2 ${BAR} even`,
  `ranks 1,3 ${BAR} odd`,
  `rank 1    ${BAR} mine`,
  '\u001b[34mrank 1\u001b[0m'
].join('\n');
const OUTPUT: IRankOutput = {
  version: 2,
  ranks: [0, 1, 2, 3],
  groups: [[0, 2], [1, 3], [1], []],
  lines: [
    [1, 0, 12],
    [1, 1, 12],
    [1, 2, 12],
    [1, 3, 0]
  ]
};

describe('isRankOutput', () => {
  it('accepts both versions with their fields', () => {
    expect(isRankOutput(OUTPUT)).toBe(true);
    expect(isRankOutput({ version: 1, ranks: [0], width: 6 })).toBe(true);
  });

  it.each([
    [null],
    ['text'],
    [{ version: 1, ranks: [0] }],
    [{ version: 2, ranks: [0], groups: [] }],
    [{ version: 2, groups: [], lines: [] }],
    [{ version: 3, ranks: [0], groups: [], lines: [] }]
  ])('rejects %j', data => {
    expect(isRankOutput(data)).toBe(false);
  });
});

describe('selectLines', () => {
  it('is the whole text for all ranks, or without data', () => {
    expect(selectLines(TEXT, OUTPUT, null)).toEqual(TEXT.split('\n'));
    expect(selectLines(TEXT, null, 1)).toEqual(TEXT.split('\n'));
  });

  it('is empty for an empty text', () => {
    expect(selectLines('', OUTPUT, null)).toEqual([]);
    expect(selectLines('', OUTPUT, 1)).toEqual([]);
  });

  it('has the lines of one rank, without labels', () => {
    expect(selectLines(TEXT, OUTPUT, 0)).toEqual(['even']);
    expect(selectLines(TEXT, OUTPUT, 1)).toEqual(['odd', 'mine']);
    expect(selectLines(TEXT, OUTPUT, 3)).toEqual(['odd']);
  });

  it('takes lines after the last run for all ranks', () => {
    const text = `${TEXT}\nnote`;
    expect(selectLines(text, OUTPUT, 2)).toEqual(['even', 'note']);
  });
});

describe('selectLines with version 1', () => {
  const output: IRankOutput = { version: 1, ranks: [0, 1, 2], width: 9 };
  const text = [
    `ranks 0-2 ${BAR} all`,
    `\u001b[34mrank 1    \u001b[31m${BAR} one`,
    `          ${BAR} more of one`,
    `ranks 0,2 ${RED_BAR} error`,
    'note'
  ].join('\n');

  it('reads the ranks from the labels', () => {
    expect(selectLines(text, output, 1)).toEqual([
      'all',
      'one',
      'more of one',
      'note'
    ]);
  });

  it('keeps the mark of stderr', () => {
    expect(selectLines(text, output, 2)).toEqual([
      'all',
      `${RED_BAR} error`,
      'note'
    ]);
  });
});

describe('trailingLabelWidth', () => {
  it('is the width of a label at the end, without its colour', () => {
    expect(trailingLabelWidth(TEXT, OUTPUT)).toBe('rank 1'.length);
  });

  it('is 0 if the text ends with a line of a rank', () => {
    const lines = OUTPUT.lines?.slice(0, 3) ?? [];
    const text = TEXT.split('\n').slice(0, 3).join('\n');
    expect(trailingLabelWidth(text, { ...OUTPUT, lines })).toBe(0);
  });

  it('is 0 if lines follow the label, or without data', () => {
    expect(trailingLabelWidth(`${TEXT}\nnote`, OUTPUT)).toBe(0);
    expect(trailingLabelWidth(TEXT, null)).toBe(0);
  });
});
