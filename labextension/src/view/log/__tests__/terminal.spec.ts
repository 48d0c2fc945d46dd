import { describe, expect, it } from 'vitest';

import type { ILogPart } from '../../../protocol/types';
import { renderLines } from '../terminal';

function out(text: string): ILogPart {
  return { stream: 'stdout', text };
}

function err(text: string): ILogPart {
  return { stream: 'stderr', text };
}

function texts(...parts: ILogPart[]): string[] {
  return renderLines(parts).map(line => line.text);
}

describe('renderLines', () => {
  it('has the last state of bars, among the lines of stdout', () => {
    const parts = [
      err('\r  0%|   |\r 50%|## |'),
      out('epoch 1\n\u001b[31mred\u001b[0m and '),
      err('\r100%|###|\n'),
      out('more\nab\bc\n'),
      // Two bars, as tqdm draws them: down, back up, over the first.
      err('outer 0\ninner 0\u001b[A\router 1\n\u001b[Kend\n')
    ];
    expect(renderLines(parts)).toEqual([
      { text: '100%|###|', isError: true },
      { text: 'epoch 1', isError: false },
      { text: 'red and more', isError: false },
      { text: 'ac', isError: false },
      { text: 'outer 1', isError: true },
      { text: 'end', isError: true }
    ]);
  });

  it('keeps the rest of a line that is overwritten in part', () => {
    expect(texts(out('100 %\r 99'))).toEqual([' 99 %']);
    expect(texts(out('100 %\r 99\u001b[K'))).toEqual([' 99']);
    expect(texts(out('100 %\u001b[2K'))).toEqual(['']);
  });

  it('joins output that was read in pieces', () => {
    expect(texts(out('a'), out('b\n'), out('c'))).toEqual(['ab', 'c']);
  });

  it('keeps empty lines, and drops spaces at the end', () => {
    expect(texts(out('a  \n\nb\n'))).toEqual(['a', '', 'b']);
    expect(texts()).toEqual([]);
  });

  it('removes titles and other escapes', () => {
    expect(
      texts(out('\u001b]0;title\u0007a\u001b]8;;x\u001b\\b\u001b=c'))
    ).toEqual(['abc']);
  });

  it('moves down by one line at most beyond the last', () => {
    expect(texts(out('a\u001b[100000Bb\nc'))).toEqual(['a', ' b', 'c']);
  });

  it('does not move above the first line', () => {
    expect(texts(out('a\u001b[5A\rb'))).toEqual(['b']);
    expect(texts(out('\b\bx'))).toEqual(['x']);
  });
});
